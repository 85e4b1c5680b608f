# SPDX-License-Identifier: Apache-2.0
"""How long a schedule takes, and what it holds, given what its actions cost.

Problem. Whether a schedule is good depends on the costs; trying it on machines is slow.

Idea. `replay` already gives an order in which every action finds its data. Walking along it, an action starts when its
rank is free and its last token has arrived, a transfer between ranks taking `comm`. A timeline is a stream of `Span`s;
`summarize` folds it, whether it was simulated or measured. Nothing is kept but what is in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from schedules.actions import Action
from schedules.authoring import Schedule
from schedules.graph import Graph
from schedules.replay import InFlight, graph_of, needs, replay
from schedules.rules import compute_only

Cost: TypeAlias = float | tuple[float, ...]


@dataclass(frozen=True)
class Costs:
    """Time of each kind of action, in any one unit: a number for all stages, or a tuple with one per stage.

    `comm` is the time from the end of the action that makes a value to its arrival on another rank; transfers overlap
    with compute.
    """

    F: Cost = 1
    B: Cost = 2
    I: Cost = 1  # noqa: E741 - the action's name
    W: Cost = 1
    comm: float = 0

    def of(self, action: Action) -> float:
        """The time of one compute action."""
        cost: Cost = getattr(self, action.kind)
        return cost[action.stage] if isinstance(cost, tuple) else cost


class Span(NamedTuple):
    """`rank` was busy with `action` from `start` to `end`."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What a timeline amounts to.

    - `makespan`: from the first start to the last end on any rank.
    - `span`: the longest time from one rank's first start to its last end (arXiv 2401.10241, section 5.3).
    - `busy`: per rank, the time spent in actions.
    - `peak_memory`: per rank, the most activations held at once, in units of one rank's activations of one microbatch;
      they are held from the start of `F` to the end of `B` or `W`.
    """

    makespan: float
    span: float
    busy: tuple[float, ...]
    peak_memory: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of `span` in which the busiest rank idles."""
        return (self.span - max(self.busy)) / self.span if self.span else 0.0


def spans(schedule: Schedule, costs: Costs, graph: Graph | None = None) -> Iterator[Span]:
    """The simulated timeline, as a stream in an order in which data allow it; per rank in the order of time.

    Raises `ScheduleError` if the ranks block each other or do what is no compute action. Memory is what is in flight.
    """
    graph, homes = graph_of(schedule, graph), schedule.placement.homes
    free = [0.0] * schedule.ranks
    made_at = InFlight[float](graph)
    streams = [compute_only(schedule, rank, schedule.actions(rank)) for rank in range(schedule.ranks)]
    for rank, _, action in replay(streams, graph, schedule.placement):
        start = free[rank]
        for token in needs(action, graph):
            start = max(start, made_at.take(token) + (costs.comm if homes[token[1]] != rank else 0))
        free[rank] = start + costs.of(action)
        yield Span(rank, action, start, free[rank])
        made_at.put(action, free[rank])


def simulate(schedule: Schedule, costs: Costs = Costs(), graph: Graph | None = None) -> Timeline:
    """Simulate `schedule` and sum it up.

    >>> from schedules import one_f_one_b
    >>> timeline = simulate(one_f_one_b(ranks=4, microbatches=8), Costs(F=1, B=2))
    >>> timeline.makespan, round(timeline.bubble, 2), timeline.peak_memory
    (33.0, 0.27, (4.0, 3.0, 2.0, 1.0))
    """
    return summarize(spans(schedule, costs, graph), schedule)


def summarize(timeline: Iterable[Span], schedule: Schedule) -> Timeline:
    """Fold a timeline of `schedule`, simulated or measured, that has at least one span per rank, per rank in order."""
    P = schedule.ranks
    begin, finish = [float("inf")] * P, [0.0] * P
    busy, held, peak = [0.0] * P, [0] * P, [0] * P
    for rank, action, start, end in timeline:
        begin[rank], finish[rank] = min(begin[rank], start), max(finish[rank], end)
        busy[rank] += end - start
        held[rank] += (action.kind == "F") - (action.kind in "BW")
        peak[rank] = max(peak[rank], held[rank])
    span = max(f - b for f, b in zip(finish, begin, strict=True))
    chunks = schedule.stages / P
    return Timeline(max(finish) - min(begin), span, tuple(busy), tuple(p / chunks for p in peak))
