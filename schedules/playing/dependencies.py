# SPDX-License-Identifier: Apache-2.0
"""The data dependencies between actions: the stage graph mapped onto the ranks.

Problem. The possible orders of actions, their times and their transfers all follow from the same facts: what an action
takes from other stages and what it gives to them.

Idea. What crosses one edge on one route is a `Dependency`: made by one action, used by one other, and identified at
both ends by the microbatch. `list_dependencies` lists them; `wires` groups them by the ranks and kinds of action that
make and use them, together with each kind's time and memory. Dependencies between actions of one stage on one rank are
left out: a rank runs its actions in order, and `schedules.checking.rules` checks that order.

Invariant: what is made is kept until its one use, and no longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

from schedules.language.actions import BESIDE, KINDS, is_own
from schedules.language.graph import Edge, Graph
from schedules.language.schedule import Schedule, completes_gradient
from schedules.playing.costs import Costs, Sizes, require_stages


class Dependency:
    """The output of stage `source` for stage `target` on one route: values, cotangents, or a gradient.

    `arrived` maps each unit (a microbatch, or a slice of one) to its arrival time, until rank `consumer` has used it.
    `wanted` is the unit that `consumer` waits for.
    """

    __slots__ = ("arrived", "consumer", "producer", "source", "target", "wanted", "what")

    def __init__(self, what: str, edge: Edge, producer: int, consumer: int) -> None:
        self.what, (self.source, self.target) = what, edge
        self.producer, self.consumer = producer, consumer
        self.arrived: dict[int, float] = {}
        self.wanted: int | None = None


class GradientArrival(dict[int, float]):
    """The `arrived` of a gradient's dependency. A gradient is made once per step, whichever unit it is asked for.

    It arrives when the last of the `count` units that add to it has: then `wanted` becomes that unit, so that the loop
    of the replay wakes the consumer as it does for a value.
    """

    def __init__(self, dependency: Dependency, count: int) -> None:
        self.dependency, self.count, self.seen, self.latest = dependency, count, 0, 0.0

    def __setitem__(self, unit: int, time: float) -> None:
        self.seen, self.latest = self.seen + 1, max(self.latest, time)
        if self.seen == self.count and self.dependency.wanted is not None:
            self.dependency.wanted = unit

    def get(self, unit: int, default: float | None = None) -> float | None:  # type: ignore[override]
        """Return when the gradient arrived, or `default` if it has not."""
        return self.latest if self.seen == self.count else default

    def __delitem__(self, unit: int) -> None:
        """Do nothing: the `U`s of several routes may use the gradient."""


class Wire(NamedTuple):
    """One kind of action on one stage of one rank: what it takes, what it gives with the transfer times, its costs.

    `grows` is the change in the rank's memory; `special` is true if it does not run by itself: what goes on beside, or
    the first action of a fused pair.
    """

    takes: tuple[Dependency, ...]
    gives: tuple[tuple[Dependency, float], ...]
    time: float
    grows: float
    special: bool


Wires: TypeAlias = list[dict[str, dict[int, Wire]]]
_Key: TypeAlias = tuple[str, int, int]  # a kind, or a payload kind, or `done`; stage and route


def list_dependencies(schedule: Schedule, graph: Graph) -> Iterator[tuple[int, Dependency]]:
    """Yield every value, cotangent and gradient that one action makes for another, each with its route."""
    for route, homes in enumerate(schedule.placement.routes):
        for s, t in sorted(graph.values):
            yield route, Dependency("F", (s, t), homes[s], homes[t])
        for s, t in sorted(graph.cotangents):
            yield route, Dependency("B", (t, s), homes[t], homes[s])
        for s in range(schedule.stages):
            replicas, earlier = schedule.placement.replicas(s), schedule.placement.routes[:route]
            for rank in replicas if homes[s] not in (others[s] for others in earlier) else ():
                if rank != homes[s]:
                    yield route, _gradient_dependency(schedule, (s, s), route, rank)
        for s, t in sorted(graph.gradients):
            yield route, _gradient_dependency(schedule, (s, t), route, homes[t])


def _gradient_dependency(schedule: Schedule, edge: Edge, route: int, consumer: int) -> Dependency:
    """Return the dependency of one replica on another's gradient, or of a stage on another's summed gradient."""
    (s, t), placement = edge, schedule.placement
    producer = placement.routes[route][s]
    dependency = Dependency("G", edge, producer, consumer)
    routes = [number for number, homes in enumerate(placement.routes) if homes[s] == producer]
    units = sum(len(range(number, schedule.microbatches, len(placement.routes))) for number in routes) * schedule.slices
    once = s != t and completes_gradient(schedule, s, producer) != "done"
    dependency.arrived = GradientArrival(dependency, 1 if once else units)
    return dependency


def wires(schedule: Schedule, graph: Graph, costs: Costs, sizes: Sizes) -> Wires:
    """Return, for each rank and kind, a wire for each stage the rank holds, or for each stage and route if several.

    The key of a wire is `stage * routes + route`.
    """
    for values in (costs, sizes):
        require_stages(values, schedule.stages)
    taken: dict[_Key, list[Dependency]] = {}
    given: dict[_Key, list[tuple[Dependency, float]]] = {}
    for route, dependency in list_dependencies(schedule, graph):
        delay = costs.transfer(dependency.what, dependency.source, dependency.producer, dependency.consumer)
        for key in _takers(schedule, dependency, route):
            taken.setdefault(key, []).append(dependency)
        for key in _givers(schedule, dependency, route):
            given.setdefault(key, []).append((dependency, delay))
    table = [_Rows(costs, sizes, schedule, taken, given) for _ in range(schedule.ranks)]
    for route, homes in enumerate(schedule.placement.routes):
        for s, rank in enumerate(homes):
            table[rank].held.append((s, route))
    return [*table]


class _Rows(dict[str, dict[int, Wire]]):
    """The wires of a rank by kind, made when the first action of their kind comes.

    - `taken`, `given`: what actions take and give. `held`: the stages of the rank, each with its route.
    """

    def __init__(
        self,
        costs: Costs,
        sizes: Sizes,
        schedule: Schedule,
        taken: Mapping[_Key, list[Dependency]],
        given: Mapping[_Key, list[tuple[Dependency, float]]],
    ) -> None:
        super().__init__()
        self.costs, self.sizes, self.schedule = costs, sizes, schedule
        self.taken, self.given = taken, given
        self.held = list[tuple[int, int]]()

    def __missing__(self, kind: str) -> dict[int, Wire]:
        word, schedule = KINDS[kind], self.schedule
        share, routes = schedule.slices if word.after else 1, len(schedule.placement.routes)
        special = kind == "OVERLAP_F" or kind in BESIDE
        gates = self["OFFLOAD"] if is_own(kind) and word.before == "forward" else {}  # those after a move of memory
        rows = self[kind] = {}
        for s, route in self.held:
            what, key = (word.crosses or kind, s, route), s * routes + route
            takes = gates[key].takes if gates else tuple(self.taken.get(what, ()))
            gives = [*self.given.get(what, ())]
            gives += self.given.get(("done", s, route), ()) if word.after == "done" else ()
            time, grows = self.costs.time(kind, s) / share, self.sizes.growth(kind, s, schedule.backward) / share
            rows[key] = Wire(takes, tuple(gives), time, grows, special)
        return rows


def _takers(schedule: Schedule, dependency: Dependency, route: int) -> Iterator[_Key]:
    """Yield the actions that use a dependency: on its route; for gradients, the `G` of the replica or the `U`s."""
    t, placement = dependency.target, schedule.placement
    if dependency.what != "G":
        yield dependency.what, t, route
    else:
        mine = (number for number, homes in enumerate(placement.routes) if homes[t] == dependency.consumer)
        yield from (("G" if t == dependency.source else "U", t, number) for number in mine)


def _givers(schedule: Schedule, dependency: Dependency, route: int) -> Iterator[_Key]:
    """Yield the actions that make a dependency: on its route; for gradients, those that complete them, on any."""
    s, placement = dependency.source, schedule.placement
    if dependency.what != "G":
        yield dependency.what, s, route
        return
    maker = "done" if s == dependency.target else completes_gradient(schedule, s, dependency.producer)
    for number, homes in enumerate(placement.routes):
        if homes[s] == dependency.producer:
            yield maker, s, number
