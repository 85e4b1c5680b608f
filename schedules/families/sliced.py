# SPDX-License-Identifier: Apache-2.0
"""Cut sequences into slices that pass through the pipeline one by one.

Idea. A slice attends to earlier slices: their forwards come first, and the cotangents of their caches come from later
slices. So slices go forward in ascending order and backward in descending order. The last slice of a microbatch is the
first to come back, and the pipeline fills with slices instead of whole microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator

from schedules.families.one_forward_one_backward import alternate
from schedules.language.actions import Action, B, F
from schedules.language.placement import linear
from schedules.language.schedule import Limits, schedule


def _sliced_memory(rank: int, ranks: int, microbatches: int, slices: int) -> float:
    return min((ranks - 1 - rank + slices) / slices, microbatches)


@schedule(placement=linear, limits=Limits(memory=_sliced_memory))
def seq_1f1b(rank: int, ranks: int, microbatches: int, slices: int = 2) -> Iterator[Action]:
    """Seq1F1B: 1F1B of slices, a whole microbatch of them ahead (arXiv 2406.03488, section 3).

    Idle time per rank, for `k` slices that take `F / k` and `B / k`: `(P - 1) (F + B) / k`, which is `1 / k` of that of
    `one_f_one_b`. Peak memory on rank `r`: `min((P - 1 - r + k) / k, M)` microbatches, if a slice holds `1 / k` of one.
    With one slice it is `one_f_one_b`.

    >>> print(seq_1f1b(ranks=2, microbatches=2, slices=2))
    rank 0 |F0.0 F0.1 F1.0 .    .    B0.1      F1.1 B0.0      .    B1.1      B1.0      |
    rank 1 |.    F0.0 F0.1 B0.1      F1.0 B0.0      F1.1 B1.1      B1.0      .    .    |
    """
    parts = range(slices) if slices > 1 else [None]
    forwards = (F(rank, i, part) for i in range(microbatches) for part in parts)
    backwards = (B(rank, i, part) for i in range(microbatches) for part in reversed(parts))
    return alternate(ranks - 1 - rank + slices - 1, forwards, backwards)
