# SPDX-License-Identifier: Apache-2.0
"""Building blocks: a rank's passes for one microbatch, with their times, repeated at an interval.

Problem. What a rank should run next depends on the timing of all other ranks, but a schedule found by playing them all
needs all of their actions at once.

Idea (arXiv 2405.15362, section 3). Give each pass of microbatch 0 a time at which its inputs have arrived and at which,
modulo an interval, no other pass of the rank begins. Microbatch `i` can then do the same `i` intervals later, for any
`i`. Sorting these times gives a rank's order without looking at other ranks. Free slots take weight gradients, which
no rank waits for. The times assume certain costs, but only the order is kept, so actual costs may differ.

Invariant: each rank runs its passes in the order of their times. So if no pass has a time before that of the pass whose
output it needs, the ranks cannot deadlock, whatever the costs.

1F1B, where a forward takes one slot and a backward two:

>>> from schedules.language.actions import B, F
>>> P, r = 4, 2
>>> forwards = time_passes(F, r, every(3, first=r), microbatches=3)
>>> backwards = time_passes(B, r, every(3, first=3 * P - 2 - 2 * r), microbatches=3)
>>> list(merge_in_order(forwards, backwards))
[F(2, 0), F(2, 1), B(2, 0), F(2, 2), B(2, 1), B(2, 2)]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import chain, count, repeat
from math import inf
from typing import TypeAlias

from schedules.language.actions import Action, W

Timed: TypeAlias = tuple[float, Action]


def every(interval: int, first: int, early: Sequence[int] = ()) -> Iterator[int]:
    """Return times at an interval, starting at `first`, except that the first microbatches get the `early` times.

    >>> times = every(6, first=1, early=[0, 2])
    >>> [next(times) for _ in range(4)]
    [0, 2, 13, 19]
    """
    return chain(early, count(first + interval * len(early), interval))


def time_passes(
    kind: Callable[[int, int], Action], stage: int, times: Iterable[float], microbatches: int
) -> Iterator[Timed]:
    """Return a pass of one kind on one stage for each microbatch, with its time; times must ascend."""
    return zip(times, map(kind, repeat(stage), range(microbatches)), strict=False)


def merge_in_order(*several: Iterator[Timed], memory: float = inf) -> Iterator[Action]:
    """Yield all passes in the order of their times, and the `W` of every `I` in a free slot, or at the end.

    A `W` also comes before a forward that would be activation number `memory + 1` on the rank.

    >>> from schedules.language.actions import F, I
    >>> list(merge_in_order(time_passes(F, 0, [0, 1, 4], 3), time_passes(I, 0, [2, 5, 6], 3)))
    [F(0, 0), F(0, 1), I(0, 0), W(0, 0), F(0, 2), I(0, 1), I(0, 2), W(0, 1), W(0, 2)]
    """
    owed = deque[Action]()
    held, now = 0, 0.0
    for time, action in merge(*several):
        kind, stage, i, _, _ = action
        while owed and (now < time or (kind == "F" and held >= memory)):
            yield owed.popleft()
            held, now = held - 1, now + 1
        yield action
        now = time + 1
        if kind == "F":
            held += 1
        elif kind == "I":
            owed.append(W(stage, i))
        else:
            held -= 1
    yield from owed
