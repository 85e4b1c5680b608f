# SPDX-License-Identifier: Apache-2.0
"""Split every backward into its input half and its weight half, or merge the halves again."""

from __future__ import annotations

from collections.abc import Iterator

from schedules.errors import ScheduleError
from schedules.language.actions import Action, B, I, W
from schedules.language.schedule import Schedule
from schedules.transforms.transform import KEPT, transform


@transform(limits=KEPT)
def split_backward(rank: int, schedule: Schedule) -> Iterator[Action]:
    """Split every `B` into `I` and `W`, one right after the other, so cotangents leave before weight gradients run.

    Gradients accumulate in the same order.

    >>> from schedules import one_f_one_b
    >>> print(split_backward(one_f_one_b(ranks=2, microbatches=2)))
    rank 0 |F0 F1 .  I0 W0 .  I1 W1 |
    rank 1 |.  F0 I0 W0 F1 I1 W1 .  |
    """
    for action in schedule.actions(rank):
        kind, stage, i, _, part = action
        if kind == "B":
            yield I(stage, i, part)
            yield W(stage, i, part)
        else:
            yield action


@transform(limits=KEPT)
def merge_backward(rank: int, schedule: Schedule) -> Iterator[Action]:
    """Replace every `I` by a full `B` and drop every `W`: `merge_backward(split_backward(s))` has the actions of `s`.

    The result is correct if the schedule is, since a `B` makes all that its `I` made and needs no more. Gradients now
    accumulate in the order of the `I`. Generating the actions raises `ScheduleError` for a `W` without an earlier `I`,
    and for an `I` whose `W` never comes: merging would hide the broken rule.

    >>> from schedules import one_f_one_b
    >>> s = one_f_one_b(ranks=2, microbatches=2)
    >>> print(merge_backward(split_backward(s)))
    rank 0 |F0 F1 .  .  B0    .  B1    |
    rank 1 |.  F0 B0    F1 B1    .  .  |
    """
    owed: dict[Action, None] = {}  # invariant: the W of each I so far whose W has not come
    position = -1
    for position, action in enumerate(schedule.actions(rank)):
        kind, stage, i, _, part = action
        if kind == "W" and action not in owed:
            half = I(stage, i, part)
            repair = f"Add {half} before it, or drop it."
            raise ScheduleError("forward_before_backward", rank, position, action, f"comes before {half}", repair)
        if kind == "W":
            del owed[action]
            continue
        if kind == "I":
            owed[W(stage, i, part)] = None
        yield B(stage, i, part) if kind == "I" else action
    for action in owed:
        raise ScheduleError("complete", rank, position + 1, None, f"{action} never runs", f"Add it to rank {rank}.")
