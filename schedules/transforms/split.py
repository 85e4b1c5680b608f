# SPDX-License-Identifier: Apache-2.0
"""Transforms: schedules made from schedules.

Problem. Splitting the backward, or leaving it out, is the same edit for any schedule; coded into the families, it would
be repeated in each of them.

Idea. A transform is a generator function like a schedule's, but takes a schedule in place of sizes. The result is an
ordinary `Schedule` whose factory is the transform and whose argument is the original schedule: it prints as the calls
that made it, compares, pickles, and can be transformed again. Actions are generated only on demand.

Invariant: ranks, microbatches, slices, placement and stage graph are those of the original schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate
from math import isfinite
from typing import Any, Concatenate, ParamSpec, overload

from schedules.errors import ScheduleError, SizeError
from schedules.language.actions import KINDS, Action, B, C, F, I, R, W
from schedules.language.costs import Sizes
from schedules.language.schedule import UNLIMITED, Factory, Limits, Schedule, Shape, without_rank

Arguments = ParamSpec("Arguments")


@overload
def transform(generator: Callable[Concatenate[int, Arguments], Iterator[Action]]) -> Factory[Arguments]: ...


@overload
def transform(
    *, limits: Limits = UNLIMITED, backward: bool = True
) -> Callable[[Callable[Concatenate[int, Arguments], Iterator[Action]]], Factory[Arguments]]: ...


def transform(generator: Any = None, *, limits: Limits = UNLIMITED, backward: bool = True) -> Any:
    """Turn a generator function `(rank, schedule, ...)` into a function from schedules to schedules.

    Any other parameters must be hashable. `limits` declares the limits of the result, as functions of the arguments;
    `KEPT` means those of the original schedule. If `backward` is false, the result is for inference. The resulting
    function raises `TypeError` for anything but a `Schedule`.

    >>> from schedules import check, gpipe, transform
    >>> @transform
    ... def backwards_last_first(rank, schedule):
    ...     actions = list(schedule.actions(rank))
    ...     yield from (action for action in actions if action.kind == "F")
    ...     yield from (action for action in reversed(actions) if action.kind != "F")
    >>> print(backwards_last_first(gpipe(ranks=2, microbatches=2)))
    rank 0 |F0 F1 .  .  .  B1    B0    |
    rank 1 |.  F0 F1 B1    B0    .  .  |
    """

    def decorate(generator: Callable[..., Iterator[Action]]) -> Factory[...]:
        def shape(arguments: dict[str, Any]) -> Shape:
            schedule = arguments["schedule"]
            if not isinstance(schedule, Schedule):
                raise TypeError(
                    f"{generator.__name__}: got {schedule!r}, expected a Schedule. Call the factory first, as in "
                    f"{generator.__name__}(one_f_one_b(ranks=4, microbatches=8))."
                )
            sizes = schedule.ranks, schedule.microbatches, schedule.placement, schedule.slices
            return Shape(*sizes, backward and schedule.backward, schedule.graph)

        return Factory(generator, without_rank(generator, "schedule"), shape, limits)

    return decorate if generator is None else decorate(generator)


KEPT = Limits(
    memory=lambda rank, schedule, **others: schedule.memory(rank),
    versions=lambda rank, schedule, **others: schedule.versions(rank),
)


@transform(limits=KEPT)
def split_backward(rank: int, schedule: Schedule) -> Iterator[Action]:
    """Split every `B` into `I` and `W`, one right after the other, so cotangents leave before weight gradients run.

    Gradients accumulate in the same order.

    >>> from schedules import one_f_one_b
    >>> print(split_backward(one_f_one_b(ranks=2, microbatches=2)))
    rank 0 |F0 F1 .  I0 W0 .  I1 W1 |
    rank 1 |.  F0 I0 W0 F1 I1 W1 .  |
    """
    for action in schedule.actions(rank):
        kind, stage, i, _, part = action
        if kind == "B":
            yield I(stage, i, part)
            yield W(stage, i, part)
        else:
            yield action


@transform(limits=KEPT)
def merge_backward(rank: int, schedule: Schedule) -> Iterator[Action]:
    """Replace every `I` by a full `B` and drop every `W`: `merge_backward(split_backward(s))` has the actions of `s`.

    The result is correct if the schedule is, since a `B` makes all that its `I` made and needs no more. Gradients now
    accumulate in the order of the `I`. Generating the actions raises `ScheduleError` for a `W` without an earlier `I`,
    and for an `I` whose `W` never comes: merging would hide the broken rule.

    >>> from schedules import one_f_one_b
    >>> s = one_f_one_b(ranks=2, microbatches=2)
    >>> print(merge_backward(split_backward(s)))
    rank 0 |F0 F1 .  .  B0    .  B1    |
    rank 1 |.  F0 B0    F1 B1    .  .  |
    """
    owed: dict[Action, None] = {}  # invariant: the W of each I so far whose W has not come
    position = -1
    for position, action in enumerate(schedule.actions(rank)):
        kind, stage, i, _, part = action
        if kind == "W" and action not in owed:
            half = I(stage, i, part)
            repair = f"Add {half} before it, or drop it."
            raise ScheduleError("forward_before_backward", rank, position, action, f"comes before {half}", repair)
        if kind == "W":
            del owed[action]
            continue
        if kind == "I":
            owed[W(stage, i, part)] = None
        yield B(stage, i, part) if kind == "I" else action
    for action in owed:
        raise ScheduleError("complete", rank, position + 1, None, f"{action} never runs", f"Add it to rank {rank}.")


@transform(limits=Limits(memory=lambda rank, schedule, memory: memory, versions=KEPT.versions))
def defer_weights(rank: int, schedule: Schedule, memory: float) -> Iterator[Action]:
    """Defer weight gradients as far as `memory` allows, in units of a rank's activations for one microbatch.

    The room to defer a `W` is the difference between `memory` and the rank's own peak. With room for `n` more
    activations, every `W` moves to the place of the `n`th `W` after it, and the last `n` to the end, before any `U`, or
    before the `G` that uses them. Cotangents that arrive in the meantime go first, and ranks that would idle at the end
    have work. Gradients accumulate in the same order.

    The peak is the one the schedule declares. If it declares none, the rank's actions are generated twice, the first
    time to count it. Generating the actions raises `SizeError` if the peak exceeds `memory`.

    >>> from schedules import one_f_one_b
    >>> print(defer_weights(split_backward(one_f_one_b(ranks=2, microbatches=3)), memory=2))
    rank 0 |F0 F1 .  I0 W0 F2 I1 W1 I2 W2 |
    rank 1 |.  F0 I0 F1 I1 W0 F2 I2 W1 W2 |
    """
    peak = _peak(schedule, rank)
    if peak > memory + _ALMOST:
        expected = f"at least the {peak:g} that rank {rank} holds with no weight gradient deferred"
        raise SizeError.of("defer_weights", "memory", memory, expected, f"Choose memory >= {peak:g}.")
    room = (memory - peak) * _each(schedule) + _ALMOST
    owed = deque[Action]()
    for action in schedule.actions(rank):
        kind, stage, _, _, _ = action
        if kind == "W":
            owed.append(action)
            if len(owed) > room:
                yield owed.popleft()
            continue
        if kind in ("G", "U"):
            used = {stage} if kind == "G" else {late.stage for late in owed}  # U may use other stages' gradients
            yield from (late for late in owed if late.stage in used)
            owed = deque(late for late in owed if late.stage not in used)
        yield action
    yield from owed


def _peak(schedule: Schedule, rank: int) -> float:
    """Return the most activations the rank holds at once, as declared or else as counted."""
    if isfinite(schedule.memory(rank)):
        return schedule.memory(rank)
    growth = {kind: Sizes().growth(kind, 0) for kind in KINDS}
    held = accumulate(growth[action.kind] for action in schedule.actions(rank))
    return max(held, default=0) / _each(schedule)


def _each(schedule: Schedule) -> float:
    """Return the number of activations one microbatch has on a rank, on average if ranks differ."""
    return schedule.slices * schedule.stages / schedule.ranks


_ALMOST = 1e-9  # limits may be sums of fractions


@transform(limits=KEPT)
def recompute(rank: int, schedule: Schedule, stages: tuple[int, ...] | None = None) -> Iterator[Action]:
    """Checkpoint the forwards on `stages`, by default all, and recompute each directly before its backward.

    A stage then holds its inputs from `C` on and its activations only from `R` on (arXiv 1604.06174). A forward
    overlapped with a backward is separated from it. Forwards that are already checkpointed, and schedules without
    backwards, stay unchanged.

    >>> from schedules import one_f_one_b
    >>> print(recompute(one_f_one_b(ranks=2, microbatches=2)))
    rank 0 |C0 C1 R0 .  .  B0    R1 .  B1    |
    rank 1 |.  C0 R0 B0    C1 R1 B1    .  .  |
    """
    every = range(schedule.stages)
    if stages is not None and not (isinstance(stages, tuple) and set(every).issuperset(stages)):
        expected = f"a tuple of stages from 0 to {schedule.stages - 1}"
        raise SizeError.of("recompute", "stages", stages, expected, "Name stages that the schedule has, as in (0, 2).")
    chosen = (every if stages is None else stages) if schedule.backward else ()
    kept = set[Action]()  # invariant: the R of each forward checkpointed here and not recomputed yet
    pair: tuple[Action, ...] = ()  # a fused forward, held until its partner
    for action in schedule.actions(rank):
        kind, stage, i, _, part = action
        if kind in ("F", "OVERLAP_F") and stage in chosen:
            kept.add(R(stage, i, part))
            yield C(stage, i, part)
        elif kind == "OVERLAP_F":
            pair = (action,)
        else:
            again = R(stage, i, part)
            if KINDS[kind].crosses == "B" and again in kept:
                kept.remove(again)
                yield again
            yield from pair
            yield action
            pair = ()


@transform(backward=False)
def forwards(rank: int, schedule: Schedule) -> Iterator[Action]:
    """Keep only the forwards, in the schedule's order, as evaluation does. Nothing is saved for a backward.

    >>> from schedules import one_f_one_b
    >>> print(forwards(one_f_one_b(ranks=2, microbatches=3)))
    rank 0 |F0 F1 F2 .  |
    rank 1 |.  F0 F1 F2 |
    """
    for action in schedule.actions(rank):
        kind, stage, i, _, part = action
        if KINDS[kind].crosses == "F":
            yield action if kind == "F" else F(stage, i, part)
