# SPDX-License-Identifier: Apache-2.0
"""Simulate a schedule: its time and memory, without running it.

Problem. Whether a schedule is good depends on the costs, and trying it on real machines is slow.

Idea. `replay` plays all ranks: an action starts once its rank is free and its last input has arrived. A timeline is a
stream of `Span`s. `summarize` folds one, simulated or measured; `simulate` folds it as it goes and keeps only what is
in flight.

Between its first action and its last, a rank is busy or waiting for others; in a measured timeline it may also be
posting transfers.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from operator import itemgetter
from typing import TypeAlias

from schedules.arguments import require_types
from schedules.arrays.gate import play_large
from schedules.checking.progress import Progress
from schedules.checking.rules import check, count_versions, kinds_of, require_forward_before_backward
from schedules.language.actions import BESIDE, COLLECTIVES, KINDS
from schedules.language.graph import Graph
from schedules.language.schedule import Schedule, graph_of
from schedules.playing.costs import UNITS, Costs, Sizes, of_stage, require_stages
from schedules.playing.dependencies import wires
from schedules.playing.engine import Span, replay, replay_to_end
from schedules.playing.timelines import read_spans

Levels: TypeAlias = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Timeline:
    """The totals of a timeline.

    - `makespan`: from the first start to the last end on any rank.
    - `span`: the longest time from one rank's first start to its last end (arXiv 2401.10241, section 5.3).
    - `busy`: per rank, the time spent in actions, without those that run beside the others.
    - `waited`: per rank, the time spent waiting for others between its first action and its last.
    - `peak_memory`: per rank, the most memory held at once. Without sizes, in units of one rank's activations for one
      microbatch (in a certificate, those of one stage), held from the start of `F` or `R` to the end of `B` or `W`.
      With sizes, weights count too, once for each version kept.
    """

    makespan: float
    span: float
    busy: tuple[float, ...]
    waited: tuple[float, ...]
    peak_memory: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The share of the makespan in which ranks are idle, averaged over all of them."""
        return max(0.0, sum(self.idle) / (len(self.idle) * self.makespan)) if self.makespan else 0.0

    @property
    def bubble_of_busiest(self) -> float:
        """The share of the makespan in which the busiest rank is idle: how much faster no other order can be."""
        return max(0.0, min(self.idle) / self.makespan) if self.makespan else 0.0

    @property
    def idle(self) -> tuple[float, ...]:
        """Per rank, the part of the makespan in which it is idle."""
        return tuple(self.makespan - busy for busy in self.busy)

    def _repr_html_(self) -> str:  # called by notebooks
        head = "".join(f"<th>{name}</th>" for name in ("rank", "busy", "waited", "peak memory"))
        rows = zip(range(len(self.busy)), self.busy, self.waited, self.peak_memory, strict=True)
        cells = ("".join(f"<td>{cell:g}</td>" for cell in row) for row in rows)
        table = "".join(f"<tr>{row}</tr>" for row in (head, *cells))
        return f"<p>makespan {self.makespan:g}, bubble {self.bubble:.1%}</p><table>{table}</table>"


def spans(schedule: Schedule, costs: Costs, graph: Graph | None = None) -> Iterator[Span]:
    """Yield the simulated timeline in an order the data dependencies allow; each rank's spans come in time order.

    Raise `ScheduleError` if the ranks deadlock, or if an action is not a compute action or is out of order on its
    stage. Memory is proportional to what is in flight.
    """
    require_types(spans, locals())
    books = [Progress(schedule, rank) for rank in range(schedule.ranks)]
    streams = [require_forward_before_backward(book, schedule.actions(book.rank)) for book in books]
    for batch in replay(schedule, streams, wires(schedule, graph_of(schedule, graph), costs, UNITS), costs):
        yield from batch


def simulate(
    schedule: Schedule, costs: Costs = Costs(), graph: Graph | None = None, sizes: Sizes | None = None
) -> Timeline:
    """Simulate `schedule` and return the totals.

    Raise `ScheduleError` as `check` does, which runs once for each schedule, and `SizeError` for costs of a different
    number of stages.

    >>> from schedules import one_f_one_b
    >>> timeline = simulate(one_f_one_b(ranks=4, microbatches=8), Costs(F=1, B=2))
    >>> timeline.makespan, round(timeline.bubble, 2), timeline.peak_memory
    (33.0, 0.27, (4.0, 3.0, 2.0, 1.0))
    """
    require_types(simulate, locals())
    graph = graph_of(schedule, graph)
    _require_correct(schedule, graph)
    wired = wires(schedule, graph, costs, sizes or UNITS)
    large = play_large(schedule, wired, costs)  # if there are updates, it is None
    played = large or replay_to_end(schedule, wired, costs)
    weigh = weight_memory if large is None else _weigh_once
    return _sum_up(schedule, sizes, played.begin, played.clock, played.busy, played.peak, None, weigh)


@lru_cache(maxsize=64)  # a plan simulates the same schedule for thousands of costs
def _require_correct(schedule: Schedule, graph: Graph) -> None:
    check(schedule, graph)


def summarize(timeline: Iterable[Span], schedule: Schedule, sizes: Sizes | None = None) -> Timeline:
    """Return the totals of a simulated or measured timeline of `schedule`.

    It must have at least one span per rank, and each rank's spans in order. Waits do not count as busy, and `makespan`
    and `span` run from the first action to the last. If a timeline has no spans for waits, like a simulated one, a rank
    is assumed to have waited whenever it was not busy.

    >>> from schedules import B, F, gpipe, parse
    >>> measured = [Span(0, F(0, 0), 0, 1), Span(0, parse("0RECV_B0<1"), 1.5, 5), Span(0, B(0, 0), 5, 7)]
    >>> measured += [Span(1, parse("1RECV_F0<0"), 0, 2), Span(1, F(1, 0), 2, 3), Span(1, B(1, 0), 3, 5)]
    >>> timeline = summarize(measured, gpipe(ranks=2, microbatches=1))
    >>> timeline.busy, timeline.waited, timeline.idle
    ((3.0, 3.0), (3.5, 0.0), (4.0, 4.0))
    """
    require_types(summarize, locals())
    P = schedule.ranks
    require_stages(sizes or UNITS, schedule.stages)
    begin, finish = [inf] * P, [0.0] * P
    busy, held, peak = [0.0] * P, [0.0] * P, [0.0] * P
    waited, pending, measured = [0.0] * P, [0.0] * P, False
    moves = [list[tuple[float, float]]() for _ in range(P)]  # what goes on beside takes and frees memory meanwhile
    for rank, action, start, end in read_spans(timeline):
        if action.peer is not None:
            measured, pending[rank] = True, pending[rank] + end - start
            continue
        if begin[rank] < inf:
            waited[rank] += pending[rank]
        pending[rank] = 0.0
        begin[rank], finish[rank] = min(begin[rank], start), max(finish[rank], end)
        busy[rank] += 0 if action.kind in BESIDE else end - start
        share = schedule.slices if KINDS[action.kind].after else 1
        growth = (sizes or UNITS).growth(action.kind, action.stage, schedule.backward) / share
        if action.kind in BESIDE and KINDS[action.kind].after:
            insort(moves[rank], (start if growth > 0 else end, growth), key=itemgetter(0))
            continue
        # A collective ends later than actions that come after it, and must not end their moves.
        while moves[rank] and action.kind not in BESIDE and moves[rank][0][0] <= (start if growth > 0 else end):
            held[rank] += moves[rank].pop(0)[1]
            peak[rank] = max(peak[rank], held[rank])
        held[rank] += growth
        peak[rank] = max(peak[rank], held[rank])
    return _sum_up(schedule, sizes, begin, finish, busy, peak, waited if measured else None, weight_memory)


def memory_over_time(timeline: Iterable[Span], schedule: Schedule, sizes: Sizes | None = None) -> tuple[Levels, ...]:
    """Return, for each rank, its memory over time as `(time, level)` pairs in time order.

    Levels rise when an action starts and fall when one ends. Units are those of `Timeline.peak_memory`, without
    weights. A peak of zero duration comes before the level that follows it, with the same time. `timeline` is as for
    `summarize`.

    >>> from schedules import gpipe
    >>> memory_over_time(spans(gpipe(1, 2), Costs()), gpipe(1, 2))
    (((0.0, 1.0), (1.0, 2.0), (4.0, 1.0), (6.0, 0.0)),)
    """
    require_types(memory_over_time, locals())
    unit = schedule.slices * (schedule.stages / schedule.ranks if sizes is None else 1)
    changes: list[list[tuple[float, float]]] = [[] for _ in range(schedule.ranks)]
    for rank, action, start, end in read_spans(timeline):
        share = 1 if sizes and action.kind in COLLECTIVES else unit
        growth = (sizes or UNITS).growth(action.kind, action.stage, schedule.backward) / share
        if growth:
            changes[rank].append((start if growth > 0 else end, growth))
    return tuple(levels(sorted(row, key=lambda change: change[0])) for row in changes)


def levels(changes: Iterable[tuple[float, float]]) -> Levels:
    """Return the `(time, level)` pairs that result from `(time, growth)` pairs in time order.

    Of several levels at the same time, keep each one that no later one reaches, so a peak of zero duration shows.

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


def _sum_up(
    schedule: Schedule,
    sizes: Sizes | None,
    begin: list[float],
    finish: list[float],
    busy: list[float],
    peak: list[float],
    waited: list[float] | None,
    weigh: Callable[[Schedule, int, Sizes], float],
) -> Timeline:
    """Return the totals; without `waited`, ranks waited whenever they were not busy."""
    lasted = [f - b if b < inf else 0.0 for f, b in zip(finish, begin, strict=True)]
    if waited is None:
        waited = [max(0.0, whole - at_work) for whole, at_work in zip(lasted, busy, strict=True)]
    if sizes is None:
        unit = schedule.stages / schedule.ranks
        memory = tuple(most / unit for most in peak)
    else:
        memory = tuple(most + weigh(schedule, rank, sizes) for rank, most in enumerate(peak))
    return Timeline(max(0.0, max(finish) - min(begin)), max(lasted), tuple(busy), tuple(waited), memory)


def weight_memory(schedule: Schedule, rank: int, sizes: Sizes) -> float:
    """Return the size of the weights on `rank`, counting every version kept.

    >>> from schedules import pipedream
    >>> weight_memory(pipedream(ranks=3, microbatches=8), rank=0, sizes=Sizes(weight=2))
    6
    """
    if not sizes.weight or "U" not in kinds_of(schedule):  # counting versions takes ten times as long
        return _weigh_once(schedule, rank, sizes)
    return sum(kept * of_stage(sizes.weight, stage) for stage, kept in count_versions(schedule, rank).items())


def _weigh_once(schedule: Schedule, rank: int, sizes: Sizes) -> float:
    """Return the size of the weights on a rank that keeps one version."""
    return sum(of_stage(sizes.weight, stage) for stage in schedule.placement.stages_on(rank)) if sizes.weight else 0
