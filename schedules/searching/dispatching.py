# SPDX-License-Identifier: Apache-2.0
"""Turn priorities into orders: play time forward, and let each free rank run its most urgent pass.

A rank that is free runs, of the passes whose inputs are there and that fit into its memory, the one with the lowest
priority value. If a more urgent one arrives before that would end, the rank may wait for it, and fill the gap with a
weight half that fits. This needs no search, and keeps the memory at every moment.

A forward begins only if, after it, every microbatch that the rank holds can still go through its later stages there,
the furthest one first (`Instance.has_room`). Then nothing ever gets stuck. Proof: suppose all ranks are, and take, of
the microbatches whose forwards are not finished, the furthest one, about to enter stage `s`. Backwards free memory and
so are never stuck themselves; hence what the rank of `s` holds belongs to microbatches that have not been through `s`,
nor through a later stage of the rank. When the last of it was begun, it left room for `s`. Nor is any schedule of a
chain on one route excluded: a microbatch gives nothing back before it has been through all stages of a rank.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import TypeAlias

from schedules.playing.costs import ROUNDING
from schedules.searching.instance import FORWARD, INPUT_HALF, WEIGHT_HALF, Contender, Instance, Job, PassOrders

Priorities: TypeAlias = list[list[list[float]]]
"""Per kind, stage and microbatch: the lower, the more urgent."""


class Dispatch:
    """All ranks, played forward in time.

    - `ends`, `done`: per kind and stage, the ends of the passes run so far, and their number.
    - `held`, `free`: per rank, its memory and when it is free; `alarms`: when it looks for a pass next.
    """

    def __init__(self, instance: Instance, priorities: Priorities, patience: float, cautious: bool) -> None:
        self.instance, self.priorities, self.patience = instance, priorities, patience
        self.ends: list[list[list[float]]] = [[[] for _ in instance.counts] for _ in range(3)]
        self.orders: PassOrders = [[] for _ in range(instance.ranks)]
        self.held, self.free = [0.0] * instance.ranks, [0.0] * instance.ranks
        self.reserve = instance.reserve if cautious else (0.0,) * len(instance.rank)
        self.done = [[0] * len(instance.counts) for _ in range(3)]
        self.alarms = [0.0] * instance.ranks
        self.queue = [(0.0, rank) for rank in range(instance.ranks)]

    def run(self) -> float | None:
        """Run all passes; return the makespan, or `None` if memory ran out."""
        while self.queue:
            now, rank = heappop(self.queue)
            if self.alarms[rank] != now:
                continue
            self.alarms[rank] = inf
            chosen, later = self._choose(rank, now)
            if chosen is None:
                self._wake(rank, later)
            else:
                self._start(rank, now, chosen)
        missing = len(self.instance.kinds) * sum(self.instance.counts) - sum(map(len, self.orders))
        return None if missing else max(self.free)

    def _choose(self, rank: int, now: float) -> tuple[Job | None, float]:
        """Return the pass to run now; if none, when to look again."""
        best, urgency = None, inf
        coming, arrival, again = inf, inf, inf
        for n in self.instance.on[rank]:
            for kind in self.instance.kinds:
                ready = self._arrival(kind, n)
                if ready == inf:
                    continue
                k = len(self.ends[kind][n])
                priority = self.priorities[kind][n][k]
                if ready <= now * (1 + ROUNDING):
                    if priority < urgency:
                        best, urgency = (kind, n, k), priority
                else:
                    again = min(again, ready)
                    if priority < coming:
                        coming, arrival = priority, ready
        if best is not None and coming < urgency:
            time = self.instance.times[best[0]][best[1]]
            if arrival < (now + time * (1 - self.patience)) * (1 - ROUNDING):
                best = self._fill(rank, arrival - now)
                again = arrival
        return best, again

    def _arrival(self, kind: int, n: int) -> float:
        """Return when the inputs of the next pass of this kind are there; infinity if that is not known yet."""
        k, ready = len(self.ends[kind][n]), 0.0
        if kind == FORWARD:
            held = self.held[self.instance.rank[n]] + self.reserve[n]
            if k == self.instance.counts[n] or not self.instance.has_room(n, held, self.done):
                return inf
        elif k == len(self.ends[kind - 1][n]):
            return inf
        for other, transfer in self.instance.needs[kind][n]:
            ends = self.ends[kind][other]
            if k >= len(ends):
                return inf
            if ends[k] + transfer > ready:
                ready = ends[k] + transfer
        return ready

    def _fill(self, rank: int, gap: float) -> Job | None:
        """Return the most urgent weight half that fits into a gap."""
        best, urgency = None, inf
        for n in self.instance.on[rank]:
            k = len(self.ends[WEIGHT_HALF][n])
            if k < len(self.ends[INPUT_HALF][n]) and self.instance.times[WEIGHT_HALF][n] <= gap * (1 + ROUNDING):
                priority = self.priorities[WEIGHT_HALF][n][k] if WEIGHT_HALF in self.instance.kinds else inf
                if priority < urgency:
                    best, urgency = (WEIGHT_HALF, n, k), priority
        return best

    def _start(self, rank: int, now: float, chosen: Job) -> None:
        """Run a pass, and wake the ranks that may use its output."""
        kind, n, _ = chosen
        end = now + self.instance.times[kind][n]
        self.orders[rank].append(chosen)
        self.ends[kind][n].append(end)
        self.done[kind][n] += 1
        self.held[rank] += self.instance.growth[kind][n]
        self.free[rank] = end
        for other, transfer in self.instance.gives[kind][n]:
            user = self.instance.rank[other]
            self._wake(user, max(end + transfer, self.free[user]))
        self._wake(rank, end)

    def _wake(self, rank: int, time: float) -> None:
        if time < self.alarms[rank]:
            self.alarms[rank] = time
            heappush(self.queue, (time, rank))


def dispatch(
    instance: Instance, priorities: Priorities, origin: str, patience: float = 0.0, cautious: bool = False
) -> Contender | None:
    """Return the orders that follow from the priorities, or `None` if memory ran out, as it may in a graph with skips.

    `patience` is the share of a pass by which a more urgent one may come late, from 0, wait for it whenever it arrives
    before the pass would end, to 1, never wait. If `cautious`, a forward begins only if its own microbatch could go on
    at once, whatever others give back: good orders in little memory are often like that.
    """
    played = Dispatch(instance, priorities, patience, cautious)
    makespan = played.run()
    return None if makespan is None else Contender(makespan, played.orders, origin)
