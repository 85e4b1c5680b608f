# SPDX-License-Identifier: Apache-2.0
"""The problem that a schedule solves: passes of stages on ranks, their times, transfers, and memory.

`Problem.stages` are what lower bounds are about. Every schedule of forwards and backwards, whole or split, fused or
not, is turned into one with forwards, input halves and weight halves only that ends no later, so bounds are proved for
those:

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
from functools import cached_property
from math import inf
from typing import TypeAlias

from schedules.arguments import MOST_ENTRIES, is_number, is_size, require_types
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
    """A problem that a schedule solves: `bound` says how long it takes at least, and `play` and `search` find one.

    - `costs`, `placement`, `microbatches`: the times of passes and transfers, and what they are of.
    - `memory`: the most that a rank may hold, one number or one per rank, in the units of `Timeline.peak_memory`.
    - `sizes`: the memory of stages; without, activations are counted.
    - `graph`: the stage graph, by default the chain.
    - `split`: true if backwards may be split. A bound then holds for schedules with whole backwards, too.
    - `backward`: false for schedules without backwards, which save nothing.

    Raise `SizeError` or `GraphError` for values that do not fit together.

    >>> from schedules import vee
    >>> [(one.stage, one.rank, one.pulled_by) for one in Problem(Costs(comm=3), vee(2), microbatches=1).stages]
    [(0, 0, ((1, 3),)), (1, 1, ((2, 0),)), (2, 1, ((3, 3),)), (3, 0, ())]
    """

    costs: Costs
    placement: Placement
    microbatches: int
    memory: float | tuple[float, ...] = inf
    sizes: Sizes | None = None
    graph: Graph | None = None
    split: bool = True
    backward: bool = True

    def __post_init__(self) -> None:
        given = {name: one for name, one in vars(self).items() if name not in ("memory", "microbatches")}
        require_types(Problem.__init__, given)
        if not is_size(self.microbatches, most=MOST_ENTRIES):
            expected = f"an integer of at least 1, and at most {MOST_ENTRIES}"
            raise SizeError.of("Problem", "microbatches", self.microbatches, expected, "Choose microbatches >= 1.")
        stages, ranks, caps = self.placement.stages, self.ranks, self._caps
        for values in (self.costs, self.unit_sizes):
            require_stages(values, stages)
        if self.graph is not None and self.graph.stages != stages:
            raise GraphError(
                f"Problem: got a graph of {self.graph.stages} stages, expected {stages}: as many as are placed. "
                "Cut the model into as many stages, or place as many."
            )
        if len(caps) != ranks or not all(is_number(cap) and 0 <= cap <= inf for cap in caps):
            expected = f"a number of at least 0, or a tuple of {ranks}: one for each rank"
            raise SizeError.of("Problem", "memory", self.memory, expected, "Correct memory.")

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.placement.ranks

    @property
    def unit_sizes(self) -> Sizes:
        """The sizes, by default those that count activations."""
        return self.sizes or UNITS

    @property
    def _caps(self) -> tuple[float, ...]:
        return self.memory if isinstance(self.memory, tuple) else (self.memory,) * self.ranks

    @cached_property
    def room(self) -> tuple[float, ...]:
        """Per rank, the memory for activations, in units of the stages' sizes, without that for weights.

        Weights count a little less than they are: what is left is not exact if they fill most of a rank.
        """
        if self.sizes is None:
            return tuple(most * self.placement.stages / self.ranks for most in self._caps)
        return tuple(most - (1 - ROUNDING) * self.weigh(rank) for rank, most in enumerate(self._caps))

    def weigh(self, rank: int) -> float:
        """Return the size of the weights on a rank."""
        return sum(of_stage(self.unit_sizes.weight, s) for s in self.placement.stages_on(rank))

    @cached_property
    def stages(self) -> tuple[PlacedStage, ...]:
        """All stages, route by route, numbered so that values come from lower numbers."""
        links = self.graph or chain(self.placement.stages)
        links = links if self.backward else Graph(links.stages, links.values, frozenset())
        routes = self.placement.routes
        found = list[PlacedStage]()
        for route in range(min(self.microbatches, len(routes))):
            mine = range(route, self.microbatches, len(routes))
            for s, rank in enumerate(routes[route]):
                held = _held(self.unit_sizes, s, self.backward)
                times = _times(self.costs, s, self.split, self.backward)
                hops = _find_hops(self.costs, self.placement, links, s, route)
                found.append(PlacedStage(s, rank, mine, *times, *held, *hops))
        return tuple(found)

    def on(self, rank: int) -> list[int]:
        """Return the numbers of the stages on a rank."""
        return [number for number, stage in enumerate(self.stages) if stage.rank == rank]


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
