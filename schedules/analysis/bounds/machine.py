# SPDX-License-Identifier: Apache-2.0
"""One rank, which does one thing at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple


class BusyTime:
    """The time in which a rank is busy, if it never waits while one of its passes could run.

    Which of these passes runs first does not matter for when the rank is busy. So a pass that is added fills the first
    free time after its earliest start, and `end` is the least time at which all that were added can have ended: the
    largest sum of an earliest start and the times of all passes that cannot start before it. `paused` and `resumed` say
    when the rank is free in between.

    >>> busy = BusyTime()
    >>> for start, time in ((0, 1), (4, 2), (0, 2)):
    ...     busy.add(start, time)
    >>> busy.end, busy.paused, busy.resumed
    (6, [3], [4])
    """

    __slots__ = ("end", "paused", "resumed")

    def __init__(self) -> None:
        self.end = 0.0
        self.paused: list[float] = []
        self.resumed: list[float] = []

    def add(self, start: float, time: float) -> None:
        """Add a pass that takes `time` and cannot start before `start`."""
        if start >= self.end:
            if start > self.end:
                self.paused.append(self.end)
                self.resumed.append(start)
            self.end = start + time
            return
        at = bisect_right(self.resumed, start)
        if at < len(self.resumed) and self.paused[at] < start:
            self._split(at, start)
            at += 1
        while time > 0 and at < len(self.resumed):
            free = self.resumed[at] - self.paused[at]
            if free > time:
                self.paused[at] += time
                return
            del self.paused[at], self.resumed[at]
            time -= free
        self.end += max(time, 0)

    def _split(self, at: int, time: float) -> None:
        """Cut a free time in two, so that the second part begins at `time`."""
        self.paused.insert(at + 1, time)
        self.resumed.insert(at, time)


class Passes(NamedTuple):
    """Passes of a rank that start at `head` at the earliest, take `work`, and are followed by at least `tail`."""

    head: float
    work: float
    tail: float

    @property
    def end(self) -> float:
        """The least time at which the schedule can end."""
        return self.head + self.work + self.tail


def find_tightest(passes: Iterable[Passes]) -> Passes:
    """Return the passes of a rank, taken together, that end the schedule latest.

    A rank does one thing at a time. So the schedule lasts at least the earliest start of some passes, plus the time of
    all of them, plus the least that follows the last one, whichever that is. No set of passes gives more than one that
    consists of all passes with a tail of at least `q` and a head of at least `h`, for some `q` and `h`. The result is
    the makespan of that rank alone if passes could be interrupted (Carlier and Pinson, "An algorithm for solving the
    job-shop problem", Management Science 35, 1989).

    >>> find_tightest([Passes(0, 2, 5), Passes(1, 2, 4), Passes(5, 1, 0)])
    Passes(head=0, work=4, tail=4)
    """
    busy, best = BusyTime(), Passes(0, 0, 0)
    for head, work, tail in sorted(passes, key=lambda one: -one.tail):
        busy.add(head, work)
        if busy.end + tail > best.end:
            begin = busy.resumed[-1] if busy.resumed else 0
            best = Passes(begin, busy.end - begin, tail)
    return best
