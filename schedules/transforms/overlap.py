# SPDX-License-Identifier: Apache-2.0
"""Overlap forwards with backwards.

Problem. While a pass communicates with the ranks that share its stage (expert or tensor parallelism), nothing is
computed.

Idea. Run a forward and a backward of different microbatches as a fused pair: one computes while the other communicates
(DualPipe, arXiv 2412.19437, section 3.2.1). A pair runs as one action: its forward now waits for the cotangent of its
backward, and the forward's value leaves when both are done. If that cotangent depends on this very forward, through the
order of other ranks, the two stay separate.

Invariant: each rank keeps its order.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import zip_longest
from math import inf

from schedules.language.actions import KINDS, Action
from schedules.language.schedule import Schedule
from schedules.playing.board import make_board
from schedules.playing.costs import Costs
from schedules.playing.play import Play
from schedules.playing.problem import Problem
from schedules.transforms.transform import KEPT, transform


@transform(limits=KEPT)
def overlap(rank: int, schedule: Schedule) -> Iterator[Action]:
    """Fuse every forward with a backward of another microbatch right after it, unless the pair would deadlock.

    That requires playing all ranks along the schedule's stage graph (`connect`): the first rank whose actions are
    generated pays for all of them. If pairs wait for each other, the lowest rank's stays unfused. Peak memory does not
    change. A pair takes less time than its two passes if `Costs.OVERLAP_F` says so, but the next stage gets the
    forward's value only when the pair ends: the makespan grows if ranks wait for forwards, as in 1F1B, and shrinks if
    they do not, as in `dualpipe`.

    >>> from schedules import one_f_one_b
    >>> print(overlap(one_f_one_b(ranks=2, microbatches=3)))
    rank 0 |F0 .  .  .  F1&B0    .  .  .  F2&B1    .  .  .  B2    |
    rank 1 |.  F0 B0    .  .  .  F1 B1    .  .  .  F2 B2    .  .  |
    """
    yield from _fuse(schedule)[rank]


NO_TIME = Costs(F=0, B=0, I=0, W=0)


@lru_cache(maxsize=1)  # every rank asks for its row in turn
def _fuse(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Return each rank's actions; those whose inputs never come are last, for `check` to report.

    All pairs are played until no rank can go on; then a pair whose forward alone could run is separated, and so on.
    """
    rows = [[*schedule.actions(rank)] for rank in range(schedule.ranks)]
    problem = Problem(NO_TIME, schedule.placement, schedule.microbatches, graph=schedule.graph)
    board = make_board(problem, [[_pair_up(row)] for row in rows])
    original = [action for row in rows for action in row]
    played = Play(board, [0.0] * len(original))
    played.run()
    while _separate(played, original):
        played.run()
    pick = (original, board.actions)
    both = zip(played.orders, played.left, strict=True)
    return tuple((*(pick[played.pairs[k]][k] for k in row), *(original[k] for k in rest)) for row, rest in both)


def _pair_up(row: list[Action]) -> Iterator[Action]:
    """Yield the actions, each forward with a backward of another microbatch right after it marked as overlapped."""
    for first, second in zip_longest(row, row[1:]):
        paired = second and first.kind == "F" and KINDS[second.kind].crosses == "B"
        yield first._replace(kind="OVERLAP_F") if paired and first.microbatch != second.microbatch else first


def _separate(played: Play, original: list[Action]) -> bool:
    """Separate the pair of the lowest rank that could run its forward alone; return whether there is one."""
    for rank, ((k,), (stop,)) in enumerate(zip(played.heads, played.stops, strict=True)):
        if k < stop and played.pairs[k] and original[k].kind == "F":
            played.pairs[k] = 0
            if played.arrival(k) < inf:
                played.wake(rank, 0.0)
                return True
            played.pairs[k] = 1
    return False
