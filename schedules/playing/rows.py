# SPDX-License-Identifier: Apache-2.0
"""A schedule from rows of actions, one per rank: of a search, of a whole-schedule transform, or edited by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Concatenate

from schedules.arguments import without_rank
from schedules.errors import SizeError
from schedules.language.actions import Action
from schedules.language.graph import Graph
from schedules.language.placement import Placement
from schedules.language.schedule import Arguments, Factory, Schedule, Shape


def _shape(arguments: dict[str, Any]) -> Shape:
    rows, placement, microbatches, slices, backward, graph, versions = arguments.values()
    if not isinstance(rows, tuple) or len(rows) != placement.ranks:
        expected = f"a tuple of {placement.ranks} rows: one for each rank of the placement"
        raise SizeError.of("from_rows", "rows", rows, expected, "Pass the actions of every rank.")
    if versions is not None and (not isinstance(versions, tuple) or len(versions) != microbatches):
        expected = f"a tuple of {microbatches} numbers: one for each microbatch"
        raise SizeError.of("from_rows", "versions", versions, expected, "Pass the weight version of every microbatch.")
    version = None if versions is None else versions.__getitem__
    return Shape(placement.ranks, microbatches, placement, slices, backward, graph, version)


def _make_factory(generator: Callable[Concatenate[int, Arguments], Iterator[Action]]) -> Factory[Arguments]:
    return Factory(generator, without_rank("from_rows", generator, "rows", "placement", "microbatches"), _shape)


@_make_factory
def from_rows(
    rank: int,
    rows: tuple[tuple[Action, ...], ...],
    placement: Placement,
    microbatches: int,
    slices: int = 1,
    backward: bool = True,
    graph: Graph | None = None,
    versions: tuple[int, ...] | None = None,
) -> Iterator[Action]:
    """Schedule these rows of actions, one row per rank. Raise `SizeError` for any other number of rows.

    `versions` has the weight version that each microbatch uses, if the schedule updates in flight and not every rank is
    to take its newest.

    `check` says whether the schedule is correct.

    >>> from schedules import B, F, linear
    >>> print(from_rows(((F(0, 0), B(0, 0)), (F(1, 0), B(1, 0))), linear(ranks=2), microbatches=1))
    rank 0 |F0 .  .  .  B0    |
    rank 1 |.  F0 B0    .  .  |
    """
    yield from rows[rank]


def edit(schedule: Schedule, rows: Iterable[Iterable[Action]]) -> Schedule:
    """Return a schedule of the same sizes, placement, graph and weight versions that has these rows of actions.

    >>> from schedules import gpipe
    >>> s = gpipe(ranks=2, microbatches=1)
    >>> edit(s, [s.actions(0), s.actions(1)]) == edit(s, [list(s.actions(rank)) for rank in (0, 1)])
    True
    """
    shape = schedule.placement, schedule.microbatches, schedule.slices, schedule.backward, schedule.graph
    version = schedule.version
    versions = None if version is None else tuple(map(version, range(schedule.microbatches)))
    return from_rows(tuple(map(tuple, rows)), *shape, versions)
