# SPDX-License-Identifier: Apache-2.0
"""Cut a chain of blocks into stages so that the largest stage costs as little as possible.

The bottleneck partition of a chain, solved exactly in O(stages n^2) by dynamic programming: the least largest cost of
the first `j` blocks in `k` stages is the minimum over `i` of the larger of that of the first `i` blocks in `k - 1`
stages, and the cost of the stage of blocks `i` to `j`. Of the partitions that attain it, the most even one is chosen.

A table of costs is a matrix, as in `fpipe.planning.ranges`: entry `[a, b]` is that of the stage of blocks `a` to
`b - 1`.

Runs when a plan is made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from fpipe.cutting.balance import find_best_path

TIES = 1e-9
"""Largest stages whose costs differ by this share are equal."""


def partition_chain(
    cost: Tensor, stages: int, places: Collection[int], pinned: Iterable[int] = ()
) -> tuple[int, ...] | None:
    """Return the numbers of the blocks at which stages after the first begin: some of `places`, with all the pinned.

    Return `None` if there are too few places, or more pins than cuts.

    >>> from fpipe.planning.ranges import sum_blocks
    >>> partition_chain(sum_blocks([5, 1, 1, 1, 1, 1]), 3, range(1, 6))
    (1, 3)
    >>> partition_chain(sum_blocks([5, 1, 1, 1, 1, 1]), 3, range(1, 6), pinned=[2])
    (1, 2)
    """
    allowed = _forbid(cost, places, pinned)
    least = bottleneck(allowed, stages)
    if least == torch.inf:
        return None
    even = torch.where(allowed <= least * (1 + TIES), (allowed / max(least, 1e-30)).square(), torch.inf)
    _, cuts = find_best_path(even, stages, torch.add)
    return tuple(cuts)


def bottleneck(cost: Tensor, stages: int) -> float:
    """Return the least cost of the largest stage; infinity if there are too few blocks."""
    upper = torch.ones_like(cost, dtype=torch.bool).triu(1)
    least, _ = find_best_path(torch.where(upper, cost, torch.inf), stages, torch.maximum)
    return least


def _forbid(cost: Tensor, places: Collection[int], pinned: Iterable[int]) -> Tensor:
    """Return the costs with infinity where no stage may be: empty, not between places, or with a pinned cut inside."""
    allowed = torch.where(torch.ones_like(cost, dtype=torch.bool).triu(1), cost, torch.inf)
    for k in range(1, len(cost) - 1):
        if k not in places:
            allowed[k, :] = allowed[:, k] = torch.inf
    for pin in pinned:
        allowed[:pin, pin + 1 :] = torch.inf
    return allowed
