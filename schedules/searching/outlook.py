# SPDX-License-Identifier: Apache-2.0
"""The outlook of a partial order: which passes can run next, how early each queue goes on, and the earliest end.

The next pass of a queue starts when its rank is free, and what it waits for has arrived or, if that is not done, can
arrive. A forward without room starts once a pass of its rank can have ended that gives memory back. From then on at
least the queue's tail must follow, and on each rank all its work, and the least tail of its last pass.

All of this is proved for any schedule that goes on from there, so nothing is lost with a partial order that can't end
within a limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple, TypeAlias

from schedules.searching.queues import QueueTable

PassTrail: TypeAlias = "tuple[PassTrail, int] | None"
"""The queues of the passes that ran, last first, as pairs."""


class Clock(NamedTuple):
    """The past of a partial order: the number of passes done per queue, in `counts`, and when each rank is `free`.

    - `arrivals`: per link, in order, when what is on its way arrives; no earlier than the rank there is free.
    - `held`, `left`: per rank, its memory, and the work to do.
    - `barred`: queues that are not the next on their rank, as bits.
    """

    counts: bytes
    free: tuple[float, ...]
    arrivals: tuple[tuple[float, ...], ...]
    held: tuple[float, ...]
    left: tuple[float, ...]
    barred: int
    trail: PassTrail


class Outlook(NamedTuple):
    """The future of a partial order: per queue, the earliest start of its next pass, and which are `ready` to run.

    `free` is when each rank can start something, and `ends` when it can be done at the earliest, with what follows; for
    ranks that are done, both are the earliest end of the schedule.
    """

    starts: list[float]
    ready: list[int]
    free: tuple[float, ...]
    ends: list[float]


def look_ahead(table: QueueTable, clock: Clock, floor: float, limit: float) -> Outlook | None:
    """Return the outlook, or `None` if no schedule can end within the limit; none ends before `floor`."""
    found = _find_starts(table, clock, clock.free, limit)
    if found is not None and found.is_early:
        found = _find_starts(table, clock, found.release, limit)
    if found is None:
        return None
    tails = [table.find_tail(rank, clock.counts) for rank in range(len(clock.free))]
    done = max([floor, *[end for end, tail in zip(clock.free, tails, strict=True) if tail is None]])
    free, ends = list[float](), list[float]()
    for rank, tail in enumerate(tails):
        start = done if tail is None else found.first[rank]
        end = done if tail is None else start + clock.left[rank] + tail
        if end > limit:
            return None
        free.append(start)
        ends.append(end)
    return Outlook(found.starts, found.ready, tuple(free), ends)


class Starts(NamedTuple):
    """The earliest starts per queue, and per rank: its `first` start, and when memory is first given back, `release`.

    `is_early` is true if a forward without room starts before that.
    """

    starts: list[float]
    ready: list[int]
    first: list[float]
    release: list[float]
    is_early: bool


def _find_starts(table: QueueTable, clock: Clock, release: Sequence[float], limit: float) -> Starts | None:
    """Return the earliest starts, given when memory is first given back at the earliest; `None` if past the limit."""
    counts, free, arrivals, held, _, barred, _ = clock
    tails, growth, caps = table.tails, table.growth, table.instance.caps
    starts, ready, crowded = [0.0] * table.size, list[int](), list[int]()
    first, again = [inf] * len(free), [inf] * len(free)
    for q, rank, passes, time, sources in table.steps:
        done = counts[q]
        if done == passes:
            continue
        start, waits = free[rank], barred >> q & 1
        if held[rank] + growth[q] > caps[rank]:
            waits = 1
            crowded.append(q)
            if release[rank] > start:
                start = release[rank]
        for source, link, lag in sources:
            if counts[source] == done:
                waits = 1
                if starts[source] + lag > start:
                    start = starts[source] + lag
            elif link >= 0 and arrivals[link][0] > start:
                start = arrivals[link][0]
        starts[q], end = start, start + time
        if end + tails[q][done] > limit:
            return None
        if start < first[rank]:
            first[rank] = start
        if growth[q] < 0 and end < again[rank]:
            again[rank] = end
        if not waits:
            ready.append(q)
    is_early = bool(crowded) and any(starts[q] < again[table.rank[q]] for q in crowded)
    return Starts(starts, ready, first, again, is_early)
