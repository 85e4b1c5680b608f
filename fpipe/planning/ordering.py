# SPDX-License-Identifier: Apache-2.0
"""Search for orders of a plan's own, where those of the literature leave ranks idle.

Families of schedules suit equal stages. Once cuts, placement and number of microbatches are chosen, the costs of the
stages are known, and `schedules.search` finds an order for them. It neither recomputes nor holds stages twice, so
candidates that do keep their order.

Runs when a plan is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import monotonic
from typing import Final

from fpipe.planning.candidates import Candidate, Room, replace_schedule
from fpipe.planning.prediction import Predictor
from fpipe.stages.backends import splits
from schedules import Graph, Placement, Schedule, SizeError, search

ORDERED: Final = 3
"""The number of candidates that get an order of their own."""
ORDER_TRIES: Final = 300
MARGIN: Final = 1e-6
"""Of memory, so that rounding does not exceed it."""
ORDERABLE: Final = frozenset("FBIW")


def list_orderable(found: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield the best candidates, of equal cuts and placement one, whose actions a search knows."""
    seen = set[object]()
    for one in found:
        key = one.schedule.placement, one.schedule.microbatches, one.cuts
        if key not in seen and _is_plain(one.schedule):
            seen.add(key)
            yield one
        if len(seen) == ORDERED:
            return


def _is_plain(schedule: Schedule) -> bool:
    kinds = {action.kind for rank in range(schedule.ranks) for action in schedule.actions(rank)}
    return kinds <= ORDERABLE and not schedule.placement.mirrors and schedule.slices == 1


def reorder(candidate: Candidate, room: Room) -> Candidate | None:
    """Return the candidate with a faster order of the same stages, or `None` if none is found."""
    schedule = candidate.schedule
    if not candidate.predicted.fits(room.caps):
        return None
    found = find_order(
        candidate.predictor,
        schedule.placement,
        schedule.microbatches,
        candidate.cuts,
        room,
        ORDER_TRIES,
        split=splits(schedule),
        graph=schedule.graph,
    )
    if found is None:
        return None
    ordered = replace_schedule(candidate, found)
    faster = ordered.predicted.seconds < candidate.predicted.seconds
    return ordered if faster and ordered.predicted.fits(room.caps) else None


def find_order(
    predictor: Predictor,
    placement: Placement,
    microbatches: int,
    cuts: Sequence[int],
    room: Room,
    tries: int,
    *,
    split: bool = True,
    graph: Graph | None = None,
) -> Schedule | None:
    """Return the best order found of stages placed like this, or `None` if none fits or time has run out."""
    seconds = room.end - monotonic()
    if seconds <= 0:
        return None
    try:
        return search(
            predictor.costs(cuts),
            placement,
            microbatches,
            memory=tuple(cap * (1 - MARGIN) for cap in room.caps),
            sizes=predictor.sizes(placement, cuts),
            split=split,
            graph=graph,
            seconds=seconds,
            tries=tries,
        ).schedule
    except SizeError:  # one microbatch does not fit
        return None
