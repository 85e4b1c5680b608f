# SPDX-License-Identifier: Apache-2.0
"""Pin what the user knows: places where a stage must begin, and whole stages.

Runs when a plan is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from fpipe.errors import InputError
from fpipe.planning.candidates import Room
from fpipe.planning.profile import Profile

StageEnds: TypeAlias = tuple[str | None, str | None]
"""The module that a stage begins at, and the one that it ends before; `None` for the beginning and end of the model."""


def pin(room: Room, profile: Profile, cuts: Sequence[str], stages: Sequence[StageEnds]) -> Room:
    """Return the room in which these cuts and stages are pinned.

    Raise `InputError` for modules that no stage can begin at, and if a stage would have to be cut.
    """
    pinned = {start for start, _ in profile.stages(cuts)[1:]}
    wholes = [_find_blocks(profile, k, stage) for k, stage in enumerate(stages)]
    for begin, end in wholes:
        pinned |= {begin, end} - {0, len(profile.blocks)}
    for (begin, end), stage in zip(wholes, stages, strict=True):
        inside = sorted(place for place in pinned if begin < place < end)
        if inside:
            raise InputError(
                f"stages: got {stage} and a stage that begins at {profile.blocks[inside[0]].name!r}, in the middle of "
                "it, expected none there. Drop one of the two."
            )
    places = {place for place in room.places if not any(begin < place < end for begin, end in wholes)}
    return replace(room, places=frozenset(places), pinned=tuple(sorted(pinned)))


def _find_blocks(profile: Profile, k: int, stage: StageEnds) -> tuple[int, int]:
    """Return the first block of a stage and the one after its last."""
    if not (isinstance(stage, tuple) and len(stage) == 2 and all(isinstance(name, str | None) for name in stage)):
        raise InputError(
            f'stages[{k}]: got {stage!r}, expected two names of modules, or None. Pass ("blocks.4", "blocks.8"), say.'
        )
    begin, end = (None if name is None else profile.stages([name])[1][0] for name in stage)
    if begin is not None and end is not None and begin >= end:
        raise InputError(
            f"stages[{k}]: got {stage}, expected a second module that comes after the first. Give them in the order of "
            "execution."
        )
    return begin or 0, len(profile.blocks) if end is None else end
