# SPDX-License-Identifier: Apache-2.0
"""Fill the pipeline, then drain it."""

from __future__ import annotations

from collections.abc import Iterator

from schedules.language.actions import Action, B, F
from schedules.language.placement import linear
from schedules.language.schedule import Limits, schedule


@schedule(placement=linear, limits=Limits(memory=lambda rank, ranks, microbatches: microbatches))
def gpipe(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965, section 2.3).

    Idle time per rank: `(P - 1) (F + B)`. Peak memory: the activations of all `M` microbatches on every rank.
    Backwards run in ascending order, so gradients accumulate as in a loop on one device.

    >>> print(gpipe(ranks=2, microbatches=3))
    rank 0 |F0 F1 F2 .  .  .  B0    B1    B2    |
    rank 1 |.  F0 F1 F2 B0    B1    B2    .  .  |
    """
    for i in range(microbatches):
        yield F(rank, i)
    for i in range(microbatches):
        yield B(rank, i)


@schedule(placement=linear, backward=False)
def forward_only(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Forwards only, for inference (the fill of GPipe, arXiv 1811.06965, section 2.3).

    Idle time per rank: `(P - 1) F`. Peak memory: none, since nothing is saved for a backward.

    >>> print(forward_only(ranks=2, microbatches=3))
    rank 0 |F0 F1 F2 .  |
    rank 1 |.  F0 F1 F2 |
    """
    for i in range(microbatches):
        yield F(rank, i)
