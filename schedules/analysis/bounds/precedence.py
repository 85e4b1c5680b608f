# SPDX-License-Identifier: Apache-2.0
"""The passes that end before another starts in every schedule: by data, by order on a stage, and by memory.

A lag of `l` from queue `c` to queue `u` says: pass `k - l` of `u` ends before pass `k` of `c` starts. A pass comes
after those it waits for (lag 0) and after the one before it in its queue (lag 1). Memory adds lags on a rank. Let `c`
take memory, and let `d = k + 1 - e`, where `e` is the number of passes of `u` that have ended when pass `k` of `c`
starts.

- At that start, `k + 1` microbatches have gone through each queue `t` up to `c`, and at most `e` through each queue `g`
  from `u` on, at most `k` through each after `c`. So a hold from `t` to `g` holds its amount `d` times, or once.
- When pass `e` of `u` starts, later, at least `k + 1` microbatches have gone through each `t` up to `c` and at least
  `e + 1` through each `t` up to `u`, still at most `e` through each `g` from `u` on. So a hold from `t` to `g` holds
  its amount `d` times, or once. Without room for that, pass `e` of `u` could never start.

Both must fit into the rank's memory, so `d` is at most some `l`, and pass `k - l` of `u` has ended.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import floor, inf
from typing import TypeAlias

from schedules.analysis.bounds.network import QueueNetwork
from schedules.playing.costs import ROUNDING

Lags: TypeAlias = list[dict[int, int]]
"""Per queue, the least lag to each queue of which a pass must end first."""


def find_lags(network: QueueNetwork) -> tuple[Lags, Lags]:
    """Return the direct lags, and their least sums.

    >>> from schedules.analysis.bounds.network import Hold, QueueNetwork, Queue
    >>> forward, backward = Queue("F", 0, 0, 9, 1, ()), Queue("I", 0, 0, 9, 1, ((0, 0.0),))
    >>> find_lags(QueueNetwork((forward, backward), (Hold(0, 1, 1.0),), (3,)))
    ([{0: 1, 1: 3}, {1: 1, 0: 0}], [{0: 1, 1: 3}, {0: 0, 1: 1}])
    """
    steps = [{c: 1, **dict.fromkeys((u for u, _ in one.waits), 0)} for c, one in enumerate(network.queues)]
    for c in {hold.taker for hold in network.holds}:
        for u in network.on(network.queues[c].rank):
            lag = find_memory_lag(network, c, u)
            if u != c and lag < inf:
                steps[c][u] = min(int(lag), steps[c].get(u, int(lag)))
    return steps, [_add_up(steps, c) for c in range(len(steps))]


def find_memory_lag(network: QueueNetwork, c: int, u: int) -> float:
    """Return the lag from `c` to `u` that the memory of their rank demands, or infinity."""
    earlier = network.earlier
    up_to_c, up_to_u = earlier[c] | {c}, earlier[u] | {u}
    rank = network.queues[c].rank
    times = once_now = once_later = 0.0
    for taker, giver, amount in ((h.taker, h.giver, h.amount) for h in network.holds):
        if network.queues[taker].rank != rank:
            continue
        after_u = giver == u or u in earlier[giver]
        if after_u and taker in up_to_c:
            times += amount
        elif after_u and taker in up_to_u:
            once_later += amount
        elif taker in up_to_c and c in earlier[giver]:
            once_now += amount
    if not times:
        return inf
    room = (network.memory[rank] * (1 + ROUNDING) - max(once_now, once_later)) / times
    return max(1, floor(room)) if room < inf else inf


def _add_up(steps: list[dict[int, int]], start: int) -> dict[int, int]:
    """Return the least sums of steps from one queue to every other, at least one step each."""
    found: dict[int, int] = {}
    heap = [(lag, u) for u, lag in steps[start].items()]
    while heap:
        lag, u = heappop(heap)
        if u in found:
            continue
        found[u] = lag
        for v, more in steps[u].items():
            if v not in found:
                heappush(heap, (lag + more, v))
    return dict(sorted(found.items()))
