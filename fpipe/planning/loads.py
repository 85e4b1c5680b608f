# SPDX-License-Identifier: Apache-2.0
"""The work of the busiest rank, for many cuts at once: no step takes less, so cuts with more work need no simulation.

Runs when a plan is made.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations
from math import comb
from typing import Final

import torch
from torch import Tensor

from fpipe.planning.prediction import Predictor
from fpipe.stages.backends import splits
from schedules import Schedule

MOST_LISTED: Final = 20_000
"""If there are more ways to cut, they are not listed."""


class Loads:
    """The loads of ranks under a schedule; recomputation is left out, since it only adds to them.

    If no times are known, because all are 0, parameters stand for them.
    """

    def __init__(self, predictor: Predictor, schedule: Schedule) -> None:
        ranges = predictor.profile.ranges
        self.work = ranges.seconds("F") + (
            ranges.seconds("I") + ranges.seconds("W") if splits(schedule) else ranges.seconds("B")
        )
        if not self.work.any():
            self.work = ranges.parameters
        self.blocks, self.outside = len(predictor.profile.blocks), predictor.profile.step
        passes = [
            [
                sum(schedule.placement.home(s, i) == rank for i in range(schedule.microbatches))
                for s in range(schedule.stages)
            ]
            for rank in range(schedule.ranks)
        ]
        self.passes = torch.tensor(passes, dtype=torch.float64)

    def busiest(self, cuts: Tensor) -> Tensor:
        """Return the seconds that the busiest rank works, for each row of cuts."""
        ends = torch.nn.functional.pad(torch.nn.functional.pad(cuts, (1, 0)), (0, 1), value=self.blocks)
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
