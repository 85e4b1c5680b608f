# SPDX-License-Identifier: Apache-2.0
"""The least makespan of any schedule of a small problem, by exhaustive search: nothing here knows about bounds.

A* over partial schedules: actions are placed in the order of their starts, each as early as it can. Of two partial
schedules that ran the same actions, one that is nowhere later than the other replaces it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple

from hypothesis import strategies as st

from schedules import (
    Costs,
    Graph,
    Placement,
    Problem,
    Schedule,
    SizeError,
    Sizes,
    bidirectional,
    bound,
    chain,
    linear,
    looped,
    vee,
)
from schedules.files.csv import table
from schedules.playing.costs import ROUNDING

# -------- The least makespan of any schedule of a small problem, by exhaustive search: nothing here knows about bounds

ANY_SIZES = Sizes()
TASKS = {"F": "F", "I": "I", "W": "W", "B": "IW"}
"""What an action does: a whole backward does both halves."""


class Task(NamedTuple):
    """What has to be done once: a forward, an input half or a weight half of a microbatch on a stage."""

    kind: str
    stage: int
    microbatch: int


class Partial(NamedTuple):
    """What is done and when it ended, the clock and memory of each rank, the last start, and the actions by rank."""

    ends: dict[Task, float]
    clocks: tuple[float, ...]
    held: tuple[float, ...]
    start: float
    actions: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Case:
    """A small problem. `memory` is per rank, in the units of `sizes`, without weights."""

    costs: Costs
    placement: Placement
    microbatches: int
    memory: tuple[float, ...]
    sizes: Sizes = ANY_SIZES
    split: bool = True
    backward: bool = True
    links: Graph | None = None
    in_order: bool = True

    @property
    def problem(self) -> Problem:
        how = self.sizes, self.links, self.split, self.backward
        return Problem(self.costs, self.placement, self.microbatches, self.memory, *how)

    @cached_property
    def graph(self) -> Graph:
        return self.links or chain(self.placement.stages)

    @cached_property
    def tasks(self) -> list[Task]:
        kinds, stages = "FIW" if self.backward else "F", range(self.placement.stages)
        return [Task(kind, s, i) for kind in kinds for s in stages for i in range(self.microbatches)]

    @cached_property
    def kinds(self) -> str:
        return ("FIWB" if self.split else "FB") if self.backward else "F"

    def rank(self, task: Task) -> int:
        return self.placement.home(task.stage, task.microbatch)

    @cached_property
    def needs(self) -> dict[Task, list[tuple[Task, float]]]:
        """Per task, those before it, with the transfer."""
        found = {}
        for task in self.tasks:
            kind, s, i = task
            own = {"F": [], "I": [Task("F", s, i)], "W": [Task("I", s, i)]}[kind]
            peers = {"F": self.graph.fed_by[s], "I": self.graph.pulled_by[s], "W": ()}[kind]
            others = [Task(kind, t, i) for t in peers]
            what = "F" if kind == "F" else "B"
            times = [self.costs.transfer(what, one.stage, self.rank(one), self.rank(task)) for one in others]
            found[task] = [*((one, 0.0) for one in own), *zip(others, times, strict=True)]
        return found

    @cached_property
    def used_by(self) -> dict[Task, list[tuple[Task, float]]]:
        found = {task: list[tuple[Task, float]]() for task in self.tasks}
        for task, needs in self.needs.items():
            for one, transfer in needs:
                found[one].append((task, transfer))
        return found

    def least(self, task: Task) -> float:
        """The least time that this task takes by itself."""
        first = self.costs.time("F" if task.kind == "F" else "B", task.stage)
        if task.kind == "F":
            return first
        half = self.costs.time("I", task.stage)
        if task.kind == "I":
            return min(first, half) if self.split else first
        return max(0.0, min(first - half, self.costs.time("W", task.stage))) if self.split else 0.0

    @cached_property
    def tails(self) -> dict[Task, float]:
        """Per task, the least time after its end."""
        found = dict[Task, float]()
        order = [task for s in range(self.placement.stages) for task in self.tasks if task.stage == s]
        for task in [*(t for t in order if t.kind != "F"), *(t for t in reversed(order) if t.kind == "F")]:
            after = (transfer + self.least(t) + found.get(t, 0.0) for t, transfer in self.used_by[task])
            found[task] = max(after, default=0.0)
        return found

    def choices(self, partial: Partial) -> Iterator[tuple[str, Task, int, float, float]]:
        """Yield every action that can come next: its kind, first task, rank, start and end."""
        for kind in self.kinds:
            for s in range(self.placement.stages):
                open_ = [i for i in range(self.microbatches) if Task(TASKS[kind][0], s, i) not in partial.ends]
                routes = len(self.placement.routes)
                firsts = [next((i for i in open_ if i % routes == r), None) for r in range(routes)]
                for i in [i for i in firsts if i is not None] if self.in_order else open_:
                    task = Task(TASKS[kind][0], s, i)
                    rank = self.rank(task)
                    if any(one not in partial.ends for one, _ in self.needs[task]):
                        continue
                    grown = partial.held[rank] + self.sizes.growth(kind, s, self.backward)
                    if grown > self.memory[rank] + ROUNDING and kind == "F":
                        continue
                    arrivals = [partial.ends[one] + transfer for one, transfer in self.needs[task]]
                    start = max(partial.clocks[rank], *arrivals, 0.0)
                    yield kind, task, rank, start, start + self.costs.time(kind, s)

    def extend(self, partial: Partial) -> Iterator[Partial]:
        """Yield every way to place one more action, not before the last; what costs nothing fits into no wait."""
        choices = list(self.choices(partial))
        for kind, task, rank, start, end in choices:
            ends = (other[4] for other in choices if other[2] == rank and self.is_free(other[0], other[1]))
            if start < partial.start or any(other <= start for other in ends):
                continue
            done = [task._replace(kind=one) for one in TASKS[kind]]
            clocks = tuple(end if r == rank else clock for r, clock in enumerate(partial.clocks))
            growth = self.sizes.growth(kind, task.stage, self.backward)
            held = tuple(size + growth if r == rank else size for r, size in enumerate(partial.held))
            name = f"{task.stage}{kind}{task.microbatch}"
            ends = {**partial.ends, **dict.fromkeys(done, end)}
            yield Partial(ends, clocks, held, start, (*partial.actions, (rank, name)))

    def is_free(self, kind: str, task: Task) -> bool:
        """Return whether the action may as well run while its rank waits: it takes no memory, nor any choice."""
        if kind == "F":
            return self.memory[self.rank(task)] == inf
        return kind != "I" or self.costs.time("W", task.stage) <= self.costs.time("B", task.stage)

    def remaining(self, partial: Partial) -> float:
        """Return a lower bound on the makespan: what is left to do on each rank, and for each microbatch."""
        left, latest = [0.0] * self.placement.ranks, max(partial.clocks)
        for task in self.tasks:
            if task not in partial.ends:
                owed = task.kind == "W" and task._replace(kind="I") in partial.ends
                takes = self.costs.time("W", task.stage) if owed else self.least(task)
                left[self.rank(task)] += takes
                done = (partial.ends[one] + transfer for one, transfer in self.needs[task] if one in partial.ends)
                latest = max(latest, max(done, default=0.0) + takes + self.tails[task])
        ends = [max(c, partial.start) + more for c, more in zip(partial.clocks, left, strict=True) if more]
        return max(latest, *ends, 0.0)

    def key(self, partial: Partial) -> tuple[frozenset[Task], tuple[float, ...]]:
        """Return what is done, and the times that still matter: those before the last start do not."""
        times = [max(clock, partial.start) for clock in partial.clocks]
        for task in self.tasks:
            if task in partial.ends:
                waits = [transfer for user, transfer in self.used_by[task] if user not in partial.ends]
                times += [max(partial.ends[task] + transfer, partial.start) for transfer in waits]
        return frozenset(partial.ends), tuple(times)


@dataclass(frozen=True)
class Optimum:
    """The least makespan, infinity if nothing fits, and the actions of a schedule that has it, each with its rank."""

    makespan: float
    actions: tuple[tuple[int, str], ...]

    @property
    def schedule(self) -> Schedule:
        """The schedule, if every rank has something to do."""
        ranks = 1 + max(rank for rank, _ in self.actions)
        return table(rows=tuple(",".join(name for r, name in self.actions if r == rank) for rank in range(ranks)))


def find_optimum(case: Case, most: int = 20_000) -> Optimum | None:
    """Return the optimum, or `None` if it is not found after `most` partial schedules."""
    empty = (0.0,) * case.placement.ranks
    order, seen = count(), dict[frozenset[Task], list[tuple[float, ...]]]()
    heap = [(0.0, 0, 0, Partial({}, empty, empty, 0.0, ()))]
    for _ in range(most):
        if not heap:
            return Optimum(inf, ())
        least, _, _, partial = heappop(heap)
        if len(partial.ends) == len(case.tasks):
            return Optimum(least, partial.actions)
        for longer in case.extend(partial):
            done, times = case.key(longer)
            others = seen.setdefault(done, [])
            if any(all(a <= b for a, b in zip(other, times, strict=True)) for other in others):
                continue
            others[:] = [o for o in others if not all(b <= a for a, b in zip(o, times, strict=True))] + [times]
            heappush(heap, (max(least, case.remaining(longer)), -len(longer.ends), next(order), longer))
    return None


# ---------------------------------------------------------------- Problems that are small enough for exhaustive search

PLACEMENTS = [linear(2), linear(3), vee(2), looped(2, 2), linear(1, 2), bidirectional(2), Placement(3, (2, 0))]


@st.composite
def cases(draw):
    placement = draw(st.sampled_from(PLACEMENTS))
    S, P = placement.stages, placement.ranks
    time, some = st.integers(1, 8), st.tuples(*[st.integers(1, 3)] * S)
    passes = dict.fromkeys("FBIW", time | st.tuples(*[time] * S))
    costs = draw(st.builds(Costs, **passes, comm=st.integers(0, 3)))
    sizes = draw(st.sampled_from([Sizes(), Sizes(residual=0.5)]) | st.builds(Sizes, activation=some, residual=some))
    memory = tuple(draw(st.integers(1, 8) | st.just(inf)) for _ in range(P))
    microbatches = draw(st.integers(1, 4 if S == 2 else 3))
    return Case(costs, placement, microbatches, memory, sizes, draw(st.booleans()), draw(st.booleans()))


def bound_case(case):
    """Return the least makespan that the bound leaves, or infinity if it says that nothing fits."""
    try:
        return bound(case.problem).makespan
    except SizeError:
        return inf


def is_searchable(case):
    """Return whether every rank has something to do, and no half keeps more than its forward did."""
    routes, stages = case.placement.routes[: case.microbatches], range(case.placement.stages)
    busy = {rank for route in routes for rank in route} == set(range(case.placement.ranks))
    shrinks = all(case.sizes.growth("I", s) <= 0 for s in stages)
    return busy and shrinks and len(routes) == len(case.placement.routes)
