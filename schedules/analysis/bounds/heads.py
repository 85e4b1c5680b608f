# SPDX-License-Identifier: Apache-2.0
"""Heads and tails of passes: how early each can start in any schedule, and how long the schedule lasts after it.

Heads are found microbatch by microbatch, each queue after those it waits for, as the largest of

- the end of every pass that ends before it in every schedule (`precedence`), each with its own head, and a transfer;
- the least time at which all such passes on its own rank can have ended, as the rank does one thing at a time;
- if it takes memory: the least time at which enough passes of its rank can have ended that give memory back, whichever
  they are (`release`). For every time `t`, the rank must do, after `t`, all passes that come before it and cannot start
  before `t`, and the least work in such passes that gives back what is missing. All that has ended when it starts.

A tail is a head in the mirror image in time.
"""

from __future__ import annotations

from bisect import bisect_left

from schedules.analysis.bounds.machine import BusyTime
from schedules.analysis.bounds.network import QueueNetwork
from schedules.analysis.bounds.precedence import find_lags
from schedules.analysis.bounds.release import Demand, Heads, find_demand, find_least_work, find_release


class Row:
    """One queue while heads are found.

    - `steps`: the queues that its passes come after directly, with the lags; `same`: all on its rank, with the lags.
    - `busy`: the passes of its rank that come before its next one.
    - `tightest`: the time `t` that gave the last head by memory.
    """

    def __init__(self, network: QueueNetwork, c: int, steps: dict[int, int], lags: dict[int, int]) -> None:
        rank = network.queues[c].rank
        self.steps = [(u, lag) for u, lag in steps.items() if lag]
        self.same = [(u, lags[u]) for u in network.on(rank) if u in lags]
        self.busy, self.tightest = BusyTime(), 0.0
        self.demand = find_demand(network, c, lags)


def find_heads(network: QueueNetwork) -> Heads:
    """Return a lower bound on the start of every pass, by queue and microbatch.

    >>> from schedules.analysis.bounds.network import Hold, QueueNetwork, Queue
    >>> forward, backward = Queue("F", 0, 0, 3, 1, ()), Queue("I", 0, 0, 3, 2, ((0, 5.0),))
    >>> find_heads(QueueNetwork((forward, backward), (Hold(0, 1, 1.0),), (2,)))
    [[0.0, 1.0, 8.0], [6.0, 8.0, 14.0]]
    """
    steps, lags = find_lags(network)
    rows = [Row(network, c, steps[c], lags[c]) for c in range(len(network.queues))]
    times = [one.time for one in network.queues]
    heads: Heads = [[] for _ in rows]
    for k in range(max((one.passes for one in network.queues), default=0)):
        for c in network.order:
            if k < network.queues[c].passes:
                heads[c].append(_find_head(network, c, k, rows[c], heads, times))
    return heads


def _find_head(network: QueueNetwork, c: int, k: int, row: Row, heads: Heads, times: list[float]) -> float:
    """Return the head of pass `k` of queue `c`."""
    head = 0.0
    for u, transfer in network.queues[c].waits:
        head = max(head, heads[u][k] + times[u] + transfer)
    for u, lag in row.steps:
        if k >= lag:
            head = max(head, heads[u][k - lag] + times[u])
    for u, lag in row.same:
        if k >= lag:
            row.busy.add(heads[u][k - lag], times[u])
    head = max(head, row.busy.end)
    return head if row.demand is None else _wait_for_memory(row, row.demand, k, heads, times, head)


def _wait_for_memory(row: Row, demand: Demand, k: int, heads: Heads, times: list[float], head: float) -> float:
    """Return the head of pass `k`, given that without its memory; try the times most likely to be the tightest."""
    need, offers = demand.at(k)
    if not need:
        return head
    head = max(head, find_release(offers, need, demand.slack, heads, times))
    starts = {row.tightest, *row.busy.resumed[-2:]}
    for step in (step for offer in offers for step in offer if step is not None):
        starts.update(heads[step.queue][step.done : step.done + 1])
    for start in starts:
        work = find_least_work(offers, need, demand.slack, heads, times, start)
        for u, lag in row.same:
            n = k + 1 - lag
            if n > 0:
                work += (n - bisect_left(heads[u], start, 0, n)) * times[u]
        if work and start + work > head:
            head, row.tightest = start + work, start
    return head
