# SPDX-License-Identifier: Apache-2.0
"""Checkpoint forwards: save only their inputs, and recompute them before their backwards."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from schedules.arguments import is_size
from schedules.errors import SizeError
from schedules.language.actions import KINDS, Action, C, R
from schedules.language.schedule import Schedule
from schedules.transforms.transform import KEPT, transform


def require_own_stages(transform: str, schedule: Schedule, stages: tuple[int, ...] | None) -> None:
    """Raise `SizeError` for anything but a tuple of the schedule's stages, or `None`."""
    if stages is None:
        return
    if not isinstance(stages, tuple) or not all(is_size(stage, 0, schedule.stages - 1) for stage in stages):
        expected = f"a tuple of stages from 0 to {schedule.stages - 1}"
        raise SizeError.of(transform, "stages", stages, expected, "Name stages that the schedule has, as in (0, 2).")


@transform(limits=KEPT, requires=partial(require_own_stages, "recompute"))
def recompute(rank: int, schedule: Schedule, stages: tuple[int, ...] | None = None) -> Iterator[Action]:
    """Checkpoint the forwards on `stages`, by default all, and recompute each directly before its backward.

    A stage then holds its inputs from `C` on and its activations only from `R` on (arXiv 1604.06174). A forward
    overlapped with a backward is separated from it, and what it kept is not moved off the device. Forwards that are
    already checkpointed, and schedules without backwards, stay unchanged. Raise `SizeError` for anything but a tuple of
    the schedule's stages.

    >>> from schedules import one_f_one_b
    >>> print(recompute(one_f_one_b(ranks=2, microbatches=2)))
    rank 0 |C0 C1 R0 .  .  B0    R1 .  B1    |
    rank 1 |.  C0 R0 B0    C1 R1 B1    .  .  |
    """
    every = range(schedule.stages)
    chosen = frozenset((every if stages is None else stages) if schedule.backward else ())
    kept = set[tuple[int, int, int | None]]()  # invariant: the forwards checkpointed here and not recomputed yet
    pair: tuple[Action, ...] = ()  # a fused forward, held until its partner
    for action in schedule.actions(rank):
        kind, stage, i, _, part = action
        unit = stage, i, part
        if kind in ("F", "OVERLAP_F") and stage in chosen:
            kept.add(unit)
            yield C(stage, i, part)
        elif kind == "OVERLAP_F":
            pair = (action,)
        elif kind in ("OFFLOAD", "RELOAD") and unit in kept:
            continue  # there is nothing to move
        else:
            if unit in kept and KINDS[kind].crosses == "B":
                kept.remove(unit)
                yield R(stage, i, part)
            yield from pair
            yield action
            pair = ()
