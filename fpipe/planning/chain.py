# SPDX-License-Identifier: Apache-2.0
"""Cut a chain of blocks into stages so that the largest stage, or the busiest rank, has as little work as possible.

The bottleneck partition of a chain, solved exactly in O(stages n^2) by dynamic programming: the least largest cost of
the first `j` blocks in `k` stages is the minimum over `i` of the larger of that of the first `i` blocks in `k - 1`
stages, and the cost of the stage of blocks `i` to `j`. Of the partitions that attain it, the most even one is chosen.

If a rank has several stages, the work of the busiest rank counts. It is computed for many cuts at once: no step takes
less, so cuts with more work need no simulation.

A table of costs is a matrix, as in `fpipe.planning.ranges`: entry `[a, b]` is that of the stage of blocks `a` to
`b - 1`.

Runs when a plan is made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import combinations
from math import comb
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from fpipe.cutting.balance import find_best_path, find_even_path
from fpipe.planning.profile import Profile
from fpipe.stages.backends import splits
from schedules import Schedule

MOST_LISTED: Final = 20_000
"""If there are more ways to cut, they are not listed."""
TIES: Final = 1e-9
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
    cuts = find_even_path(_forbid(cost, places, pinned), stages, 1 + TIES)
    return None if cuts is None else tuple(cuts)


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


class Loads:
    """The loads of ranks under a schedule; recomputation is left out, since it only adds to them.

    If no times are known, because all are 0, parameters stand for them.
    """

    def __init__(self, profile: Profile, schedule: Schedule) -> None:
        ranges = profile.ranges
        self.work = ranges.seconds("F") + (
            ranges.seconds("I") + ranges.seconds("W") if splits(schedule) else ranges.seconds("B")
        )
        if not self.work.any():
            self.work = ranges.parameters
        self.blocks, self.outside = len(profile.blocks), profile.step
        passes = [[0] * schedule.stages for _ in range(schedule.ranks)]
        for route, homes in enumerate(schedule.placement.routes):
            for s, rank in enumerate(homes):
                passes[rank][s] += len(range(route, schedule.microbatches, len(schedule.placement.routes)))
        self.passes = torch.tensor(passes, dtype=torch.float64)

    def busiest(self, cuts: Tensor) -> Tensor:
        """Return the seconds that the busiest rank works, for each row of cuts."""
        ends = pad(pad(cuts, (1, 0)), (0, 1), value=self.blocks)
        work = self.work[ends[:, :-1], ends[:, 1:]]
        return (work @ self.passes.T).amax(1) + self.outside

    def list_cuts(self, places: Collection[int], pinned: Collection[int]) -> list[tuple[int, ...]]:
        """Return all cuts, those with the least load first; none if there are too many of them."""
        free, number = sorted({*places} - {*pinned}), self.passes.shape[1] - 1 - len(pinned)
        if number < 0 or comb(len(free), number) > MOST_LISTED:
            return []
        rows = [sorted((*chosen, *pinned)) for chosen in combinations(free, number)]
        cuts = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), -1)
        order = self.busiest(cuts).argsort(stable=True)
        return [tuple(row) for row in cuts[order].tolist()]
