# SPDX-License-Identifier: Apache-2.0
"""Bound the makespan from below: no schedule with these costs, on this placement, in this memory, is faster.

Problem. A search can say how good its best schedule is, but not how good one could be.

Idea. Every schedule obeys the same few facts: passes take time, depend on each other, and share ranks and memory. Each
part of a bound uses some of these facts and ignores the others; the largest part wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from schedules.analysis.bounds.chains import ChainTimes, time_chain
from schedules.analysis.bounds.problem import Problem, pose, read_memory
from schedules.errors import GraphError, SizeError
from schedules.language.costs import Costs, Sizes
from schedules.language.graph import Graph, chain
from schedules.language.placement import Placement


class Reason(NamedTuple):
    """One lower bound on the makespan, and the reason for it."""

    because: str
    makespan: float


@dataclass(frozen=True)
class Bound:
    """A lower bound on the makespan: `parts` are the arguments that were tried, largest first.

    >>> from schedules import linear
    >>> least = bound(Costs(F=1, B=2), linear(ranks=2), microbatches=3, split=False)
    >>> least.makespan
    12.0
    """

    parts: tuple[Reason, ...]

    @property
    def makespan(self) -> float:
        """The largest of the bounds: no schedule takes less time."""
        return self.parts[0].makespan

    @property
    def because(self) -> str:
        """The argument that gives it, in words."""
        return self.parts[0].because


def bound(
    costs: Costs,
    placement: Placement,
    microbatches: int,
    *,
    memory: float | tuple[float, ...] = inf,
    sizes: Sizes | None = None,
    split: bool = True,
    backward: bool = True,
    graph: Graph | None = None,
) -> Bound:
    """Return a lower bound on `simulate(...).makespan` of every schedule that obeys the rules of `check`.

    - `memory`: the most that a rank may hold, one number or one per rank, in the units of `Timeline.peak_memory`.
    - `split`: true if backwards may be split. Then a bound also holds for those that are not.
    - `backward`: false for schedules without backwards, which save nothing.
    - `graph`: the stage graph, by default the chain.

    It holds for schedules of forwards and backwards, fused or not. Recomputation, slices of a sequence, sums over
    stages, updates and collectives are not covered.

    Raise `SizeError` for costs or sizes of another number of stages, and if nothing fits into the memory: the message
    says the least that would.
    """
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise SizeError.of(
            "bound", "microbatches", microbatches, "an integer of at least 1", "Choose microbatches >= 1."
        )
    if graph is not None and graph.stages != placement.stages:
        raise GraphError(f"got a graph of {graph.stages} stages, expected {placement.stages}, as many as are placed.")
    caps = read_memory(memory, placement.ranks)
    links = chain(placement.stages) if graph is None else graph
    problem = pose(costs, placement, microbatches, links, sizes, caps, split, backward)
    times = time_chain(problem)
    parts = [Reason("one microbatch alone takes that long", times.longest)]
    parts += [_bound_rank(problem, times, rank) for rank in range(problem.ranks) if problem.on(rank)]
    return Bound(tuple(sorted(parts, key=lambda part: -part.makespan)))


def _bound_rank(problem: Problem, times: ChainTimes, rank: int) -> Reason:
    """Return the time that one rank waits for its first input, plus that of its work."""
    numbers = problem.on(rank)
    work = sum(problem.stages[n].work for n in numbers)
    head = min(times.forward[n] for n in numbers)
    if not problem.backward:
        tail = min(times.after_forward[n] - problem.stages[n].forward for n in numbers)
    else:
        ends = [(times.after_input_half[n], problem.stages[n]) for n in numbers]
        tail = min(0.0 if one.weight_half else after - one.input_half for after, one in ends)
    text = f"rank {rank} works {work:g}, after {head:g} until its first input and {tail:g} before the end"
    return Reason(text, head + work + tail)
