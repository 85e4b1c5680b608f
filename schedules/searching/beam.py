# SPDX-License-Identifier: Apache-2.0
"""Try all partial orders of so many passes at once, and go on from the best ones: a beam, wider from round to round.

Partial orders that have done the same passes are compared. If one is free nowhere later, gets everything no later and
may go on in every way that the other may, the other is dropped: whatever follows it can follow the first, and ends no
later. The rest that can still beat the best schedule known are kept, if the beam is wide enough, or else the most
promising ones: those with the least ends over all ranks, of which the latest count most.

A beam that dropped none for its width has tried every order: no schedule is faster than the best one known. In little
memory few partial orders exist, and a narrow beam does.

Invariant: the same arguments give the same result, unless it gets late.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import le
from typing import Final, NamedTuple

from schedules.playing.instance import Contender, Instance
from schedules.searching.partial import Brancher, Partial
from schedules.searching.queues import QueueTable
from schedules.searching.timing import time_orders

GLANCE: Final = 64
"""Between looks at the clock, so many partial orders are extended."""


class Swept(NamedTuple):
    """The best orders known after a sweep, whether all that may be faster were tried, and how many it extended."""

    best: Contender
    complete: bool
    extended: int


class Beam:
    """Sweeps through the partial orders of an instance. `bound` is a lower bound on the makespan of all schedules."""

    def __init__(self, instance: Instance, bound: float) -> None:
        self.instance, self.table = instance, QueueTable(instance)
        self.floor = self.table.read_bound(bound)

    def sweep(self, best: Contender, width: int, is_late: Callable[[], bool]) -> Swept:
        """Try partial orders that may be faster than the best orders known, in a beam of this width."""
        brancher = Brancher(self.table, self.floor, self.table.read_goal(best.makespan))
        layer, complete, extended = list(filter(None, [brancher.begin()])), True, 0
        for _ in range(sum(self.table.count)):
            longer = _grow(brancher, layer, is_late)
            if longer is None:
                return Swept(best, False, extended)
            extended += len(layer)
            complete = complete and len(longer) <= width
            layer = longer if len(longer) <= width else sorted(longer, key=brancher.foresee)[:width]
        found = map(self._read, sorted(layer, key=brancher.foresee)[:1])
        return Swept(min([best, *found], key=lambda one: one.makespan), complete, extended)

    def _read(self, partial: Partial) -> Contender:
        """Return the orders of a partial order that has done everything."""
        passes, trail = list[int](), partial.clock.trail
        while trail is not None:
            trail, q = trail
            passes.append(q)
        orders = self.table.spell(passes[::-1])
        played = time_orders(self.instance, orders)
        assert played is not None, "passes ran after those that they need"
        return Contender(played.makespan, orders, "partial orders")


class Crowd:
    """Partial orders with equally many passes, none of which makes another superfluous."""

    def __init__(self) -> None:
        self.rows = dict[bytes, list[tuple[tuple[float, ...], int, Partial]]]()

    def add(self, partial: Partial) -> None:
        """Add a partial order, and drop those that it makes superfluous, unless one makes it so."""
        times, barred = sum(partial.clock.arrivals, partial.outlook.free), partial.clock.barred
        row = self.rows.setdefault(partial.clock.counts, [])
        for others, bars, _ in row:
            if not bars & ~barred and all(map(le, others, times)):
                return
        row[:] = [one for one in row if barred & ~one[1] or not all(map(le, times, one[0]))]
        row.append((times, barred, partial))

    def survivors(self) -> list[Partial]:
        """Return the partial orders that are left."""
        return [partial for row in self.rows.values() for _, _, partial in row]


def _grow(brancher: Brancher, layer: list[Partial], is_late: Callable[[], bool]) -> list[Partial] | None:
    """Return the partial orders with one more pass than those of a layer; `None` if it got late."""
    crowd, waiting = Crowd(), list(layer)
    for at, partial in enumerate(waiting):
        if at % GLANCE == 0 and is_late():
            return None
        for longer in brancher.extend(partial):
            if longer.clock.trail is partial.clock.trail:
                waiting.append(longer)  # it waits, and has done no more than before
            else:
                crowd.add(longer)
    return crowd.survivors()
