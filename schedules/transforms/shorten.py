# SPDX-License-Identifier: Apache-2.0
"""Run the first microbatches of a schedule only.

Problem. The last batch of an epoch may have fewer rows than a schedule has microbatches. Not every family has a
schedule for so few: some want a multiple of the ranks.

Idea. Leave out what concerns the other microbatches. What is left waits for nothing that was left out, and keeps its
order, so it is correct if the whole was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedules.arguments import is_size
from schedules.errors import SizeError
from schedules.language.actions import COLLECTIVES, Action
from schedules.language.schedule import Factory, Schedule, Shape
from schedules.playing.board import sum_replicas
from schedules.transforms.transform import KEPT, transform


def find_fewest(schedule: Schedule) -> int:
    """Return the least number of microbatches that `shorten` accepts: one on each route.

    >>> from schedules import chimera, gpipe
    >>> find_fewest(gpipe(ranks=2, microbatches=4)), find_fewest(chimera(ranks=2, microbatches=4))
    (1, 2)
    """
    kinds = {action.kind for rank in range(schedule.ranks) for action in schedule.actions(rank)}
    return schedule.microbatches if kinds & {"U", *COLLECTIVES} else len(schedule.placement.routes)


def _with_fewer(once: Factory[[Schedule, int]]) -> Factory[[Schedule, int]]:
    """Return the transform with so many microbatches."""

    def shape(arguments: dict[str, Any]) -> Shape:
        given, count = once.shape(arguments), arguments["microbatches"]
        least = len(given.placement.routes)
        if not is_size(count, least, given.microbatches):
            expected = f"an integer from {least} to {given.microbatches}"
            raise SizeError.of("shorten", "microbatches", count, expected, "Choose one of these.")
        return given._replace(microbatches=count)

    return Factory(once.generator, once.signature, shape, once.limits)


@_with_fewer
@transform(limits=KEPT)
def shorten(rank: int, schedule: Schedule, microbatches: int) -> Iterator[Action]:
    """Keep the first microbatches. The actions of a schedule with updates or collectives raise `SizeError`.

    >>> from schedules import one_f_one_b
    >>> print(shorten(one_f_one_b(ranks=2, microbatches=4), microbatches=1))
    rank 0 |F0 .  .  .  B0    |
    rank 1 |.  F0 B0    .  .  |
    """
    overlapped: Action | None = None
    for action in schedule.actions(rank):
        if action.kind == "U" or action.kind in COLLECTIVES:
            expected = "one without U, UNSHARD, RESHARD and REDUCE_GRAD"
            raise SizeError.of("shorten", "schedule", schedule, expected, "Shorten it first, then add them.")
        if overlapped is not None:  # with a backward that may be left out
            yield overlapped if action.microbatch < microbatches else overlapped._replace(kind="F")
            overlapped = None
        if action.microbatch >= microbatches or action.kind == "G":
            continue
        if action.kind == "OVERLAP_F":
            overlapped = action
        else:
            yield action
    yield from sum_replicas(rank, schedule.placement, microbatches)
