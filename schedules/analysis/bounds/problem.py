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

from schedules.arguments import MOST_ENTRIES, is_number, is_size
from schedules.errors import GraphError, SizeError
from schedules.language.graph import Graph, chain
from schedules.language.placement import Placement
from schedules.playing.costs import ROUNDING, UNITS, Costs, Sizes, of_stage, require_stages

Hops: TypeAlias = tuple[tuple[int, float], ...]
"""Other stages, each with the time of a transfer to or from it."""


@dataclass(frozen=True)
class PlacedStage:
    """A stage on one route: its rank, its microbatches, and the times and memory of each of them.

    `fed_by` and `feeds` are the stages that values come from and go to; `pulled_by` and `pulls` those that cotangents
    come from and go to. `activation` is held from the start of the forward to the end of the input half, and `residual`
    of it to the end of the weight half.
    """

    stage: int
    rank: int
    microbatches: range
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
        return len(self.microbatches) * (self.forward + self.input_half + self.weight_half)


@dataclass(frozen=True)
class Problem:
    """All stages, numbered so that values come from lower numbers, and the `memory` of each rank for activations."""

    stages: tuple[PlacedStage, ...]
    memory: tuple[float, ...]
    split: bool = True
    backward: bool = True

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
    memory: float | tuple[float, ...] = inf,
    sizes: Sizes | None = None,
    split: bool = True,
    backward: bool = True,
    graph: Graph | None = None,
) -> Problem:
    """Return the problem. Raise `SizeError` or `GraphError` for values that do not fit together.

    >>> from schedules import vee
    >>> [(stage.stage, stage.rank, stage.pulled_by) for stage in pose(Costs(comm=3), vee(2), microbatches=1).stages]
    [(0, 0, ((1, 3),)), (1, 1, ((2, 0),)), (2, 1, ((3, 3),)), (3, 0, ())]
    """
    if not is_size(microbatches, most=MOST_ENTRIES):
        expected = f"an integer of at least 1, and at most {MOST_ENTRIES}"
        raise SizeError.of("bound", "microbatches", microbatches, expected, "Choose microbatches >= 1.")
    for values in (costs, sizes or UNITS):
        require_stages(values, placement.stages)
    if graph is not None and graph.stages != placement.stages:
        raise GraphError(
            f"got a graph of {graph.stages} stages, expected {placement.stages}: as many as are placed. "
            "Cut the model into as many stages, or place as many."
        )
    caps = _read_memory(memory, placement.ranks)
    links = chain(placement.stages) if graph is None else graph
    links = links if backward else Graph(links.stages, links.values, frozenset())
    stages = list[PlacedStage]()
    for route in range(min(microbatches, len(placement.routes))):
        mine = range(route, microbatches, len(placement.routes))
        for s, rank in enumerate(placement.routes[route]):
            times, held = _times(costs, s, split, backward), _held(sizes or UNITS, s, backward)
            hops = _find_hops(costs, placement, links, s, route)
            stages.append(PlacedStage(s, rank, mine, *times, *held, *hops))
    return Problem(tuple(stages), _find_room(placement, sizes, caps), split, backward)


def _find_hops(costs: Costs, placement: Placement, graph: Graph, s: int, route: int) -> tuple[Hops, Hops, Hops, Hops]:
    """Return the stages that a stage gets values from and sends them to, and the same for cotangents."""
    homes, first = placement.routes[route], route * placement.stages

    def hops(what: str, ends: list[tuple[int, int]], other: int) -> Hops:
        return tuple((first + end[other], costs.transfer(what, end[0], homes[end[0]], homes[end[1]])) for end in ends)

    return (
        hops("F", [(t, s) for t in graph.fed_by[s]], 0),
        hops("F", [(s, t) for t in graph.feeds[s]], 1),
        hops("B", [(t, s) for t in graph.pulled_by[s]], 0),
        hops("B", [(s, t) for t in graph.pulls[s]], 1),
    )


def _times(costs: Costs, stage: int, split: bool, backward: bool) -> tuple[float, float, float]:
    """Return the least times of a forward, an input half and a weight half."""
    least = 1 - costs.jitter
    forward = min(costs.time("F", stage), costs.time("OVERLAP_F", stage)) * least
    if not backward:
        return forward, 0.0, 0.0
    whole = costs.time("B", stage) * least
    if not split:
        return forward, whole, 0.0
    first, second = costs.time("I", stage) * least, costs.time("W", stage) * least
    return forward, min(first, whole), max(0.0, min(first + second, whole) - min(first, whole))


def _held(sizes: Sizes, stage: int, backward: bool) -> tuple[float, float]:
    """Return the memory that a forward takes and that an input half leaves; no more than all of it counts."""
    taken = sizes.growth("F", stage, backward)
    return taken, min(taken, taken + sizes.growth("I", stage, backward))


def _find_room(placement: Placement, sizes: Sizes | None, memory: tuple[float, ...]) -> tuple[float, ...]:
    """Return the memory of each rank for activations, in units of the stages' sizes, without that for weights.

    Weights count a little less than they are: what is left is not exact if they fill most of a rank.
    """
    if sizes is None:
        return tuple(most * placement.stages / placement.ranks for most in memory)
    return tuple(most - (1 - ROUNDING) * _weigh(placement, sizes, rank) for rank, most in enumerate(memory))


def _weigh(placement: Placement, sizes: Sizes, rank: int) -> float:
    return sum(of_stage(sizes.weight, s) for s in placement.stages_on(rank))


def _read_memory(memory: float | tuple[float, ...], ranks: int) -> tuple[float, ...]:
    """Return the memory of each rank. Raise `SizeError` for anything but a number, or one per rank."""
    caps = memory if isinstance(memory, tuple) else (memory,) * ranks
    if len(caps) != ranks or not all(is_number(cap) and 0 <= cap <= inf for cap in caps):
        expected = f"a number of at least 0, or a tuple of {ranks}: one for each rank"
        raise SizeError.of("bound", "memory", memory, expected, "Correct memory.")
    return caps


def require_room(problem: Problem, least: tuple[float, ...], placement: Placement, sizes: Sizes | None) -> None:
    """Raise `SizeError` if a rank has less than the `least` room for activations that one microbatch needs.

    The message is about the rank that lacks most.
    """
    both = zip(problem.memory, least, strict=True)
    short = [(needs - has, rank) for rank, (has, needs) in enumerate(both) if needs > has * (1 + ROUNDING)]
    if not short:
        return
    rank = max(short, key=lambda one: one[0])[1]
    unit = placement.ranks / placement.stages if sizes is None else 1.0
    weight = 0.0 if sizes is None else _weigh(placement, sizes, rank)
    raise SizeError.of(
        "bound",
        "memory",
        float(f"{problem.memory[rank] * unit + weight * (1 - ROUNDING):.12g}"),
        f"at least the {least[rank] * unit + weight:.12g} that rank {rank} needs for one microbatch",
        "Choose more memory, or smaller stages.",
    )
