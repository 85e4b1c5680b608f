# SPDX-License-Identifier: Apache-2.0
"""V placement: each rank holds a stage from the front of the model and one from its back.

Idea. A microbatch goes down the ranks and back up, forward, then down and back up, backward. If its activations live
long in one chunk of a rank, they live briefly in the other, so all ranks need the same memory, as little as a third of
that of 1F1B (arXiv 2405.15362, section 3). All members repeat one building block (`schedules.families.blocks`), whose
offsets follow from the memory: the later the backwards after the forwards, the more is in flight, and the less ranks
wait.

A block reserves slots for passes that have not begun at first and are over in the end. So the first microbatches run
on every rank as early as they can, and the last backwards as late as they can without delaying another rank. Each rank
moves the rest to follow on from these; tests show, size by size, that the orders of all ranks still agree.

Times are in slots: a chunk's forward takes one, its `I` and its `W` one each, its `B` two.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, count, islice, repeat
from math import inf
from typing import NamedTuple

from schedules.errors import SizeError
from schedules.families.blocks import every, in_order, passes
from schedules.language.actions import Action, B, F, I
from schedules.language.placement import vee
from schedules.language.schedule import Limits, schedule

INTERVAL = 6  # slots that one microbatch takes on a rank


class Block(NamedTuple):
    """The times of microbatch 0 on a rank: forward in its first and second chunk, backward in its second and first."""

    f1: int
    f2: int
    b2: int
    b1: int


def _begun(
    rank: int, ranks: int, microbatches: int, memory: int, block: Block, length: int
) -> tuple[list[Iterator[float]], int]:
    """Return the times of each pass of the block, at first as early as possible, and the end of all forwards.

    First-chunk forwards run alone, then in turn with second-chunk ones, until the first cotangent passes on its way
    down. Then each backward, of `length` slots, makes room for a second-chunk forward, or another first-chunk one. When
    that cotangent comes back up, as many forwards have run as in the block, which continues from there.
    """
    P, r, half = ranks, rank, memory // 2
    down, up = 2 * P + length * r, 2 * P + length * (2 * P - 1 - r)  # when the first cotangent passes
    turns = min(r + 1, half)
    alone = min(2 * (P - 1 - r), memory - turns)
    front = min(memory - turns, alone + r + 1)
    ahead = Block(*(-((first - block.b1) // INTERVAL) for first in block))

    def turn(j: int) -> int:
        return 2 * P - 1 - r + 2 * j if j < turns else down + 2 + 3 * (j - turns)

    f1 = [r + j if j < alone else 2 * P - 2 - r + 2 * (j - alone) for j in range(front)]
    f1 += [turn(half + j - front) for j in range(front, ahead.f1)]
    f2 = [turn(j) for j in range(half)]
    b2 = [down + 3 * j for j in range(min(half, ahead.b2))]
    early = f1, f2, b2, list[int]()
    busy = max(f1[-1], f2[-1], b2[-1] + length - 1) + 1
    free = min(first + INTERVAL * len(some) for first, some in zip(block, early, strict=True))
    shift = max(up - block.b1, busy - free)
    last = turn(microbatches - 1) if microbatches <= half else block.f2 + shift + INTERVAL * (microbatches - 1)
    return [every(INTERVAL, first + shift, some) for first, some in zip(block, early, strict=True)], last + 1


def _ended(times: Iterator[float], microbatches: int, end: int, waiting: int) -> Iterator[float]:
    """Return `times`, capped at every second slot up to `end`; the last `waiting` microbatches are at the cap."""
    free = chain(islice(times, max(0, microbatches - waiting)), repeat(inf))
    return map(min, free, count(end - 2 * (microbatches - 1), 2))


def _split(rank: int, ranks: int, microbatches: int, memory: int) -> Iterator[Action]:
    """Return the order of a rank that holds at most `memory` chunk activations, from `least` to `2P`.

    Backwards follow forwards by the same `lag` in both chunks, as late as an even number of activations allows. If the
    number is odd, first-chunk forwards come one interval earlier.
    """
    P, M, r, half, odd = ranks, microbatches, rank, memory // 2, memory % 2
    lag, back = 6 * half - 4, 2 * P - 1 - r
    f1, f2 = r + min(4 * r, lag - 2 * P), lag - 1 - r
    block = Block(f1 - INTERVAL * odd, f2, f1 + lag, f2 + lag)
    (early1, early2, late2, late1), done = _begun(r, P, M, memory, block, length=1)
    end = done + r + 2 * P - 1 if half < M else 4 * P - 1 + 3 * (M - 1)
    late2 = _ended(late2, M, end - back, waiting=odd * min(r + 1, half))
    late1 = _ended(late1, M, end - r, waiting=odd * (half + 1))
    first = passes(F, r, early1, M), passes(I, r, late1, M)
    second = passes(F, back, early2, M), passes(I, back, late2, M)
    return in_order(*first, *second, memory=memory)


def least(ranks: int) -> int:
    """Return the fewest chunk activations a rank can hold in such a schedule: V-Min's."""
    return 2 * ((ranks + 4) // 3)


def _enough(ranks: int, microbatches: int, memory: int) -> None:
    if isinstance(memory, bool) or not isinstance(memory, int) or memory < least(ranks):
        expected = f"an integer of at least {least(ranks)}, the activations of chunks that {ranks} ranks need"
        raise SizeError.of("v_schedule", "memory", memory, expected, f"Choose memory={least(ranks)}, which is v_min.")


def _of_chunks(rank: int, ranks: int, microbatches: int, memory: int) -> float:
    return min(memory / 2, ranks, microbatches)


@schedule(placement=vee, limits=Limits(memory=_of_chunks), requires=_enough)
def v_schedule(rank: int, ranks: int, microbatches: int, memory: int = 8) -> Iterator[Action]:
    """Trade memory for waiting: `m` chunk activations of half a microbatch each (arXiv 2405.15362, section 3).

    Time a rank waits between its first and last action, in slots, if all passes take equally long and `M >= m`:
    `6P - 1 - 3m` up to `m = 2P - 2`, then 3, then none at `m = 2P`; more memory does not help. No shorter waits are
    known. Peak memory: `min(m / 2, M)` microbatches, on every rank if `M >= m`. `m` must be at least
    `2 floor((P + 4) / 3)`, which gives `v_min`; `2 floor((P + 2) / 2)` gives `v_half`, and `2P` gives `zb_v`.

    >>> print(v_schedule(ranks=3, microbatches=3, memory=5))
    rank 0 |0F0 0F1 0F2 .   .   5F0 5I0 5W0 5F1 5I1 5W1 .   5F2 5I2 0I0 5W2 0I1 0W0 0I2 0W1 0W2 .   |
    rank 1 |.   1F0 1F1 1F2 4F0 .   4F1 4I0 4W0 .   .   4F2 4I1 1I0 4I2 1I1 4W1 1I2 1W0 4W2 1W1 1W2 |
    rank 2 |.   .   2F0 3F0 2F1 3F1 2F2 .   3I0 3W0 3F2 2I0 .   3I1 2I1 3I2 2I2 2W0 3W1 2W1 3W2 2W2 |
    """
    return _split(rank, ranks, microbatches, min(memory, 2 * ranks))


@schedule(placement=vee, limits=Limits(memory=lambda rank, ranks, microbatches: min((ranks + 4) // 3, microbatches)))
def v_min(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """V-Min: the least memory that keeps ranks busy, a third of that of 1F1B (arXiv 2405.15362, section 3).

    Time a rank waits between its first and last action, if all passes of a chunk take `F` and `M` is at least twice
    the memory: `(6P - 1 - 6 floor((P + 4) / 3)) F` for `P >= 3`, none for fewer ranks. Peak memory:
    `min(floor((P + 4) / 3), M)` microbatches, for such an `M` on every rank.

    >>> print(v_min(ranks=3, microbatches=3))
    rank 0 |0F0 0F1 0F2 .   .   5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0 .   .   5F2 5I2 0I1 5W2 0W1 .   0I2 0W2 |
    rank 1 |.   1F0 1F1 .   4F0 .   4F1 4I0 4W0 .   1I0 1F2 1W0 4I1 4F2 4W1 1I1 4I2 1W1 4W2 1I2 1W2 .   |
    rank 2 |.   .   2F0 3F0 2F1 3F1 .   .   3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2 .   |
    """
    return _split(rank, ranks, microbatches, least(ranks))


@schedule(placement=vee, limits=Limits(memory=lambda rank, ranks, microbatches: min((ranks + 2) // 2, microbatches)))
def v_half(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """V-Half: half the memory of 1F1B, and half its waiting (arXiv 2405.15362, section 3).

    Time a rank waits between its first and last action, if all passes of a chunk take `F` and `M` is at least twice
    the memory: `(6P - 1 - 6 floor((P + 2) / 2)) F` for `P >= 3`, none for fewer ranks. Peak memory:
    `min(floor((P + 2) / 2), M)` microbatches, for such an `M` on every rank.

    >>> print(v_half(ranks=4, microbatches=3))
    rank 0 |0F0 0F1 0F2 .   .   .   .   7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 0I0 7W2 0W0 .   0I1 0W1 0I2 0W2 |
    rank 1 |.   1F0 1F1 1F2 .   .   6F0 .   6F1 6I0 6W0 6F2 6I1 6W1 1I0 6I2 1W0 6W2 1I1 1W1 1I2 1W2 .   |
    rank 2 |.   .   2F0 2F1 2F2 5F0 .   5F1 .   5F2 5I0 5W0 .   2I0 5I1 2W0 5I2 2I1 5W1 2I2 5W2 2W1 2W2 |
    rank 3 |.   .   .   3F0 4F0 3F1 4F1 3F2 4F2 .   .   4I0 3I0 4W0 3W0 4I1 3I1 4I2 3I2 4W1 3W1 4W2 3W2 |
    """
    return _split(rank, ranks, microbatches, 2 * ((ranks + 2) // 2))


@schedule(placement=vee, limits=Limits(memory=lambda rank, ranks, microbatches: min(ranks, microbatches)))
def zb_v(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """ZB-V: no waiting, in the memory of 1F1B (arXiv 2401.10241, section 6; V-ZB in arXiv 2405.15362, section 3).

    Time a rank waits between its first and last action, if all passes of a chunk take equally long and `M >= 2P`:
    none. Ranks start one after another, and end one after another. Peak memory: `min(P, M)` microbatches.

    >>> print(zb_v(ranks=2, microbatches=3))
    rank 0 |0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2 .   |
    rank 1 |.   1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 1F2 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2 |
    """
    return _split(rank, ranks, microbatches, 2 * ranks)


@schedule(placement=vee, limits=Limits(memory=lambda rank, ranks, microbatches: min(2 * ranks // 3 + 1, microbatches)))
def v_1f1b(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """1F1B in a V, with whole backwards: two thirds of its memory (arXiv 2405.15362, section 3).

    Backwards take two slots and forwards one, so on every third rank a backward waits half an interval for two free
    slots. Idle time per rank, if `B = 2 F` for a chunk and `M` is at least twice the memory:
    `(5 (P - 1) - (P - 1) mod 3) F`. Peak memory: `min(floor(2P / 3) + 1, M)` microbatches, for such an `M` on every
    rank.

    >>> print(v_1f1b(ranks=2, microbatches=3))
    rank 0 |0F0 0F1 0F2 3F0 3B0     3F1 3B1     .   0B0     3F2 3B2     .   0B1     .   .   0B2     |
    rank 1 |.   1F0 2F0 1F1 2F1 .   2B0     1B0     1F2 2F2 2B1     1B1     2B2     1B2     .   .   |
    """
    P, M, r, back = ranks, microbatches, rank, 2 * ranks - 1 - rank

    def cotangent(hops: int) -> int:
        return 2 * P + 2 * hops + (2 * ((P - 1) % 3) + hops) // 3 * 3

    block = Block(r, back, cotangent(r), cotangent(back))
    (early1, early2, late2, late1), _ = _begun(r, P, M, 2 * (2 * P // 3 + 1), block, length=2)
    first = passes(F, r, early1, M), passes(B, r, late1, M)
    second = passes(F, back, early2, M), passes(B, back, late2, M)
    return in_order(*first, *second)
