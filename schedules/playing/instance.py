# SPDX-License-Identifier: Apache-2.0
"""One problem as plain lists: stages on ranks, their passes, times and memory.

A search plays millions of passes, so everything that a pass needs is looked up by number. A pass is a `Job`: its kind
(forward, input half, weight half), the number of its stage in the `Problem`, and the number of its microbatch among
those of the stage. Microbatches cost the same, so each stage runs the passes of a kind in order, and an order of passes
needs no names (`schedules.playing.problem`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Final, NamedTuple, TypeAlias

from schedules.errors import SizeError
from schedules.language.placement import Placement
from schedules.playing.board import PlayBoard, list_lanes, make_board
from schedules.playing.costs import ROUNDING, Cost, Costs, of_stage
from schedules.playing.problem import Hops, Problem

FORWARD: Final = 0
INPUT_HALF: Final = 1
WEIGHT_HALF: Final = 2
LETTERS: Final = "FIW"
FACTORS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)

Job: TypeAlias = tuple[int, int, int]
"""A kind, the number of a stage, and the number of a microbatch among those of the stage."""
PassOrders: TypeAlias = list[list[Job]]
"""For each rank, its passes in order."""


class Contender(NamedTuple):
    """Orders, the makespan that they take, and where they come from."""

    makespan: float
    orders: PassOrders
    origin: str


class Fence(NamedTuple):
    """A limit on what microbatches hold that have not been through the later stages of a rank.

    `parts` are the earlier stages: each with the kind and stage that a microbatch has run once it no longer counts, and
    the memory that it holds.
    """

    limit: float
    parts: tuple[tuple[int, tuple[int, int], float], ...]


@dataclass(frozen=True)
class Instance:
    """A problem for a search. Everything is indexed by the number of a stage in `problem.stages`, or by rank."""

    problem: Problem

    @property
    def placement(self) -> Placement:
        """The placement of the stages."""
        return self.problem.placement

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return self.problem.microbatches

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.problem.ranks

    @property
    def routes(self) -> int:
        """The number of routes."""
        return len(self.placement.routes)

    @cached_property
    def kinds(self) -> range:
        """The kinds of passes: without a backward only forwards, with a whole one no weight halves."""
        return range((3 if self.problem.split else 2) if self.problem.backward else 1)

    @cached_property
    def rank(self) -> tuple[int, ...]:
        """Per stage, its rank."""
        return tuple(one.rank for one in self.problem.stages)

    @cached_property
    def on(self) -> tuple[tuple[int, ...], ...]:
        """Per rank, its stages, those that run a microbatch first before the others."""
        S = self.placement.stages
        return tuple(tuple(sorted(self.problem.on(rank), key=lambda n: (n % S, n))) for rank in range(self.ranks))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Per stage, the number of its microbatches."""
        return tuple(len(one.microbatches) for one in self.problem.stages)

    @cached_property
    def times(self) -> tuple[tuple[float, ...], ...]:
        """Per kind and stage, the time of a pass."""
        stages = self.problem.stages
        return (
            tuple(one.forward for one in stages),
            tuple(one.input_half for one in stages),
            tuple(one.weight_half for one in stages),
        )

    @property
    def all_times(self) -> list[float]:
        """The times of all passes and transfers."""
        transfers = (transfer for rows in self.needs for row in rows for _, transfer in row)
        return [*(time for row in self.times for time in row), *transfers]

    @cached_property
    def board(self) -> PlayBoard:
        """All passes, by number."""
        return make_board(self.problem, [*list_lanes(self.problem)])

    @cached_property
    def jobs(self) -> list[Job]:
        """All passes in the order of their numbers."""
        lanes = ((kind, n) for row in self.on for n in row for kind in self.kinds)
        return [(kind, n, k) for kind, n in lanes for k in range(self.counts[n])]

    @cached_property
    def factor(self) -> int | None:
        """The least of some factors that makes all times whole, or `None`."""
        return next((f for f in FACTORS if all(abs(t * f - round(t * f)) < 1e-9 for t in self.all_times)), None)

    @cached_property
    def growth(self) -> tuple[tuple[float, ...], ...]:
        """Per kind and stage, the memory that a pass takes at its start, or gives back, below 0, at its end."""
        taken = tuple(one.activation for one in self.problem.stages)
        left = tuple(one.residual if self.problem.split else 0.0 for one in self.problem.stages)
        return taken, tuple(b - a for a, b in zip(taken, left, strict=True)), tuple(-size for size in left)

    @cached_property
    def needs(self) -> tuple[tuple[Hops, ...], ...]:
        """Per kind and stage, the stages whose passes of this kind come first, with the time of a transfer."""
        stages = self.problem.stages
        return tuple(one.fed_by for one in stages), tuple(one.pulled_by for one in stages), ((),) * len(stages)

    @cached_property
    def gives(self) -> tuple[tuple[Hops, ...], ...]:
        """Per kind and stage, the stages whose passes of this kind come after it, with the time of a transfer."""
        stages = self.problem.stages
        return tuple(one.feeds for one in stages), tuple(one.pulls for one in stages), ((),) * len(stages)

    @cached_property
    def caps(self) -> tuple[float, ...]:
        """Per rank, the most memory for activations, rounding allowed."""
        return tuple(most * (1 + ROUNDING) for most in self.problem.room)

    @cached_property
    def fences(self) -> tuple[tuple[Fence, ...], ...]:
        """Per stage, what a rank's memory must still have room for once a forward of the stage began."""
        return tuple(tuple(self._fence(rank, n)) for n, rank in enumerate(self.rank))

    def _fence(self, rank: int, n: int) -> Iterator[Fence]:
        """Yield a fence for each stage of the rank from `n` on that others come after."""
        row, sizes, S = self.on[rank], self.growth[FORWARD], self.placement.stages
        if self.caps[rank] == inf:
            return
        for at in range(row.index(n) + 1, len(row)):
            behind, ahead = row[:at], row[at:]
            follow = {m: next((later for later in ahead if later // S == m // S), None) for m in behind}
            parts = tuple((m, (INPUT_HALF, m) if (a := follow[m]) is None else (FORWARD, a), sizes[m]) for m in behind)
            yield Fence(self.caps[rank] - sum(sizes[m] for m in ahead), parts)

    @cached_property
    def reserve(self) -> tuple[float, ...]:
        """Per stage, the memory of one microbatch on all later stages of the same rank."""
        sizes = self.growth[FORWARD]
        return tuple(
            sum(sizes[later] for later in self.on[rank][self.on[rank].index(n) + 1 :])
            for n, rank in enumerate(self.rank)
        )

    def has_room(self, n: int, held: float, done: Sequence[Sequence[int]]) -> bool:
        """Return whether a rank that holds so much may begin a forward of stage `n`, and never gets stuck by that.

        `done` are the passes run so far, per kind and stage.
        """
        size = self.growth[FORWARD][n]
        if held + size > self.caps[self.rank[n]]:
            return False
        for limit, parts in self.fences[n]:
            taken = size
            for m, (kind, later), each in parts:
                taken += each * (done[FORWARD][m] - done[kind][later])
            if taken > limit:
                return False
        return True

    @cached_property
    def period(self) -> float:
        """The work of the busiest rank for one microbatch: no schedule takes less time for each."""
        work = [sum(self.problem.stages[n].work for n in numbers) for numbers in self.on]
        return max(work) / self.microbatches

    def fits(self, orders: PassOrders) -> bool:
        """Return whether all ranks can run their passes in these orders."""
        return all(self.is_possible(rank, order) for rank, order in enumerate(orders))

    def is_possible(self, rank: int, order: Sequence[Job]) -> bool:
        """Return whether a rank can run its passes in this order: within its memory, each after the one it needs."""
        held, cap, done = 0.0, self.caps[rank], dict[tuple[int, int], int]()
        for kind, n, k in order:
            if kind and done.get((kind - 1, n), 0) <= k:
                return False
            held += self.growth[kind][n]
            if kind == FORWARD and held > cap:
                return False
            done[kind, n] = k + 1
        return True


def make_instance(problem: Problem) -> Instance:
    """Return the instance; a backward in halves takes the time of both, and nothing is random or overlapped.

    Raise `SizeError` if a rank has nothing to do.
    """
    costs, placement = problem.costs, problem.placement
    if costs.microbatches:
        expected = "microbatches that cost the same"
        raise SizeError.of("Problem", "costs.microbatches", costs.microbatches, expected, "Use play instead of search.")
    whole = tuple(_slower(costs, s) for s in range(placement.stages)) if problem.split else costs.B
    idle = [rank for rank in range(placement.ranks) if not placement.stages_on(rank)]
    if idle or problem.microbatches < len(placement.routes):
        few = f"{problem.microbatches} microbatches for {len(placement.routes)} routes"
        got = f"nothing for rank {idle[0]}" if idle else few
        expected = "a stage on every rank, and a microbatch on every route"
        raise SizeError(f"Problem: got {got}, expected {expected}. Place fewer ranks, or add microbatches.")
    return Instance(replace(problem, costs=replace(costs, B=whole, OVERLAP_F=None, jitter=0.0)))


def _slower(costs: Costs, stage: int) -> float:
    halves: Cost = costs.time("I", stage) + costs.time("W", stage)
    return max(costs.time("B", stage), of_stage(halves, stage))
