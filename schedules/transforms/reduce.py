# SPDX-License-Identifier: Apache-2.0
"""Reduce gradients over a data-parallel group inside the step, as soon as each is complete.

Problem. Copies of a pipeline that train on different data must reduce their gradients. A reduction after the step adds
its whole time to it.

Idea. Most stages have their complete gradient long before the step ends. Put the reduction there, as an action of the
schedule: it goes on while the rank computes, and is checked, simulated and drawn like any other action.

Invariant: nothing waits for a reduction but the update of its stage, the gradients of shared parameters, and the end of
the step.
"""

from __future__ import annotations

from collections.abc import Iterator

from schedules.errors import SizeError
from schedules.language.actions import KINDS, Action
from schedules.language.schedule import Schedule
from schedules.transforms.transform import KEPT, transform


@transform(limits=KEPT)
def reduce_gradients(rank: int, schedule: Schedule) -> Iterator[Action]:
    """Reduce every stage's gradient once, right after its last weight gradient, or after the `G` of its replicas.

    A schedule without backwards stays unchanged. Generating the actions raises `SizeError` if the schedule reduces
    gradients already, or updates a stage before its last weight gradient.

    >>> from schedules import interleaved_1f1b
    >>> s = interleaved_1f1b(ranks=1, microbatches=2, chunks=2)
    >>> print(*reduce_gradients(s).actions(0))
    0F0 1F0 1B0 0F1 0B0 1F1 1B1 1REDUCE_GRAD1 0B1 0REDUCE_GRAD1
    """
    units = schedule.microbatches * schedule.slices
    left = dict.fromkeys(schedule.placement.stages_on(rank), units)  # weight gradients; never 0 for a replica
    reduced = set[int]()
    for action in schedule.actions(rank):
        kind, stage, i, _, _ = action
        if kind == "REDUCE_GRAD" or (kind == "U" and stage not in reduced):
            expected = "one that reduces no gradients, and updates each stage once, after its last gradient"
            raise SizeError.of("reduce_gradients", "schedule", schedule, expected, "Pass the original schedule.")
        yield action
        if KINDS[kind].after == "done" and schedule.backward:
            left[stage] -= 1
        if kind == "G" or (KINDS[kind].after == "done" and not left[stage]):
            reduced.add(stage)
            yield Action("REDUCE_GRAD", stage, i if kind == "G" else schedule.microbatches - 1)
