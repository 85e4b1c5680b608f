# SPDX-License-Identifier: Apache-2.0
"""Defer weight gradients, so that ranks have work while they would wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from math import isfinite

from schedules.arguments import is_number
from schedules.errors import SizeError
from schedules.language.actions import Action
from schedules.language.schedule import Limits, Schedule
from schedules.playing.costs import ROUNDING, UNITS
from schedules.transforms.transform import KEPT, transform


def _require_memory(schedule: Schedule, memory: float) -> None:
    if not is_number(memory):
        raise SizeError.of("defer_weights", "memory", memory, "a number", "Choose memory=schedule.ranks, say.")


@transform(
    limits=Limits(memory=lambda rank, schedule, memory: memory, versions=KEPT.versions), requires=_require_memory
)
def defer_weights(rank: int, schedule: Schedule, memory: float) -> Iterator[Action]:
    """Defer weight gradients as far as `memory` allows, in units of a rank's activations for one microbatch.

    The room to defer a `W` is the difference between `memory` and the rank's own peak. With room for `n` more
    activations, every `W` moves to the place of the `n`th `W` after it, and the last `n` to the end, before any `U`, or
    before the `G` or `REDUCE_GRAD` that uses them. Cotangents that arrive in the meantime go first, and ranks that
    would idle at the end have work. Gradients accumulate in the same order. If an update of one stage uses gradients of
    another, on a rank that defers them, the ranks may wait for each other, which `check` finds.

    The peak is the one the schedule declares. If it declares none, the rank's actions are generated twice, the first
    time to count it. Generating the actions raises `SizeError` if the peak exceeds `memory`.

    >>> from schedules import one_f_one_b, split_backward
    >>> print(defer_weights(split_backward(one_f_one_b(ranks=2, microbatches=3)), memory=2))
    rank 0 |F0 F1 .  I0 W0 F2 I1 W1 I2 W2 |
    rank 1 |.  F0 I0 F1 I1 W0 F2 I2 W1 W2 |
    """
    peak = _find_peak(schedule, rank)
    if peak > memory + ROUNDING:
        expected = f"at least the {peak:g} that rank {rank} holds with no weight gradient deferred"
        raise SizeError.of("defer_weights", "memory", memory, expected, f"Choose memory >= {peak:g}.")
    room = (memory - peak) * _activations_per_microbatch(schedule) + ROUNDING
    owed = deque[Action]()
    for action in schedule.actions(rank):
        kind, stage, _, _, _ = action
        if kind == "W":
            owed.append(action)
            if len(owed) > room:
                yield owed.popleft()
            continue
        if kind in ("G", "REDUCE_GRAD", "U"):
            used = {stage} if kind != "U" else {late.stage for late in owed}  # U may use other stages' gradients
            yield from (late for late in owed if late.stage in used)
            owed = deque(late for late in owed if late.stage not in used)
        yield action
    yield from owed


def _find_peak(schedule: Schedule, rank: int) -> float:
    """Return the most activations the rank holds at once: as the schedule declares, or else as counted."""
    if isfinite(schedule.memory(rank)):
        return schedule.memory(rank)
    held = accumulate(UNITS.growth(action.kind, 0) for action in schedule.actions(rank))
    return max(held, default=0) / _activations_per_microbatch(schedule)


def _activations_per_microbatch(schedule: Schedule) -> float:
    """Return the number of activations one microbatch has on a rank, on average if ranks differ."""
    return schedule.slices * schedule.stages / schedule.ranks
