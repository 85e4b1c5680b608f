# SPDX-License-Identifier: Apache-2.0
"""The costs of stages on ranks whose devices differ.

Runs on request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fpipe.errors import InputError
from fpipe.planning.merging import require_same_fields
from fpipe.planning.profile import CutPlaces, Profile, require_placement
from fpipe.planning.ranges import TIMED
from schedules import Costs, Placement
from schedules.replay.costs import of_stage


def costs_by_rank(profiles: Sequence[Profile], cuts: CutPlaces, placement: Placement) -> Costs:
    """Return the costs of stages, each as measured on the rank that it is on; on several, those of the slowest.

    `profiles` has one of each rank, of the same model. Raise `InputError` if they do not fit together.
    """
    places = [*cuts]
    if len(profiles) != placement.ranks:
        raise InputError(
            f"profiles: got {len(profiles)}, expected {placement.ranks}, one of each rank of the placement. Merge "
            "those of several processes of a rank."
        )
    for rank, other in enumerate(profiles):
        require_same_fields(other, profiles[0], f"profiles[{rank}]")
    require_placement(placement, len(profiles[0].stages(places)))
    every = [one.costs(places) for one in profiles]
    found: dict[str, Any] = {
        kind: tuple(
            max(of_stage(getattr(every[rank], kind), stage) for rank in placement.replicas(stage))
            for stage in range(placement.stages)
        )
        for kind in TIMED
    }
    return replace(every[0], **found)
