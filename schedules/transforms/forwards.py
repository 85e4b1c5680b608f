# SPDX-License-Identifier: Apache-2.0
"""Leave the backwards out, as evaluation does."""

from __future__ import annotations

from collections.abc import Iterator

from schedules.language.actions import KINDS, Action, F
from schedules.language.schedule import Schedule
from schedules.transforms.transform import transform


@transform(backward=False)
def forwards(rank: int, schedule: Schedule) -> Iterator[Action]:
    """Keep only the forwards, in the schedule's order, as evaluation does. Nothing is saved for a backward.

    >>> from schedules import one_f_one_b
    >>> print(forwards(one_f_one_b(ranks=2, microbatches=3)))
    rank 0 |F0 F1 F2 .  |
    rank 1 |.  F0 F1 F2 |
    """
    for action in schedule.actions(rank):
        kind, stage, i, _, part = action
        if KINDS[kind].crosses == "F":
            yield action if kind == "F" else F(stage, i, part)
