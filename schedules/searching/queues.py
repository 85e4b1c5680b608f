# SPDX-License-Identifier: Apache-2.0
"""An instance as queues with times in whole numbers, for a search through partial orders.

A queue is all passes of one kind of one stage. They run in order, so what is done is a number per queue
(`schedules.analysis.bounds.problem` proves that this excludes nothing, on any number of routes). Queue `q` is kind
`q // stages` of stage `q % stages`.

If a common factor makes all times whole, they are counted in the largest unit that divides them all. Then a faster
schedule is faster by one unit at least.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, gcd
from typing import NamedTuple

from schedules.analysis.bounds.heads import find_heads
from schedules.analysis.bounds.network import connect_queues, reverse
from schedules.playing.costs import ROUNDING
from schedules.playing.instance import LETTERS, Instance, Job, PassOrders


class RankLink(NamedTuple):
    """A way between ranks: what `source` makes reaches the passes of `user`, on `rank`, after `transfer`."""

    source: int
    user: int
    rank: int
    transfer: float


class QueueStep(NamedTuple):
    """The needs of the passes of a queue: how many `passes` it has, and the `time` of each.

    `sources` are queues that pass `k` comes after with theirs: each with the link to here, -1 if there is none, and the
    time from the start of the one to that of the other.
    """

    queue: int
    rank: int
    passes: int
    time: float
    sources: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True)
class QueueTable:
    """All queues of an instance: looked up by the number of a queue, a link or a rank."""

    instance: Instance

    @cached_property
    def unit(self) -> float:
        """The time that counts as 1; 0 if times are not whole numbers of any unit, and count as they are."""
        factor, times = self.instance.factor, self.instance.all_times
        return (gcd(*(round(time * factor) for time in times)) or 1) / factor if factor else 0.0

    def read(self, time: float) -> float:
        """Return a time of the instance as it counts here."""
        return round(time / self.unit) if self.unit else time

    def read_bound(self, bound: float) -> float:
        """Return the least makespan that a lower bound leaves."""
        return ceil(bound / self.unit - 1e-6) if self.unit else bound * (1 - ROUNDING)

    def read_goal(self, makespan: float) -> float:
        """Return the largest makespan that is better than this one."""
        return round(makespan / self.unit) - 1 if self.unit else makespan * (1 - ROUNDING)

    @cached_property
    def stages(self) -> int:
        """The number of placed stages."""
        return len(self.instance.rank)

    @cached_property
    def size(self) -> int:
        """The number of queues."""
        return len(self.instance.kinds) * self.stages

    @cached_property
    def rank(self) -> tuple[int, ...]:
        """Per queue, its rank."""
        return self.instance.rank * len(self.instance.kinds)

    @cached_property
    def count(self) -> tuple[int, ...]:
        """Per queue, the number of its passes."""
        return self.instance.counts * len(self.instance.kinds)

    @cached_property
    def time(self) -> tuple[float, ...]:
        """Per queue, the time of a pass."""
        return tuple(self.read(time) for kind in self.instance.kinds for time in self.instance.times[kind])

    @cached_property
    def growth(self) -> tuple[float, ...]:
        """Per queue, the memory that a pass takes at its start, or gives back, below 0, at its end."""
        return tuple(size for kind in self.instance.kinds for size in self.instance.growth[kind])

    @cached_property
    def on(self) -> tuple[tuple[int, ...], ...]:
        """Per rank, its queues."""
        return tuple(tuple(q for q, r in enumerate(self.rank) if r == rank) for rank in range(self.instance.ranks))

    @cached_property
    def masks(self) -> tuple[int, ...]:
        """Per rank, its queues as bits."""
        return tuple(sum(1 << q for q in row) for row in self.on)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Per rank, the time of all its passes."""
        return tuple(sum(self.time[q] * self.count[q] for q in row) for row in self.on)

    @cached_property
    def links(self) -> tuple[RankLink, ...]:
        """All ways between ranks, and those on one rank that take time."""
        return tuple(
            RankLink(source, q, self.rank[q], transfer)
            for q in range(self.size)
            for source, transfer in self._list_needs(q)
            if transfer or self.rank[source] != self.rank[q]
        )

    def _list_needs(self, q: int) -> list[tuple[int, float]]:
        kind, n = divmod(q, self.stages)
        needs = self.instance.needs[kind][n]
        return [(kind * self.stages + m, self.read(transfer)) for m, transfer in needs]

    @cached_property
    def links_to(self) -> tuple[tuple[int, ...], ...]:
        """Per rank, the links that lead there."""
        return tuple(tuple(e for e, one in enumerate(self.links) if one.rank == rank) for rank in range(len(self.on)))

    @cached_property
    def links_from(self) -> tuple[tuple[int, ...], ...]:
        """Per queue, the links that begin there."""
        return tuple(tuple(e for e, one in enumerate(self.links) if one.source == q) for q in range(self.size))

    @cached_property
    def links_into(self) -> tuple[tuple[int, ...], ...]:
        """Per queue, the links that end there."""
        return tuple(tuple(e for e, one in enumerate(self.links) if one.user == q) for q in range(self.size))

    @cached_property
    def steps(self) -> tuple[QueueStep, ...]:
        """The needs of each queue; each comes after those that it waits for."""
        stages = range(self.stages)
        order = [*stages, *(n + self.stages for n in reversed(stages)), *(n + 2 * self.stages for n in stages)]
        return tuple(self._step(q) for q in order[: self.size])

    def _step(self, q: int) -> QueueStep:
        number = {(one.source, one.user): e for e, one in enumerate(self.links)}
        needs = [*([(q - self.stages, 0.0)] if q >= self.stages else []), *self._list_needs(q)]
        sources = tuple((m, number.get((m, q), -1), self.time[m] + transfer) for m, transfer in needs)
        return QueueStep(q, self.rank[q], self.count[q], self.time[q], sources)

    @cached_property
    def tails(self) -> tuple[tuple[float, ...], ...]:
        """Per queue and pass, the least time that follows its end in any schedule."""
        mirrored = reverse(connect_queues(self.instance.problem))
        found = [(0.0,) * count for count in self.count]
        for one, heads in zip(mirrored.queues, find_heads(mirrored), strict=True):
            q = LETTERS.index(one.kind) * self.stages + one.stage
            found[q] = tuple(self.read_bound(tail) for tail in reversed(heads))
        return tuple(found)

    @cached_property
    def by_tail(self) -> tuple[tuple[tuple[int, int, float], ...], ...]:
        """Per rank, its queues, the number of their passes, and the tails of their last ones, in the order of those."""
        rows = ([(q, self.count[q], self.tails[q][-1]) for q in row] for row in self.on)
        return tuple(tuple(sorted(row, key=lambda one: one[2])) for row in rows)

    def find_tail(self, rank: int, counts: bytes) -> float | None:
        """Return the least time that follows the last pass of a rank, or `None` if it has run all."""
        for q, passes, tail in self.by_tail[rank]:
            if counts[q] < passes:
                return tail
        return None

    def is_crowded(self, rank: int, held: float, counts: bytes) -> bool:
        """Return whether a forward that runs early may take the room of one of another stage of its rank."""
        forwards = [q for q in self.on[rank] if q < self.stages]
        left = sum(self.growth[q] * (self.count[q] - counts[q]) for q in forwards)
        return len(forwards) > 1 and held + left > self.instance.caps[rank]

    def spell(self, passes: list[int]) -> PassOrders:
        """Return the orders of passes that are given by their queues."""
        done, orders = [0] * self.size, list[list[Job]]([] for _ in self.on)
        for q in passes:
            kind, n = divmod(q, self.stages)
            orders[self.rank[q]].append((kind, n, done[q]))
            done[q] += 1
        return orders
