# SPDX-License-Identifier: Apache-2.0
"""Building blocks: what a rank does with one microbatch, and at what times, repeated at an interval.

Problem. When a rank should do what depends on what all other ranks do when; a schedule made by playing them all needs
all of their actions at once.

Idea (arXiv 2405.15362, section 3). Give each pass of microbatch 0 a time at which its data have arrived and, counted
modulo an interval, no other pass of the rank begins. Microbatch `i` can then do the same `i` intervals later, and so
for ever. The order of these times is a rank's order, and needs no other rank's. Slots that stay free take weight
gradients, for which nobody waits. Costs need not be those that the times assume: only the order is kept.

Invariant: each rank has its passes in the order of their times. So if no pass has a time before that of the pass
whose data it needs, no ranks wait for each other in a circle, whatever the costs.

1F1B, of which a forward takes one slot and a backward two:

>>> from schedules.actions import B, F
>>> P, r = 4, 2
>>> forwards = passes(F, r, every(3, first=r), microbatches=3)
>>> backwards = passes(B, r, every(3, first=3 * P - 2 - 2 * r), microbatches=3)
>>> list(in_order(forwards, backwards))
[F(2, 0), F(2, 1), B(2, 0), F(2, 2), B(2, 1), B(2, 2)]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import chain, count, repeat
from math import inf
from typing import TypeAlias

from schedules.actions import Action, W

Timed: TypeAlias = tuple[float, Action]


def every(interval: int, first: int, early: Sequence[int] = ()) -> Iterator[int]:
    """Times at an interval, of which `first` is microbatch 0's; but the first microbatches have `early` times instead.

    >>> times = every(6, first=1, early=[0, 2])
    >>> [next(times) for _ in range(4)]
    [0, 2, 13, 19]
    """
    return chain(early, count(first + interval * len(early), interval))


def passes(
    kind: Callable[[int, int], Action], stage: int, times: Iterable[float], microbatches: int
) -> Iterator[Timed]:
    """A kind of pass on one stage, for each microbatch at its time; times must ascend."""
    return zip(times, map(kind, repeat(stage), range(microbatches)), strict=False)


def in_order(*several: Iterator[Timed], memory: float = inf) -> Iterator[Action]:
    """All passes in the order of their times, with the `W` of every `I`: in slots that are free, or at the end.

    A `W` also comes where a forward would be activation number `memory + 1` of the rank.

    >>> from schedules.actions import F, I
    >>> list(in_order(passes(F, 0, [0, 1, 4], 3), passes(I, 0, [2, 5, 6], 3)))
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
