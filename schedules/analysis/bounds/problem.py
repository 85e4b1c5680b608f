# SPDX-License-Identifier: Apache-2.0
"""The problem that lower bounds are about: passes of stages on ranks, their times, transfers, and memory.

Every schedule of forwards and backwards, whole or split, fused or not, is turned into one with forwards, input halves
and weight halves only that ends no later, so bounds are proved for those:

- Jitter multiplies times by at least `1 - jitter`. With shorter actions, the same orders end no later.
- A fused pair becomes a forward of time `min(F, OVERLAP_F)` followed by its backward: the forward's output leaves
  earlier, and the pair ends no later.
- A whole `B` becomes an input half of time `min(I, B)` followed at once by a weight half, in `B` together at most. If
  backwards may not be split, the input half takes the time of `B` and the weight half none.

All microbatches of a stage cost the same. So, without loss of generality, each stage runs its forwards in order of
microbatch, and its input halves and weight halves, too. Proof: give the `k`-th forward that a stage starts, counted in
time, to microbatch `k`, and so for the halves. When the stage starts its `k`-th forward, `k` microbatches have gone
through each stage that feeds it, and been transferred; so the `k`-th forward of that stage ended at least one transfer
earlier. The same holds for cotangents, and within a stage. Times and memory stay what they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from schedules.errors import SizeError
from schedules.language.costs import UNITS, Costs, Sizes, of_stage, require_stages
from schedules.language.graph import Graph
from schedules.language.placement import Placement

Hops: TypeAlias = tuple[tuple[int, float], ...]
"""Other stages, each with the time of a transfer to or from it."""


@dataclass(frozen=True)
class PlacedStage:
    """A stage on one route: its `rank`, the number of microbatches, and for each of them times and memory.

    `fed_by` and `feeds` are the stages that values come from and go to; `pulled_by` and `pulls` those that cotangents
    come from and go to. `activation` is held from the start of the forward, `residual` of it from the end of the input
    half to the end of the weight half.
    """

    stage: int
    rank: int
    microbatches: int
    forward: float
    input_half: float
    weight_half: float
    activation: float
    residual: float
    fed_by: Hops = ()
    feeds: Hops = ()
    pulled_by: Hops = ()
    pulls: Hops = ()

    @property
    def work(self) -> float:
        """The time that all passes take."""
        return self.microbatches * (self.forward + self.input_half + self.weight_half)


@dataclass(frozen=True)
class Problem:
    """All stages, numbered so that values come from lower numbers, and the `memory` of each rank for activations."""

    stages: tuple[PlacedStage, ...]
    memory: tuple[float, ...]
    backward: bool

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.memory)

    def on(self, rank: int) -> list[int]:
        """Return the numbers of the stages on a rank."""
        return [number for number, stage in enumerate(self.stages) if stage.rank == rank]


def pose(
    costs: Costs,
    placement: Placement,
    microbatches: int,
    graph: Graph,
    sizes: Sizes | None,
    memory: tuple[float, ...],
    split: bool,
    backward: bool,
) -> Problem:
    """Return the problem. Raise `SizeError` for costs or sizes of another number of stages."""
    S, R = placement.stages, len(placement.routes)
    for values in (costs, sizes or UNITS):
        require_stages(values, S)
    stages = list[PlacedStage]()
    for route, homes in enumerate(placement.routes):
        count = len(range(route, microbatches, R))
        if not count:
            break

        def hops(what: str, s: int, others: tuple[int, ...], out: bool, route: int = route) -> Hops:
            ends = [(s, t) if out else (t, s) for t in others]
            homes = placement.routes[route]
            times = [costs.transfer(what, a, homes[a], homes[b]) for a, b in ends]
            return tuple((route * S + t, time) for t, time in zip(others, times, strict=True))

        for s, rank in enumerate(homes):
            stages.append(
                PlacedStage(
                    s,
                    rank,
                    count,
                    *_times(costs, s, split, backward),
                    *_memory(sizes or UNITS, s, backward),
                    fed_by=hops("F", s, graph.fed_by[s], False),
                    feeds=hops("F", s, graph.feeds[s], True),
                    pulled_by=hops("B", s, graph.pulled_by[s], False) if backward else (),
                    pulls=hops("B", s, graph.pulls[s], True) if backward else (),
                )
            )
    return Problem(tuple(stages), _room(placement, sizes, memory), backward)


def _times(costs: Costs, stage: int, split: bool, backward: bool) -> tuple[float, float, float]:
    """Return the least times of a forward, an input half and a weight half."""
    least = 1 - costs.jitter
    forward = min(costs.time("F", stage), costs.time("OVERLAP_F", stage)) * least
    if not backward:
        return forward, 0, 0
    whole = costs.time("B", stage) * least
    if not split:
        return forward, whole, 0
    first, second = costs.time("I", stage) * least, costs.time("W", stage) * least
    return forward, min(first, whole), max(0.0, min(first + second, whole) - min(first, whole))


def _memory(sizes: Sizes, stage: int, backward: bool) -> tuple[float, float]:
    """Return the memory that a forward takes and that an input half leaves; no more than all of it counts."""
    taken = sizes.growth("F", stage, backward)
    return taken, min(taken, taken + sizes.growth("I", stage, backward))


def _room(placement: Placement, sizes: Sizes | None, memory: tuple[float, ...]) -> tuple[float, ...]:
    """Return the memory of each rank for activations, in units of the stages' sizes, without that for weights."""
    if sizes is None:
        return tuple(most * placement.stages / placement.ranks for most in memory)
    weights = [sum(of_stage(sizes.weight, s) for s in placement.stages_on(rank)) for rank in range(placement.ranks)]
    return tuple(most - held for most, held in zip(memory, weights, strict=True))


def read_memory(memory: float | tuple[float, ...], ranks: int) -> tuple[float, ...]:
    """Return the memory of each rank. Raise `SizeError` for anything but a number, or one per rank."""
    caps = memory if isinstance(memory, tuple) else (memory,) * ranks
    if len(caps) != ranks or not all(isinstance(cap, int | float) and 0 <= cap <= inf for cap in caps):
        expected = f"a number of at least 0, or a tuple of {ranks}: one for each rank"
        raise SizeError.of("bound", "memory", memory, expected, "Correct memory.")
    return caps
