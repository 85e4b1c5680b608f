# SPDX-License-Identifier: Apache-2.0
"""Find places at which a model may be cut in any combination.

Problem. Whether a cut is allowed can depend on other cuts: a module that modifies a tensor in place may have to be in
the same stage as another that reads it. A search over cuts should not have to ask for each combination.

Idea. Cut everywhere. If that is refused, the refusal says which stages are forbidden: those that begin in one range and
stop in another. Drop the places in one of the two ranges, whichever has fewer, and try again. What remains is allowed
in any combination, since merging stages only ever brings writers and readers together.

Runs when a model is profiled.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fpipe.cutting.balance import Forbidden, Positions
from fpipe.cutting.calls import Calls
from fpipe.cutting.clashes import refusals
from fpipe.cutting.partition import Cuts, Evenly
from fpipe.errors import CutError
from fpipe.record.captured import Call, Captured


def find_places(captured: Captured, model: nn.Module, cuts: Cuts, most: int) -> Positions:
    """Return positions at which stages after the first may begin, ascending, such that any choice of them is allowed.

    They are among those that the user's `cuts` allow. If these leave the choice to fpipe, and there are more than
    `most`, leave out those within the innermost modules, then those within the modules around them, and so on. Raise
    `CutError` if the model can't be run at all.
    """
    places, refusal, end = [*cuts.places(captured, model)], refusals(captured), len(captured.units)
    if isinstance(cuts.where, Evenly) and not cuts.where.among:
        places = _outermost(places, Calls.of(captured, model), most)
    while (refused := refusal(tuple(places))) is not None:
        largest = sorted(refused.stages, key=lambda one: -len(one.begins) * len(one.stops))
        before = len(places)
        for forbidden in largest:
            places = _without(places, forbidden, end)
        if len(places) == before:
            raise CutError(refused.reason)
    return tuple(places)


def _outermost(places: Sequence[int], calls: Calls, most: int) -> list[int]:
    """Return at most so many places: those at the edges of the outermost calls."""
    depth: dict[int, int] = {}
    running: list[Call] = []
    for call in calls.listed:
        while running and running[-1].stop <= call.start:
            running.pop()
        for edge in (call.start, call.stop):
            depth[edge] = min(len(running), depth.get(edge, len(running)))
        running.append(call)
    deepest = max(depth.values(), default=0)
    for limit in range(deepest, 0, -1):
        found = [place for place in places if depth.get(place, 0) <= limit]
        if len(found) <= most:
            return found
    return [place for place in places if depth.get(place, 0) == 0]


def _without(places: Sequence[int], forbidden: Forbidden, end: int) -> list[int]:
    """Return the places without those in one of the two ranges, so that no stage is forbidden; all if none is.

    The model's beginning and its end are places that can't be dropped.
    """
    begins = [place for place in (0, *places) if place in forbidden.begins]
    stops = [place for place in (*places, end) if place in forbidden.stops]
    if not any(begin < stop for begin in begins for stop in stops):
        return [*places]
    droppable = [some for some, fixed in ((begins, 0), (stops, end)) if fixed not in some]
    dropped = min(droppable, key=len, default=[])
    return [place for place in places if place not in dropped]
