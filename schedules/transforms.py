# SPDX-License-Identifier: Apache-2.0
"""Schedules made from schedules.

Problem. Splitting the backward, or leaving it out, is the same edit whatever the schedule; written into every family it
would be there once per family.

Idea. A transform is a generator function like a schedule, but for the one that it changes in place of sizes. The result
is an ordinary `Schedule`, whose factory is the transform and whose argument is the schedule given: it prints as the
calls that make it, compares, pickles, and may be transformed again. Nothing is generated before it is asked for.

Invariant: ranks, microbatches and placement are those of the schedule given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec

from schedules.actions import Action, B, I, W
from schedules.authoring import Factory, Schedule, Shape, without_rank
from schedules.errors import ScheduleError

Arguments = ParamSpec("Arguments")


def transform(generator: Callable[Concatenate[int, Arguments], Iterator[Action]]) -> Factory[Arguments]:
    """Turn a generator function `(rank, schedule, ...)` into a function from schedules to schedules.

    Further parameters must be hashable. What it makes raises `TypeError` for anything that is no `Schedule`.

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

    def shape(arguments: dict[str, Any]) -> Shape:
        schedule = arguments["schedule"]
        if not isinstance(schedule, Schedule):
            raise TypeError(
                f"{generator.__name__}: got {schedule!r}, expected a Schedule. Call the factory first, as in "
                f"{generator.__name__}(one_f_one_b(ranks=4, microbatches=8))."
            )
        return Shape(schedule.ranks, schedule.microbatches, schedule.placement, schedule.slices)

    return Factory(generator, without_rank(generator, "schedule"), shape)


@transform
def split_backward(rank: int, schedule: Schedule) -> Iterator[Action]:
    """Every `B` as `I`, immediately followed by `W`: cotangents leave before the weight gradients are computed.

    Gradients accumulate in the same order.

    >>> from schedules import one_f_one_b
    >>> print(split_backward(one_f_one_b(ranks=2, microbatches=2)))
    rank 0 |F0 F1 .  I0 W0 .  I1 W1 |
    rank 1 |.  F0 I0 W0 F1 I1 W1 .  |
    """
    for action in schedule.actions(rank):
        if action.kind == "B":
            yield I(action.stage, action.microbatch)
            yield W(action.stage, action.microbatch)
        else:
            yield action


@transform
def merge_backward(rank: int, schedule: Schedule) -> Iterator[Action]:
    """Every `I` as a full `B`, every `W` left out: `merge_backward(split_backward(s))` has the actions of `s`.

    Legal wherever the schedule is, since a `B` makes all that its `I` made and needs no more. Gradients now accumulate
    in the order of the `I`. Generating the actions raises `ScheduleError` for a `W` without its `I` before it, and for
    an `I` whose `W` never comes: leaving those out would hide that rule being broken.

    >>> from schedules import one_f_one_b
    >>> s = one_f_one_b(ranks=2, microbatches=2)
    >>> print(merge_backward(split_backward(s)))
    rank 0 |F0 F1 .  .  B0    .  B1    |
    rank 1 |.  F0 B0    F1 B1    .  .  |
    """
    owed: dict[Action, None] = {}  # invariant: one W for each I so far that has not had it
    position = -1
    for position, action in enumerate(schedule.actions(rank)):
        kind, stage, i, _, _ = action
        if kind == "W" and action not in owed:
            repair = f"Add {stage}I{i} before it, or drop it."
            raise ScheduleError("forward_before_backward", rank, position, action, f"comes before {stage}I{i}", repair)
        if kind == "W":
            del owed[action]
            continue
        if kind == "I":
            owed[W(stage, i)] = None
        yield B(stage, i) if kind == "I" else action
    for action in owed:
        raise ScheduleError("complete", rank, position + 1, None, f"{action} never runs", f"Add it to rank {rank}.")


@transform
def forwards(rank: int, schedule: Schedule) -> Iterator[Action]:
    """The forwards alone, in the order of the schedule: what evaluation runs.

    `check` is not meant for it, since no microbatch comes back. Lower it for a graph with values only.

    >>> from schedules import one_f_one_b
    >>> print(forwards(one_f_one_b(ranks=2, microbatches=3)))
    rank 0 |F0 F1 F2 .  |
    rank 1 |.  F0 F1 F2 |
    """
    for action in schedule.actions(rank):
        if action.kind == "F":
            yield action
