# SPDX-License-Identifier: Apache-2.0
"""Wave-like placement: a microbatch goes down the ranks and back up, again and again.

Idea. Forwards and backwards are legs of one journey: `2 W` legs forward, alternately down and up, then `2 W` legs
backward, alternately down and up. To a rank, a leg down is like a forward of 1F1B and a leg up like a backward: it runs
as many legs ahead and then alternates, so the first microbatches of a round come up while the last ones go down.
"""

from __future__ import annotations

from collections.abc import Iterator

from schedules.families.looped import legs, rounds
from schedules.families.one_forward_one_backward import alternate, group_passes
from schedules.families.placements import wave
from schedules.language.actions import Action
from schedules.language.schedule import Limits, schedule


def _wave_memory(rank: int, ranks: int, microbatches: int, waves: int) -> float:
    last = min(ranks, microbatches) - 1
    return len(rounds(ranks, microbatches)[0]) - max(0, last - rank) / (2 * waves)


@schedule(placement=wave, limits=Limits(memory=_wave_memory))
def hanayo(rank: int, ranks: int, microbatches: int, waves: int = 1) -> Iterator[Action]:
    """Hanayo: `W` waves, each a chunk on the way down and one on the way up (arXiv 2308.15762, section 3).

    Microbatches go in the rounds of `interleaved_1f1b`; if there are fewer microbatches than ranks, the slots of the
    missing ones stay empty. Idle time per rank, for chunks that take `F` and `B`, with `n = min(P, M)` and
    `R = max(1, M // P)` rounds: `2 (n - 1) (max(F, B) + (R - 1) |F - B|) + 2 W (P - n) (F + B)`. So if `F = B` and
    `M >= P`, it is `1 / (2 W)` of that of `one_f_one_b`; otherwise every round adds some. Peak memory on rank `r`:
    `g - max(0, n - 1 - r) / (2 W)` microbatches, where `g` is the length of the first round: `P` if `P` divides `M`,
    and always less than `2 P`. If `P` divides `M`, one wave is `chimera` of twice the ranks with its two replicas
    merged.

    >>> print(hanayo(ranks=2, microbatches=2, waves=1))
    rank 0 |0F0 0F1 .   3F0 3B0     3F1 3B1     .   0B0     .   .   0B1     |
    rank 1 |.   1F0 2F0 1F1 2F1 .   2B0     1B0     2B1     1B1     .   .   |
    """
    falling = range(rank, 2 * ranks * waves, 2 * ranks)
    rising = range(2 * ranks - 1 - rank, 2 * ranks * waves, 2 * ranks)
    groups = rounds(ranks, max(ranks, microbatches))
    down, up = group_passes(legs(falling, rising), groups), group_passes(legs(rising, falling), groups)
    for action in alternate(ranks - 1 - rank, down, up):
        if action.microbatch < microbatches:
            yield action
