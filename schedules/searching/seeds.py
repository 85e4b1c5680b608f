# SPDX-License-Identifier: Apache-2.0
"""Schedules to begin with: those of the literature that place the stages alike, and the way from orders to a schedule.

A schedule is played in its own order, with each backward as its halves, so any schedule of forwards and backwards can
be a seed. The way back joins halves that follow each other if that takes no more time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import Parameter
from types import MappingProxyType
from typing import Final

from schedules import families
from schedules.errors import PipelineError
from schedules.language.actions import Action
from schedules.language.graph import Graph
from schedules.language.schedule import Factory, Schedule
from schedules.playing.board import sum_replicas
from schedules.playing.costs import Costs
from schedules.playing.engine import find_makespan
from schedules.playing.instance import FORWARD, INPUT_HALF, LETTERS, WEIGHT_HALF, Contender, Instance, Job, PassOrders
from schedules.playing.rows import from_rows
from schedules.searching.timing import time_orders
from schedules.transforms.connect import connect
from schedules.transforms.split import split_backward

HALVES: Final[Mapping[str, tuple[int, ...]]] = MappingProxyType(
    {
        "F": (FORWARD,),
        "OVERLAP_F": (FORWARD,),
        "B": (INPUT_HALF, WEIGHT_HALF),
        "I": (INPUT_HALF,),
        "W": (WEIGHT_HALF,),
        "G": (),
    }
)


def list_families(instance: Instance, costs: Costs, graph: Graph | None) -> Iterator[Schedule]:
    """Yield the schedules of the literature on this placement, and the same with split backwards."""
    chunks = max(1, instance.placement.stages // instance.ranks)
    given = {
        "ranks": instance.ranks,
        "microbatches": instance.microbatches,
        "chunks": chunks,
        "waves": chunks // 2,
        "costs": costs,
        "residual": 1.0,
    }
    cap = min(*instance.problem.room, instance.microbatches * chunks)
    for name in families.__all__:
        factory = getattr(families, name)
        for memory in (int(cap / chunks), int(cap)):  # some count what a rank keeps of a microbatch, some stages
            for schedule in _call(factory, {**given, "memory": memory}):
                fits = schedule.placement == instance.placement and schedule.backward == instance.problem.backward
                if fits and schedule.slices == 1:
                    yield from _vary(schedule, instance, graph)


def _call(factory: Factory[...], given: Mapping[str, object]) -> Iterator[Schedule]:
    """Yield what the factory makes of the arguments that it knows, if it needs no others and supports them."""
    parameters = factory.signature.parameters
    if all(one.default is not Parameter.empty or name in given for name, one in parameters.items()):
        try:
            yield factory(**{name: given[name] for name in parameters if name in given})
        except PipelineError:  # sizes that it does not support
            return


def _vary(schedule: Schedule, instance: Instance, graph: Graph | None) -> Iterator[Schedule]:
    kinds = {action.kind for rank in range(schedule.ranks) for action in schedule.actions(rank)}
    if not kinds <= set(HALVES) or ("I" in kinds and not instance.problem.split):
        return
    for one in (schedule, *([split_backward(schedule)] if "B" in kinds and instance.problem.split else [])):
        yield one if graph is None else connect(one, graph)


def read_orders(instance: Instance, schedule: Schedule) -> PassOrders:
    """Return the orders of a schedule with this placement."""
    return [list(_read_rank(instance, schedule, rank)) for rank in range(schedule.ranks)]


def _read_rank(instance: Instance, schedule: Schedule, rank: int) -> Iterator[Job]:
    seen = dict[tuple[int, int], int]()
    for action in schedule.actions(rank):
        n = action.microbatch % instance.routes * schedule.stages + action.stage
        for kind in HALVES[action.kind]:
            if kind in instance.kinds:
                k = seen[kind, n] = seen.get((kind, n), -1) + 1
                yield kind, n, k


def read_seed(instance: Instance, schedule: Schedule) -> Contender | None:
    """Return the orders of a schedule as a contender, or `None` if it needs too much memory."""
    orders = read_orders(instance, schedule)
    if not instance.fits(orders):
        return None
    played = time_orders(instance, orders)
    return None if played is None else Contender(played.makespan, orders, repr(schedule))


def spell(instance: Instance, orders: PassOrders, costs: Costs, graph: Graph | None) -> Schedule:
    """Return the schedule with these orders. Join halves everywhere, at the first stage only, or nowhere."""
    found, placement, M = list[Schedule](), instance.placement, instance.microbatches
    for joined in (placement.stages, 1, 0) if instance.problem.split else (0,):
        rows = (_spell_rank(instance, rank, order, costs, joined) for rank, order in enumerate(orders))
        found.append(from_rows(tuple(map(tuple, rows)), placement, M, 1, instance.problem.backward, graph))
    return min(found, key=lambda one: find_makespan(one, costs))


def _spell_rank(instance: Instance, rank: int, order: list[Job], costs: Costs, joined: int) -> Iterator[Action]:
    """Yield the actions of a rank; halves that follow each other are joined on the first `joined` stages."""
    position, split = 0, instance.problem.split
    while position < len(order):
        kind, n, k = order[position]
        stage = instance.problem.stages[n]
        s, i = stage.stage, stage.microbatches[k]
        whole = order[position : position + 2] == [(INPUT_HALF, n, k), (WEIGHT_HALF, n, k)]
        joins = whole and s < joined and costs.time("B", s) <= costs.time("I", s) + costs.time("W", s)
        yield Action("B" if joins or (kind and not split) else LETTERS[kind], s, i)
        position += 1 + joins
    if instance.routes > 1 and instance.problem.backward:
        yield from sum_replicas(rank, instance.placement, instance.microbatches)
