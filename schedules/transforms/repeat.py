# SPDX-License-Identifier: Apache-2.0
"""Run a schedule several times in a step, for one group of microbatches after the other.

Problem. Breadth-first orders gather the weights of a stage once for all its microbatches, but hold the activations of
all of them. Depth-first orders hold few, but change from stage to stage all the time, and gather weights again.

Idea. Take as many microbatches at a time as memory allows (arXiv 2211.05953, arXiv 2402.03791): a group runs breadth
first, the groups one after the other. A rank ends a group with the backward of the stage with whose forward it begins
the next, so those weights stay gathered.

Invariant: nothing of a group waits for a later one, so what is correct once is correct several times.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedules.arguments import MOST_MICROBATCHES, is_size
from schedules.errors import SizeError
from schedules.language.actions import COLLECTIVES, Action
from schedules.language.schedule import Factory, Schedule, Shape
from schedules.transforms.transform import KEPT, transform


def _with_groups(once: Factory[[Schedule, int]]) -> Factory[[Schedule, int]]:
    """Return the transform with `times` as many microbatches."""

    def shape(arguments: dict[str, Any]) -> Shape:
        given, times, schedule = once.shape(arguments), arguments["times"], arguments["schedule"]
        if not is_size(times) or times * given.microbatches > MOST_MICROBATCHES:
            raise SizeError.of("repeat", "times", times, "an integer of at least 1", "Choose times >= 1.")
        if given.microbatches % len(given.placement.routes):
            expected = "one with as many microbatches on each route"
            raise SizeError.of("repeat", "schedule", schedule, expected, "Choose an even number of microbatches.")
        return given._replace(microbatches=times * given.microbatches)

    return Factory(once.generator, once.signature, shape, once.limits)


@_with_groups
@transform(limits=KEPT)
def repeat(rank: int, schedule: Schedule, times: int) -> Iterator[Action]:
    """Run the schedule `times` times, for one group of microbatches after the other. Replicas are summed at the end.

    Peak memory is that of one group. Generating the actions raises `SizeError` for a schedule with updates or
    collectives.

    On 2 ranks with 2 chunks each, let weights take 6 units per stage and activations 1, and a rank have 14. Groups of 4
    fit, and gather 10 times; `interleaved_1f1b`, with the same 8 microbatches, gathers 32 times.

    >>> from schedules import Sizes, breadth_first, interleaved_1f1b, shard, simulate
    >>> grouped = repeat(breadth_first(ranks=2, microbatches=4, chunks=2), times=2)
    >>> simulate(shard(grouped, limit=1), sizes=Sizes(gathered=6)).peak_memory
    (14.0, 14.0)
    >>> for s in (grouped, interleaved_1f1b(ranks=2, microbatches=8, chunks=2)):
    ...     print(sum(action.kind == "UNSHARD" for rank in (0, 1) for action in shard(s, limit=1).actions(rank)))
    10
    32
    """
    for group in range(times):
        for action in schedule.actions(rank):
            if action.kind == "U" or action.kind in COLLECTIVES:
                expected = "one without U, UNSHARD, RESHARD and REDUCE_GRAD"
                raise SizeError.of("repeat", "schedule", schedule, expected, "Repeat it first, then add them.")
            if action.kind != "G" or group == times - 1:
                yield action._replace(microbatch=group * schedule.microbatches + action.microbatch)
