# SPDX-License-Identifier: Apache-2.0
"""Time orders of passes: when each pass starts, and which one it waited for.

The same rules as `schedules.playing`, without names: each rank runs its passes in order, each as soon as the rank is
free and its inputs have arrived.
"""

from __future__ import annotations

from typing import NamedTuple

from schedules.playing.instance import WEIGHT_HALF, Contender, Instance, Job, PassOrders


class TimedOrders(NamedTuple):
    """The `makespan`, and per rank: when it ends, when each pass starts, and which pass of another stage that awaited.

    A pass that started as soon as its rank was free awaited none.
    """

    makespan: float
    ends: list[float]
    starts: list[list[float]]
    awaited: list[list[Job | None]]


def time_orders(instance: Instance, orders: PassOrders) -> TimedOrders | None:
    """Return the times of all passes, or `None` if ranks wait for each other forever."""
    P, times, needs = instance.ranks, instance.times, instance.needs
    done: list[list[list[float | None]]] = [[[None] * count for count in instance.counts] for _ in range(WEIGHT_HALF)]
    at, ends = [0] * P, [0.0] * P
    starts: list[list[float]] = [[] for _ in range(P)]
    awaited: list[list[Job | None]] = [[] for _ in range(P)]
    blocked = dict[Job, list[int]]()
    ready = list(range(P))
    while ready:
        rank = ready.pop()
        order, position, now = orders[rank], at[rank], ends[rank]
        while position < len(order):
            kind, n, k = order[position]
            start, cause, missing = now, None, None
            for other, transfer in needs[kind][n]:
                end = done[kind][other][k]
                if end is None:
                    missing = (kind, other, k)
                    break
                if end + transfer > start:
                    start, cause = end + transfer, (kind, other, k)
            if missing is not None:
                blocked.setdefault(missing, []).append(rank)
                break
            starts[rank].append(start)
            awaited[rank].append(cause)
            now = start + times[kind][n]
            position += 1
            if kind < WEIGHT_HALF:
                done[kind][n][k] = now
                ready += blocked.pop((kind, n, k), ())
        at[rank], ends[rank] = position, now
    if any(position < len(order) for position, order in zip(at, orders, strict=True)):
        return None
    return TimedOrders(max(ends), ends, starts, awaited)


def read_priorities(instance: Instance, contender: Contender) -> list[list[list[float]]]:
    """Return the times at which passes start, per kind, stage and microbatch."""
    found = [[[0.0] * count for count in instance.counts] for _ in range(3)]
    played = time_orders(instance, contender.orders)
    assert played is not None, "contenders can be played"
    for order, starts in zip(contender.orders, played.starts, strict=True):
        for (kind, n, k), start in zip(order, starts, strict=True):
            found[kind][n][k] = start
    return found
