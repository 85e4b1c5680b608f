# SPDX-License-Identifier: Apache-2.0
"""Which action needs what, and who waits for it: the stage graph laid over the ranks.

Problem. The order in which things can happen, their times and their transfers all follow from the same facts: what an
action takes from other stages and what it gives to them.

Idea. What crosses one edge on one route is a `Crossing`: made by one action, used by one other, known to both ends by
the microbatch. `crossings` lists them; `wires` sorts them by the ranks and kinds of action that make and use them, with
the time and the memory of each kind beside them. Needs among actions of one stage on one rank are left out: a rank
keeps its own order, and `rules` sees to it.

Invariant: what is made is kept until its one use, and no longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from schedules.actions import KINDS
from schedules.authoring import Schedule
from schedules.costs import Costs, Sizes, require_stages
from schedules.errors import GraphError
from schedules.graph import Edge, Graph, chain


class Crossing:
    """What `source` makes for `target`, on one route: `arrived` says when, by unit, until `consumer` has used it.

    A unit is a microbatch, or a slice of one. `wanted` is the unit for which `consumer`, a rank, waits.
    """

    __slots__ = ("arrived", "consumer", "producer", "source", "target", "wanted", "what")

    def __init__(self, what: str, edge: Edge, producer: int, consumer: int) -> None:
        self.what, (self.source, self.target) = what, edge
        self.producer, self.consumer = producer, consumer
        self.arrived: dict[int, float] = {}
        self.wanted: int | None = None


class Partial(dict[int, float]):
    """When a replica's gradient is complete: once `count` units have arrived; then the one who waits may go on."""

    def __init__(self, crossing: Crossing, count: int) -> None:
        self.crossing, self.count, self.seen, self.latest = crossing, count, 0, 0.0

    def __setitem__(self, unit: int, time: float) -> None:
        self.seen, self.latest = self.seen + 1, max(self.latest, time)
        if self.seen == self.count and self.crossing.wanted is not None:
            self.crossing.wanted = unit

    def get(self, unit: int, default: float | None = None) -> float | None:  # type: ignore[override]
        """The time at which the gradient arrived; `unit` does not matter."""
        return self.latest if self.seen == self.count else default

    def __delitem__(self, unit: int) -> None:
        """It stays: it is one for all units."""


class Row(NamedTuple):
    """One kind of action on one stage of one rank: what it takes, what it gives and how late that arrives, its costs.

    `grows` is by how much it changes the memory of the rank, `fused` whether the action behind it belongs to it.
    """

    takes: tuple[Crossing, ...]
    gives: tuple[tuple[Crossing, float], ...]
    time: float
    grows: float
    fused: bool


Wires: TypeAlias = list[dict[str, dict[int, Row]]]
Key: TypeAlias = tuple[str, int, int]  # a kind, or what crosses, or `done`; stage and route


def graph_of(schedule: Schedule, graph: Graph | None) -> Graph:
    """`graph`, or the schedule's own, or the chain of its stages; raises `GraphError` if the sizes differ."""
    if graph is None:
        return schedule.graph or chain(schedule.stages)
    if graph.stages != schedule.stages:
        raise GraphError(
            f"got a graph of {graph.stages} stages for {schedule!r}, expected {schedule.stages}. "
            "Cut the model into as many stages as the schedule drives, or change the schedule's ranks or chunks."
        )
    return graph


def crossings(schedule: Schedule, graph: Graph) -> Iterator[tuple[int, Crossing]]:
    """Every value, cotangent and replica's gradient that one action makes for another, with its route."""
    for route, homes in enumerate(schedule.placement.routes):
        for s, t in sorted(graph.values):
            yield route, Crossing("F", (s, t), homes[s], homes[t])
        for s, t in sorted(graph.cotangents):
            yield route, Crossing("B", (t, s), homes[t], homes[s])
        for s in range(schedule.stages):
            for rank in schedule.placement.replicas(s):
                if rank != homes[s]:
                    yield route, _partial(schedule, (s, s), route, rank)
        for s, t in sorted(graph.gradients):
            yield route, _partial(schedule, (s, t), route, homes[t])


def _partial(schedule: Schedule, edge: Edge, route: int, consumer: int) -> Crossing:
    """The gradient of one replica for another; or of a stage, summed over its replicas, for another stage."""
    (s, t), placement = edge, schedule.placement
    producer = placement.routes[route][s]
    crossing = Crossing("G", edge, producer, consumer)
    routes = [number for number, homes in enumerate(placement.routes) if homes[s] == producer]
    units = sum(len(range(number, schedule.microbatches, len(placement.routes))) for number in routes) * schedule.slices
    summed = s != t and len(placement.replicas(s)) > 1
    crossing.arrived = Partial(crossing, 1 if summed else units)
    return crossing


def wires(schedule: Schedule, graph: Graph, costs: Costs, sizes: Sizes) -> Wires:
    """Per rank and kind, the rows of the stages that it holds; with several routes, a row per stage and route.

    The key of a row is `stage * routes + route`.
    """
    for values in (costs, sizes):
        require_stages(values, schedule.stages)
    R = len(schedule.placement.routes)
    taken: dict[Key, list[Crossing]] = {}
    given: dict[Key, list[tuple[Crossing, float]]] = {}
    for route, crossing in crossings(schedule, graph):
        delay = costs.transfer(crossing.what, crossing.source, crossing.producer, crossing.consumer)
        for key in _takers(schedule, crossing, route):
            taken.setdefault(key, []).append(crossing)
        for key in _givers(schedule, crossing, route):
            given.setdefault(key, []).append((crossing, delay))
    table: Wires = [{kind: {} for kind, word in KINDS.items() if not word.mark} for _ in range(schedule.ranks)]
    for route, homes in enumerate(schedule.placement.routes):
        for s, rank in enumerate(homes):
            for kind, rows in table[rank].items():
                word = KINDS[kind]
                takes = taken.get((word.crosses or kind, s, route), ())
                gives = [*given.get((word.crosses or kind, s, route), ())]
                gives += given.get(("done", s, route), ()) if word.after == "done" else ()
                share = schedule.slices if word.after else 1
                time, grows = costs.time(kind, s) / share, sizes.growth(kind, s) / share * schedule.backward
                rows[s * R + route] = Row(tuple(takes), tuple(gives), time, grows, kind == "OVERLAP_F")
    return table


def _takers(schedule: Schedule, crossing: Crossing, route: int) -> Iterator[Key]:
    """Who takes it: values and cotangents on their route; a replica's gradient `G`, a shared parameter's any `U`."""
    t, placement = crossing.target, schedule.placement
    if crossing.what != "G":
        yield crossing.what, t, route
    elif t == crossing.source:
        yield "G", t, placement.route(t, crossing.consumer)
    else:
        yield from (("U", t, number) for number, homes in enumerate(placement.routes) if homes[t] == crossing.consumer)


def _givers(schedule: Schedule, crossing: Crossing, route: int) -> Iterator[Key]:
    """Who gives it: values and cotangents on their route; gradients what completes them, on any route of the rank."""
    s, placement = crossing.source, schedule.placement
    if crossing.what != "G":
        yield crossing.what, s, route
        return
    summed = s != crossing.target and len(placement.replicas(s)) > 1
    for number, homes in enumerate(placement.routes):
        if homes[s] == crossing.producer:
            yield "G" if summed else "done", s, number
