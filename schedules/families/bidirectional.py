# SPDX-License-Identifier: Apache-2.0
"""Microbatches enter at both ends: every stage lives on two ranks, and two pipelines fill each other's idle time.

Each direction by itself is 1F1B (in Chimera, one unit after another); the members differ in how a rank merges the two.
Even microbatches go down the ranks and odd ones up, so rank `r` does for one what rank `P - 1 - r` does for the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import merge
from itertools import count
from typing import TypeAlias

from schedules.errors import SizeError
from schedules.families.placements import bidirectional, vee
from schedules.language.actions import Action, B, F
from schedules.language.schedule import Limits, schedule
from schedules.playing.board import sum_replicas


def _require_even(factory: str) -> Callable[..., None]:
    def require(ranks: int, microbatches: int) -> None:
        if ranks % 2:
            reason = "an even number: with an odd one, both directions would need every rank at the same time"
            raise SizeError.of(factory, "ranks", ranks, reason, f"Choose ranks={ranks + 1}.")

    return require


def _chimera_memory(rank: int, ranks: int, microbatches: int) -> float:
    down, up = -(-microbatches // 2), microbatches // 2
    return min(ranks // 2, ranks - rank, down) + min(ranks // 2, rank + 1, up)


@schedule(placement=bidirectional, limits=Limits(memory=_chimera_memory), requires=_require_even("chimera"))
def chimera(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Two pipelines that never need a rank at the same time (Chimera, arXiv 2107.06925, sections 3.1 and 3.5).

    With `F = B`, microbatch `k` of a direction enters its 1F1B at time `2k`, and its passes on stage `s` begin at
    `2k + s` and `2k + 2P - 1 - s`. `P` is even, so on each rank one direction takes the even times and the other the
    odd ones, and `P / 2` microbatches of each, a unit, fill all slots until the next unit enters at `2P`. A rank runs
    its passes in the order of these times, whatever they cost ("direct concatenation" of units).

    Idle time per rank: `(P - 2) (max(F, B) + (M / P - 1) |F - B|)` if `P` divides `M`; with `F = B` and a last unit
    of `m` microbatches, `(2P - 2 - 2 floor(m / 2)) F`. Peak memory: `min(P / 2, P - r) + min(P / 2, r + 1)`
    microbatches on rank `r`, if each direction has that many. `P` must be even.

    >>> print(chimera(ranks=4, microbatches=4))
    rank 0 |0F0 0F2 .   3F1 3B1     3F3 3B3     .   0B0     .   .   0B2    g|
    rank 1 |.   1F0 2F1 1F2 2F3 .   2B1     1B0     2B3     1B2    g.   .   |
    rank 2 |.   1F1 2F0 1F3 2F2 .   2B0     1B1     2B2     1B3    g.   .   |
    rank 3 |0F1 0F3 .   3F0 3B0     3F2 3B2     .   0B1     .   .   0B3    g|
    """
    ways = ((rank, range(0, microbatches, 2)), (ranks - 1 - rank, range(1, microbatches, 2)))
    for _, action in merge(*(passes for stage, mine in ways for passes in _time_passes(stage, ranks, mine))):
        yield action
    yield from sum_replicas(rank, bidirectional(ranks), microbatches)


def _time_passes(stage: int, ranks: int, microbatches: range) -> Iterator[Iterator[tuple[int, Action]]]:
    """Yield the forwards, then the backwards, of a stage, each with its start time if all passes take equally long."""
    yield ((_entry_time(i, ranks) + stage, F(stage, i)) for i in microbatches)
    yield ((_entry_time(i, ranks) + 2 * ranks - 1 - stage, B(stage, i)) for i in microbatches)


def _entry_time(i: int, ranks: int) -> int:
    return i // ranks * 2 * ranks + i % ranks // 2 * 2


def _dualpipe_memory(rank: int, ranks: int, microbatches: int) -> float:
    return min(ranks - rank, -(-microbatches // 2)) + min(rank + 1, microbatches // 2)


@schedule(placement=bidirectional, limits=Limits(memory=_dualpipe_memory), requires=_require_even("dualpipe"))
def dualpipe(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """1F1B in both directions, forwards overlapped with backwards (DualPipe, arXiv 2412.19437, section 3.2.1).

    The first and last backwards are split, so that cotangents leave early and weight gradients fill the gaps.

    Idle time per rank, with `FB` for the time of a pair: `(P / 2 - 1) (FB + B - 3W)` for even `M >= 2P - 2`,
    `B = I + W` and `F = I >= W`; if pairs save time, that holds in the middle, and other ranks idle less. An odd `M`
    takes as long as `M + 1`. Peak memory: `min(P - r, ceil(M / 2)) + min(r + 1, floor(M / 2))` microbatches on rank
    `r`, so `P + 1` from `M = 2P` on. `P` must be even. If `M < 2P - 2`, the passes of missing microbatches are skipped.

    >>> print(dualpipe(ranks=4, microbatches=6))
    rank 0 |0F0 0F2 0F4 3F1 3I1 3W1 3F3 3B3     .   .   3F5&0B0     3B5     0I2 0W2 0I4 0W4g|
    rank 1 |.   1F0 2F1 1F2 2F3 1F4 2B1     2F5&1B0     2B3     1B2     .   2I5 1I4 2W5 1W4g|
    rank 2 |.   1F1 2F0 1F3 2F2 1F5 2B0     2F4&1B1     2B2     1B3     .   2I4 1I5 2W4 1W5g|
    rank 3 |0F1 0F3 0F5 3F0 3I0 3W0 3F2 3B2     .   .   3F4&0B1     3B4     0I3 0W3 0I5 0W5g|
    """
    place = min(rank, ranks - 1 - rank)
    for step in _dualpipe(place, ranks, max(-(-microbatches // 2), ranks - 1)):
        passes = (Action(kind, stage, 2 * k + (side ^ (rank != place))) for kind, stage, side, k in step)
        yield from _as_pair([action for action in passes if action.microbatch < microbatches])
    yield from sum_replicas(rank, bidirectional(ranks), microbatches)


def _dualpipe_v_memory(rank: int, ranks: int, microbatches: int) -> float:
    return (min(2 * ranks - rank, microbatches) + min(rank + 1, microbatches)) / 2


@schedule(placement=vee, limits=Limits(memory=_dualpipe_v_memory))
def dualpipe_v(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """`dualpipe` of twice the ranks and microbatches, folded in the middle: one replica of each stage, in a V.

    Rank `r` does for all microbatches what rank `r` of the upper half does in `dualpipe` for those of each direction
    ("cut in half", Sea AI Lab 2025, https://huggingface.co/blog/ufotalent/cut-in-half).

    Idle time per rank, for the times of one chunk: `(P - 1) (FB + B - 3W)` for `M >= 2P - 1`, otherwise as in
    `dualpipe`. Peak memory: `(min(2P - r, M) + min(r + 1, M)) / 2` microbatches on rank `r`, so `P + 1/2` from
    `M = 2P` on.

    >>> print(dualpipe_v(ranks=2, microbatches=3))
    rank 0 |0F0 0F1 0F2 3F0 3I0 3W0 3F1 3B1     .   .   3F2&0B0     3B2     0I1 0W1 0I2 0W2 |
    rank 1 |.   1F0 2F0 1F1 2F1 1F2 2B0     2F2&1B0     2B1     1B1     .   2I2 1I2 2W2 1W2 |
    """
    for step in _dualpipe(rank, 2 * ranks, max(microbatches, 2 * ranks - 1)):
        yield from _as_pair([Action(kind, stage, k) for kind, stage, _, k in step if k < microbatches])


def _as_pair(actions: list[Action]) -> list[Action]:
    """Return two passes as a fused pair, and one as it is."""
    return actions if len(actions) < 2 else [actions[0]._replace(kind="OVERLAP_F"), actions[1]]


Pass: TypeAlias = tuple[str, int, int, int]


def _dualpipe(place: int, stages: int, rounds: int) -> Iterator[list[Pass]]:
    """Yield the steps of the rank at distance `place` from the nearer end, for `rounds` microbatches from each end.

    A pass is `(kind, stage, side, number)`: side 0 is the nearer end, and `number` counts the microbatches entering at
    that side.
    """
    begun = {(forward, side): count() for forward in (True, False) for side in (0, 1)}
    owed = deque[Pass]()
    for step in _list_phases(place, stages, rounds):
        if step == "W":
            yield [owed.popleft()]
            continue
        words = zip(step[::2], map(int, step[1::2]), strict=True)
        passes = [
            (kind, (place, stages - 1 - place)[side], side, next(begun[kind == "F", side])) for kind, side in words
        ]
        owed.extend(("W", stage, side, k) for kind, stage, side, k in passes if kind == "I")
        yield passes


def _list_phases(place: int, stages: int, rounds: int) -> Iterator[str]:
    """Yield the eight phases as words: passes with their sides, two per word if they overlap; `W` is the oldest due."""
    inward = stages // 2 - 1 - place
    main = rounds - stages + 1 + place
    last = [*_repeat(place + 1, "B1 B0")]
    yield from _repeat(2 * inward, "F0")
    yield from _repeat(place + 1, "F0 F1")
    yield from _repeat(inward, "I1 W F1")
    if not inward and main:  # on the middle ranks, the first pair would only wait
        yield from _repeat(1, "F0 B1 F1B0")
        main -= 1
    yield from _repeat(main, "F0B1 F1B0")
    yield from _repeat(inward, "B1 F1B0")
    yield from last[: place + 1]
    yield from (word.replace("B", "I") for word in last[place + 1 :])
    yield from _repeat(inward, "W I0")
    yield from _repeat(place + 1, "W")


def _repeat(n: int, words: str) -> Iterator[str]:
    for _ in range(n):
        yield from words.split()
