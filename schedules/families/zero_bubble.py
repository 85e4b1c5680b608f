# SPDX-License-Identifier: Apache-2.0
"""Zero bubble: weight gradients fill the time in which a rank would wait.

Idea. Other ranks wait only for the input half of a backward. So split the backward, send cotangents on, and defer
weight gradients until there is nothing else to do. The hand-written members are 1F1B after two transforms, since memory
limits how many can be deferred.
"""

from __future__ import annotations

from collections.abc import Iterator

from schedules.families.one_forward_one_backward import eager_1f1b, one_f_one_b
from schedules.language.actions import Action
from schedules.language.placement import linear
from schedules.language.schedule import Limits, schedule
from schedules.transforms.defer import defer_weights
from schedules.transforms.split import split_backward


def _h1_memory(rank: int, ranks: int, microbatches: int) -> int:
    return min(ranks, microbatches)


def _h2_memory(rank: int, ranks: int, microbatches: int) -> int:
    return min(2 * ranks - 1, microbatches)


@schedule(placement=linear, limits=Limits(memory=_h1_memory))
def zb_h1(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """ZB-H1: `one_f_one_b`, split, weight gradients deferred within its memory (arXiv 2401.10241, section 2.1).

    Idle time per rank if `M >= P` and `min(I, W) <= F`: `(P - 1) (F + I - min(I, W))`, a third of that of 1F1B if all
    passes take equally long. Peak memory: `min(P, M)` microbatches on every rank, as on the first rank of 1F1B.

    >>> print(zb_h1(ranks=3, microbatches=4))
    rank 0 |F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3 |
    rank 1 |.  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3 |
    rank 2 |.  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3 |
    """
    once = split_backward(one_f_one_b(ranks, microbatches))
    return defer_weights(once, memory=_h1_memory(rank, ranks, microbatches)).actions(rank)


@schedule(placement=linear, limits=Limits(memory=_h2_memory))
def zb_h2(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """ZB-H2: `eager_1f1b`, split, with weight gradients deferred: no waiting at all (arXiv 2401.10241, section 2.2).

    Time a rank waits between its first and last action, if `M >= 2P - 1` and `min(I, W) <= F`:
    `(P - 1) max(0, F + I - 2W)`, so none if all passes take equally long. Ranks start one after another and end one
    after another. Peak memory: `min(2P - 1, M)` microbatches on every rank.

    >>> print(zb_h2(ranks=2, microbatches=4))
    rank 0 |F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 .  |
    rank 1 |.  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3 |
    """
    eager = split_backward(eager_1f1b(ranks, microbatches))
    return defer_weights(eager, memory=_h2_memory(rank, ranks, microbatches)).actions(rank)
