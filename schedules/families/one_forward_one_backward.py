# SPDX-License-Identifier: Apache-2.0
"""One forward, one backward: a microbatch leaves before the next one enters."""

from __future__ import annotations

from collections.abc import Iterator

from schedules.actions import Action, B, F
from schedules.authoring import schedule
from schedules.placement import linear


@schedule(placement=linear)
def one_f_one_b(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """1F1B: fill until the first cotangent can come back, then alternate (arXiv 2006.09503, section 2).

    Idle time per rank: `(P - 1) (F + B)`, as in `gpipe`. Peak memory: `min(P - r, M)` microbatches on rank `r`.

    >>> print(one_f_one_b(ranks=2, microbatches=3))
    rank 0 |F0 F1 .  .  B0    F2 B1    .  B2    |
    rank 1 |.  F0 B0    F1 B1    F2 B2    .  .  |
    """
    warmup = min(ranks - 1 - rank, microbatches)
    for i in range(warmup):
        yield F(rank, i)
    for i in range(microbatches - warmup):
        yield F(rank, warmup + i)
        yield B(rank, i)
    for i in range(microbatches - warmup, microbatches):
        yield B(rank, i)
