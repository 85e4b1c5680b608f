# SPDX-License-Identifier: Apache-2.0
"""Partial orders: what is done, when ranks are free, and what is on its way; extended in all ways needed.

Of all passes that can run next, let `j` be the one that ends first if each starts as early as it can, at `end`, on rank
`r`. Whatever else is not done ends no earlier: it starts later, waits for one of these, or for memory that one of them
gives back. So in any schedule that goes on from here, the next pass of `r` is (Giffler and Thompson, Operations
Research 8, 1960)

- one that starts before `end`: it can run next, too. Each makes a longer partial order;
- or one that starts at `end` or later. Then `j` fits in before it, and nothing else changes its time. Only if `j` is a
  forward, that may take the room of a forward of another stage of `r` in between (`is_crowded`; forwards of the same
  stage come after `j`). For this case, one partial order more: `r` waits until `end`, and next runs none of the passes
  that could have started before.

A weight half that runs right before a pass that could have started in its place may as well run right after it: the two
take the same time together, the memory between them does not matter to either, and the other pass ends earlier. So,
after a weight half, such passes are `barred` from being the next one of the rank; and two weight halves in a row run in
the order of their stages.

Invariant: of all schedules that go on from a partial order, and run none of the barred passes next, one that takes the
least time goes on from one of its extensions, and runs none of theirs next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from schedules.searching.outlook import Clock, Outlook, look_ahead
from schedules.searching.queues import QueueTable

LATEST: Final = 20
"""The power of ends in what a partial order promises."""


class Partial(NamedTuple):
    """A partial order, and what is to come."""

    clock: Clock
    outlook: Outlook


class Brancher:
    """Extends partial orders that may still end within `limit`; no schedule ends before `floor`."""

    def __init__(self, table: QueueTable, floor: float, limit: float) -> None:
        self.table, self.floor, self.limit = table, floor, limit

    def begin(self) -> Partial | None:
        """Return the partial order without any passes, or `None` if no schedule is within the limit."""
        P = len(self.table.on)
        none = ((),) * len(self.table.links)
        return self._judge(Clock(bytes(self.table.size), (0,) * P, none, (0.0,) * P, self.table.work, 0, None))

    def extend(self, partial: Partial) -> Iterator[Partial]:
        """Yield all extensions by a pass, and by a wait, that may be within the limit."""
        table, (clock, outlook) = self.table, partial
        if not outlook.ready:
            return
        starts, time = outlook.starts, table.time
        end, _, first = min((starts[q] + time[q], q < table.stages, q) for q in outlook.ready)
        rank = table.rank[first]
        rivals = [q for q in outlook.ready if table.rank[q] == rank and (starts[q] < end or q == first)]
        yield from filter(None, (self._judge(self._run(partial, q)) for q in rivals))
        if first < table.stages and table.is_crowded(rank, clock.held[rank], clock.counts):
            barred = clock.barred | sum(1 << q for q in rivals)
            waited = self._judge(clock._replace(free=_put(outlook.free, rank, end), barred=barred))
            yield from () if waited is None else (waited,)

    def foresee(self, partial: Partial) -> float:
        """Return how little a partial order promises: by the least ends of its ranks, the latest most."""
        return sum([(end / (self.limit or 1)) ** LATEST for end in partial.outlook.ends])

    def _run(self, partial: Partial, q: int) -> Clock:
        """Return what has happened once the next pass of a queue ran."""
        table, (clock, outlook) = self.table, partial
        rank, counts = table.rank[q], clock.counts
        end = outlook.starts[q] + table.time[q]
        return Clock(
            counts[:q] + bytes((counts[q] + 1,)) + counts[q + 1 :],
            _put(outlook.free, rank, end),
            self._send(partial, q, end),
            _put(clock.held, rank, clock.held[rank] + table.growth[q]),
            _put(clock.left, rank, clock.left[rank] - table.time[q]),
            self._bar(partial, q),
            (clock.trail, q),
        )

    def _send(self, partial: Partial, q: int, end: float) -> tuple[tuple[float, ...], ...]:
        """Return what is on its way once a pass of a queue ended."""
        table, free, found = self.table, partial.outlook.free, list(partial.clock.arrivals)
        for e in table.links_into[q]:
            found[e] = found[e][1:]
        for e in table.links_from[q]:
            link = table.links[e]
            found[e] = (*found[e], max(end + link.transfer, free[link.rank]))
        for e in table.links_to[table.rank[q]]:
            if found[e] and found[e][0] < end:
                found[e] = tuple([max(time, end) for time in found[e]])
        return tuple(found)

    def _bar(self, partial: Partial, q: int) -> int:
        """Return the barred queues once a pass of a queue ran."""
        table, (clock, outlook) = self.table, partial
        barred = clock.barred & ~table.masks[table.rank[q]]
        if q >= 2 * table.stages:
            for other in outlook.ready:
                swaps = other < 2 * table.stages or other < q
                if swaps and table.rank[other] == table.rank[q] and outlook.starts[other] <= outlook.starts[q]:
                    barred |= 1 << other
        return barred

    def _judge(self, clock: Clock) -> Partial | None:
        outlook = look_ahead(self.table, clock, self.floor, self.limit)
        return None if outlook is None else Partial(clock, outlook)


def _put(values: tuple[float, ...], at: int, value: float) -> tuple[float, ...]:
    return (*values[:at], value, *values[at + 1 :])
