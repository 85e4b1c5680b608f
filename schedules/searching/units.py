# SPDX-License-Identifier: Apache-2.0
"""Orders from a repeating unit: the passes of one microbatch on a circle.

Let every stage run one pass of each kind per period. Then a schedule is the times of one microbatch alone, and all that
matters on a rank is that those times, taken modulo the period, do not overlap, and that what is held at once fits
(arXiv 2405.15362 builds its schedules from such units by hand). A unit is small: its passes are placed one by one, each
at the first free time after its inputs and a delay. Annealing changes the delays until memory suffices and a microbatch
takes little time.

On a circle longer than the work of a rank, gaps remain. They disappear once the unrolled passes start as soon as they
can; so they are room to find an order in.
"""

from __future__ import annotations

from math import ceil, inf
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from schedules.playing.costs import ROUNDING
from schedules.playing.instance import FORWARD, INPUT_HALF, WEIGHT_HALF, Contender, Instance, Job, PassOrders
from schedules.searching.dispatching import dispatch
from schedules.searching.timing import read_priorities, time_orders

if TYPE_CHECKING:
    from random import Random

STRETCHES: Final = (1.0, 1.0, 1.001, 1.02, 1.05, 1.1, 1.2, 1.3)
"""The circle, in units of the work of the busiest rank."""
ANNEALED: Final = (30, 100, 300)

Table: TypeAlias = list[list[float]]
"""A number per kind and stage."""
Taken: TypeAlias = list[tuple[float, float]]
"""Times on a circle, and how long they are taken."""


class RepeatingUnit(NamedTuple):
    """The starts of one microbatch's passes per kind and stage, and the length of the circle."""

    starts: Table
    circle: float


def unroll(instance: Instance, unit: RepeatingUnit) -> PassOrders:
    """Return the orders in which all microbatches run the unit, one period after another."""
    S = instance.placement.stages
    times: list[list[tuple[float, int, int, Job]]] = [[] for _ in range(instance.ranks)]
    for kind in instance.kinds:
        for n, start in enumerate(unit.starts[kind]):
            depth = S - n % S if kind else n % S  # of passes that take no time, which comes first
            rows = ((start + k * unit.circle, kind, depth, (kind, n, k)) for k in range(instance.counts[n]))
            times[instance.rank[n]] += rows
    return [[job for _, _, _, job in sorted(row)] for row in times]


def take_turns(instance: Instance) -> Contender:
    """Return the orders that finish each microbatch before the next begins.

    They fit wherever one microbatch of a chain does. Of another graph, branches in another order may need less memory.
    """
    orders: PassOrders = [[] for _ in range(instance.ranks)]
    alone = [_list_passes(instance, route) for route in range(instance.routes)]
    for k in range(max(instance.counts)):
        for kind, n in (one for passes in alone for one in passes if k < instance.counts[one[1]]):
            orders[instance.rank[n]].append((kind, n, k))
    found = _time(instance, orders, "one at a time")
    assert found is not None, "a microbatch waits for those before it only"
    return found


def _list_passes(instance: Instance, route: int) -> list[tuple[int, int]]:
    """Return the passes of one microbatch, one after another: backward as soon as possible, which gives memory back."""
    S, halves = instance.placement.stages, instance.kinds[1:]
    passes, begun, ended = list[tuple[int, int]](), set[int](), set[int]()
    for n in range(route * S, (route + 1) * S):
        passes.append((FORWARD, n))
        begun.add(n)
        back = [n]
        while back:
            m = back.pop()
            stage = instance.problem.stages[m]
            if m in begun and m not in ended and all(other in ended for other, _ in stage.pulled_by):
                passes += [(kind, m) for kind in halves]
                ended.add(m)
                back += [other for other, _ in stage.pulls]
    return passes


def find_unit(instance: Instance, random: Random) -> Contender | None:
    """Return the orders of a unit found by annealing, or `None` if its memory does not suffice."""
    circle = instance.period * instance.routes * random.choice(STRETCHES)
    unit = _anneal(instance, circle, random.choice(ANNEALED), random) if circle else None
    if unit is None:
        return None
    rigid = _time(instance, unroll(instance, unit), "repeating unit")
    if rigid is None:
        return None
    eager = dispatch(instance, read_priorities(instance, rigid), rigid.origin, cautious=random.random() < 0.5)
    return rigid if eager is None or rigid.makespan <= eager.makespan else eager


def _time(instance: Instance, orders: PassOrders, origin: str) -> Contender | None:
    """Return the orders with their makespan, or `None` if rounding has put a pass before one that it needs."""
    played = time_orders(instance, orders)
    return None if played is None else Contender(played.makespan, orders, origin)


def _anneal(instance: Instance, circle: float, steps: int, random: Random) -> RepeatingUnit | None:
    """Change delays at random; keep what needs less memory than before, or no more and hardly more time."""
    delays: Table = [[0.0] * len(instance.rank) for _ in range(3)]
    sizes = sorted({time for row in instance.times for time in row})
    unit = _place(instance, circle, delays)
    excess, length = _judge(instance, unit)
    best, least = unit, (excess, length)
    for step in range(steps):
        saved = [list(row) for row in delays]
        for _ in range(random.choice((1, 1, 2, 3))):
            row = delays[random.choice(instance.kinds)]
            row[random.randrange(len(row))] = random.choice(sizes) * random.choice((0, 0, 1, 1, 2, 3))
        unit = _place(instance, circle, delays)
        judged = _judge(instance, unit)
        slack = 0.2 * circle * (1 - step / steps) * random.random() if random.random() < 0.3 else 0.0
        if judged[0] > excess + ROUNDING or (judged[0] > excess - ROUNDING and judged[1] > length + slack):
            delays = saved
            continue
        excess, length = judged
        if judged < least:
            best, least = unit, judged
    return best if least[0] <= 0 else None


def _place(instance: Instance, circle: float, delays: Table) -> RepeatingUnit | None:
    """Place all passes, each at the first free time after its inputs and its delay; `None` if there is none."""
    starts: Table = [[0.0] * len(instance.rank) for _ in range(3)]
    taken: list[Taken] = [[] for _ in range(instance.ranks)]
    first = sorted(range(len(instance.rank)), key=lambda n: n % instance.placement.stages)
    for kind in instance.kinds:
        times = instance.times[kind]
        for n in first if kind == FORWARD else reversed(first):
            ready = starts[kind - 1][n] + instance.times[kind - 1][n] if kind else 0.0
            for other, transfer in instance.needs[kind][n]:
                ready = max(ready, starts[kind][other] + times[other] + transfer)
            row = taken[instance.rank[n]]
            start = _find_gap(row, circle, ready + delays[kind][n], times[n])
            if start is None:
                return None
            starts[kind][n] = start
            row.append((start % circle, times[n]))
    return RepeatingUnit(starts, circle)


def _find_gap(taken: Taken, circle: float, ready: float, time: float) -> float | None:
    """Return the first time from `ready` on at which a rank is free for so long, on a circle; `None` if never."""
    start, slack = ready, ROUNDING * circle
    while start <= ready + circle + slack:
        after = start
        for begin, lasts in taken:
            until = (begin - start) % circle  # from our start to its next one
            if until < time - slack or until > circle - slack:
                after = max(after, start + (0.0 if until > circle - slack else until) + lasts)
            elif circle - until < lasts - slack:
                after = max(after, start + lasts - (circle - until))
        if after <= start + slack:
            return start
        start = after
    return None


def _judge(instance: Instance, unit: RepeatingUnit | None) -> tuple[float, float]:
    """Return the memory that a unit needs beyond what there is, and how long a microbatch takes."""
    if unit is None:
        return inf, inf
    last = instance.kinds[-1]
    ends = (start + time for start, time in zip(unit.starts[last], instance.times[last], strict=True))
    return sum(_exceed(instance, unit, rank) for rank in range(instance.ranks)), max(ends)


def _exceed(instance: Instance, unit: RepeatingUnit, rank: int) -> float:
    """Return by how much a rank exceeds its memory, over all its forwards; it holds most when one begins."""
    starts, times, growth = unit.starts, instance.times, instance.growth
    if instance.caps[rank] == inf or not instance.problem.backward:
        return 0.0
    excess = 0.0
    for moment in (starts[FORWARD][n] for n in instance.on[rank]):
        held = 0.0
        for n in instance.on[rank]:
            begin = starts[FORWARD][n]
            for kind in (INPUT_HALF, WEIGHT_HALF):
                if growth[kind][n]:
                    end = starts[kind][n] + times[kind][n]
                    held -= growth[kind][n] * _count(begin, end, moment, unit.circle)
        excess += max(0.0, held - instance.caps[rank])
    return excess


def _count(begin: float, end: float, moment: float, circle: float) -> int:
    """Return how many microbatches are between `begin` and `end` at a moment on the circle."""
    return ceil((end - moment) / circle - ROUNDING) - ceil((begin - moment) / circle - ROUNDING)
