# SPDX-License-Identifier: Apache-2.0
"""A schedule as rows of actions, one row per rank, and a schedule made of such rows."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from schedules import Action, Program, Schedule, transform


def rows(plan: Schedule | Program, without: Collection[str] = "") -> list[list[Action]]:
    """Return the actions of each rank, except those whose kind is in `without`."""
    ranks = (plan if isinstance(plan, Schedule) else plan.schedule).ranks
    return [[action for action in plan.actions(rank) if action.kind not in without] for rank in range(ranks)]


@transform
def edited(rank: int, schedule: Schedule, rows: Sequence[Sequence[Action]]) -> Iterator[Action]:
    """The transform that `edit` calls: parameters of a schedule are tuples."""
    yield from rows[rank]


def edit(schedule: Schedule, rows: Iterable[Iterable[Action]]) -> Schedule:
    """Return a schedule of the same sizes and placement that has these rows of actions."""
    return edited(schedule, tuple(map(tuple, rows)))
