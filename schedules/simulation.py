# SPDX-License-Identifier: Apache-2.0
"""How long a schedule takes and what it holds, without running it.

Problem. Whether a schedule is good depends on the costs; trying it on machines is slow.

Idea. `replay` plays all ranks: an action starts when its rank is free and its last value has arrived. A timeline is a
stream of `Span`s; `summarize` folds it, whether it was simulated or measured, and `simulate` does so on the way.
Nothing is kept but what is in flight.

From its first action to its last a rank is busy, or waits for others, or, where the timeline was measured, is about to
post transfers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Final, TypeAlias

from schedules.authoring import Schedule
from schedules.costs import Costs, Sizes, of_stage, require_stages
from schedules.graph import Graph
from schedules.progress import Progress
from schedules.replay import Span, replay
from schedules.rules import forward_before_backward, versions
from schedules.wiring import graph_of, wires

Row: TypeAlias = list[float]
Levels: TypeAlias = tuple[tuple[float, float], ...]
UNITS: Final = Sizes()


@dataclass(frozen=True)
class Timeline:
    """What a timeline amounts to.

    - `makespan`: from the first start to the last end on any rank.
    - `span`: the longest time from one rank's first start to its last end (arXiv 2401.10241, section 5.3).
    - `busy`: per rank, the time spent in actions.
    - `waited`: per rank, the time from its first action to its last that it waited for others.
    - `peak_memory`: per rank, the most that was held at once; without sizes in units of one rank's activations of one
      microbatch, held from the start of `F` or `R` to the end of `B` or `W`. With sizes, weights are counted too, once
      for each version of them that is kept.
    """

    makespan: float
    span: float
    busy: tuple[float, ...]
    waited: tuple[float, ...]
    peak_memory: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of `span` in which the busiest rank idles."""
        return max(0.0, self.span - max(self.busy)) / self.span if self.span else 0.0

    @property
    def bubble_of_makespan(self) -> float:
        """Share of `makespan` in which the busiest rank idles: also before its first action and after its last."""
        return max(0.0, self.makespan - max(self.busy)) / self.makespan if self.makespan else 0.0

    @property
    def idle(self) -> tuple[float, ...]:
        """Per rank, the part of the makespan in which it does nothing."""
        return tuple(self.makespan - busy for busy in self.busy)


def spans(schedule: Schedule, costs: Costs, graph: Graph | None = None) -> Iterator[Span]:
    """The simulated timeline, as a stream in an order in which data allow it; per rank in the order of time.

    Raises `ScheduleError` if the ranks block each other, or do what is no compute action or out of order on its stage.
    Memory is what is in flight.
    """
    books = [Progress(schedule, rank) for rank in range(schedule.ranks)]
    streams = [forward_before_backward(book, schedule.actions(book.rank)) for book in books]
    for batch in replay(schedule, streams, wires(schedule, graph_of(schedule, graph), costs, UNITS), costs):
        yield from batch


def simulate(
    schedule: Schedule, costs: Costs = Costs(), graph: Graph | None = None, sizes: Sizes | None = None
) -> Timeline:
    """Simulate `schedule` and sum it up. What it says of a schedule that does not pass `check` means nothing.

    Raises `ScheduleError` where the ranks block each other, and `SizeError` for costs of another number of stages.

    >>> from schedules import one_f_one_b
    >>> timeline = simulate(one_f_one_b(ranks=4, microbatches=8), Costs(F=1, B=2))
    >>> timeline.makespan, round(timeline.bubble, 2), timeline.peak_memory
    (33.0, 0.27, (4.0, 3.0, 2.0, 1.0))
    """
    streams = [schedule.actions(rank) for rank in range(schedule.ranks)]
    wired = wires(schedule, graph_of(schedule, graph), costs, sizes or UNITS)
    running = replay(schedule, streams, wired, costs, spans=False)
    try:
        next(running)
    except StopIteration as done:
        played = done.value
    return _timeline(schedule, sizes, played.begin, played.clock, played.busy, played.peak, None)


def summarize(timeline: Iterable[Span], schedule: Schedule, sizes: Sizes | None = None) -> Timeline:
    """Fold a timeline of `schedule`, simulated or measured, that has at least one span per rank, per rank in order.

    Waits are not busy, and `makespan` and `span` go from action to action. A timeline without spans of waits is taken
    for one in which a rank waited wherever it was not busy, as a simulated one.

    >>> from schedules import B, F, gpipe, parse
    >>> measured = [Span(0, F(0, 0), 0, 1), Span(0, parse("0RECV_B0<1"), 1.5, 5), Span(0, B(0, 0), 5, 7)]
    >>> measured += [Span(1, parse("1RECV_F0<0"), 0, 2), Span(1, F(1, 0), 2, 3), Span(1, B(1, 0), 3, 5)]
    >>> timeline = summarize(measured, gpipe(ranks=2, microbatches=1))
    >>> timeline.busy, timeline.waited, timeline.idle
    ((3.0, 3.0), (3.5, 0.0), (4.0, 4.0))
    """
    P = schedule.ranks
    require_stages(sizes or UNITS, schedule.stages)
    begin, finish = [inf] * P, [0.0] * P
    busy, held, peak = [0.0] * P, [0.0] * P, [0.0] * P
    waited, pending, measured = [0.0] * P, [0.0] * P, False
    for rank, action, start, end in timeline:
        if action.peer is not None:
            measured, pending[rank] = True, pending[rank] + end - start
            continue
        if begin[rank] < inf:
            waited[rank] += pending[rank]
        pending[rank] = 0.0
        begin[rank], finish[rank] = min(begin[rank], start), max(finish[rank], end)
        busy[rank] += end - start
        held[rank] += (sizes or UNITS).growth(action.kind, action.stage) / schedule.slices * schedule.backward
        peak[rank] = max(peak[rank], held[rank])
    return _timeline(schedule, sizes, begin, finish, busy, peak, waited if measured else None)


def memory_over_time(timeline: Iterable[Span], schedule: Schedule, sizes: Sizes | None = None) -> tuple[Levels, ...]:
    """Per rank, what it holds from which time on, as pairs of time and level, in the order of time.

    Upwards when an action starts, downwards when it ends, and the units are those of `Timeline.peak_memory`; weights
    apart. A peak that lasts no time stands before the level that follows it, at the same time. `timeline` is as for
    `summarize`.

    >>> from schedules import gpipe
    >>> memory_over_time(spans(gpipe(1, 2), Costs()), gpipe(1, 2))
    (((0.0, 1.0), (1.0, 2.0), (4.0, 1.0), (6.0, 0.0)),)
    """
    unit = schedule.slices * (schedule.stages / schedule.ranks if sizes is None else 1)
    changes: list[list[tuple[float, float]]] = [[] for _ in range(schedule.ranks)]
    for rank, action, start, end in timeline:
        growth = (sizes or UNITS).growth(action.kind, action.stage) * schedule.backward / unit
        if growth:
            changes[rank].append((start if growth > 0 else end, growth))
    return tuple(map(levels, changes))


def levels(changes: Iterable[tuple[float, float]]) -> Levels:
    """Return the levels that changes lead to, given as pairs of time and growth in the order of time.

    Of several levels at one time those stay that no later one reaches: a peak that lasts no time is seen, too.

    >>> levels([(0, 1), (1, 2), (1, -3), (2, 1), (2, 1)])
    ((0, 1.0), (1, 3.0), (1, 0.0), (2, 2.0))
    """
    found, level = list[tuple[float, float]](), 0.0
    for time, growth in changes:
        level += growth
        while found and found[-1][0] == time and found[-1][1] <= level:
            found.pop()
        found.append((time, level))
    return tuple(found)


def _timeline(
    schedule: Schedule,
    sizes: Sizes | None,
    begin: list[float],
    finish: list[float],
    busy: list[float],
    peak: list[float],
    waited: list[float] | None,
) -> Timeline:
    """Sum up; without `waited`, ranks waited wherever they were not busy."""
    lasted = [f - b if b < inf else 0.0 for f, b in zip(finish, begin, strict=True)]
    if waited is None:
        waited = [max(0.0, whole - at_work) for whole, at_work in zip(lasted, busy, strict=True)]
    if sizes is None:
        unit = schedule.stages / schedule.ranks
        memory = tuple(most / unit for most in peak)
    else:
        memory = tuple(most + _weights(schedule, rank, sizes) for rank, most in enumerate(peak))
    return Timeline(max(0.0, max(finish) - min(begin)), max(lasted), tuple(busy), tuple(waited), memory)


def _weights(schedule: Schedule, rank: int, sizes: Sizes) -> float:
    """The weights that `rank` keeps."""
    if not sizes.weight:
        return 0
    return sum(kept * of_stage(sizes.weight, stage) for stage, kept in versions(schedule, rank).items())
