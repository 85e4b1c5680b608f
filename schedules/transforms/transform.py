# SPDX-License-Identifier: Apache-2.0
"""Transforms: schedules made from schedules.

Problem. Splitting the backward, or leaving it out, is the same edit for any schedule; coded into the families, it would
be repeated in each of them.

Idea. A transform is a generator function like a schedule's, but takes a schedule in place of sizes. The result is an
ordinary `Schedule` whose factory is the transform and whose argument is the original schedule: it prints as the calls
that made it, compares, pickles, and can be transformed again. Actions are generated only on demand.

Invariant: ranks, microbatches, slices, placement, stage graph and weight versions are those of the original schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Concatenate, overload

from schedules.arguments import require_takes, require_types, without_rank
from schedules.errors import ArgumentError, quote
from schedules.language.actions import Action
from schedules.language.membership import explain_misfits
from schedules.language.schedule import (
    UNLIMITED,
    Arguments,
    Factory,
    Limits,
    Schedule,
    Shape,
)


@overload
def transform(generator: Callable[Concatenate[int, Arguments], Iterator[Action]]) -> Factory[Arguments]: ...


@overload
def transform(
    *, limits: Limits = UNLIMITED, requires: Callable[..., None] | None = None, backward: bool = True
) -> Callable[[Callable[Concatenate[int, Arguments], Iterator[Action]]], Factory[Arguments]]: ...


def transform(
    generator: Any = None,
    *,
    limits: Limits = UNLIMITED,
    requires: Callable[..., None] | None = None,
    backward: bool = True,
) -> Any:
    """Turn a generator function `(rank, schedule, ...)` into a function from schedules to schedules.

    Any other parameters must be hashable. `limits` declares the limits of the result, as functions of the arguments;
    `KEPT` means those of the original schedule. `requires` is called with the arguments and raises `SizeError` for
    those that the transform does not support. If `backward` is false, the result is for inference. The resulting
    function raises `ArgumentError` for anything but a `Schedule`. Where the generator fails on what is not an action of
    the original schedule, it raises `ScheduleError`.

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

    require_types(transform, locals())

    def decorate(generator: Callable[..., Iterator[Action]]) -> Factory[...]:
        signature = without_rank("transform", generator, "schedule")
        require_takes(generator.__name__, "requires", requires, signature)

        def shape(arguments: dict[str, Any]) -> Shape:
            schedule = arguments["schedule"]
            if not isinstance(schedule, Schedule):
                raise ArgumentError(
                    f"{generator.__name__}: got schedule={quote(schedule)}, expected a Schedule. Call the "
                    f"factory first, as in {generator.__name__}(one_f_one_b(ranks=4, microbatches=8))."
                )
            if requires is not None:
                requires(**arguments)
            sizes = schedule.ranks, schedule.microbatches, schedule.placement, schedule.slices
            return Shape(*sizes, backward and schedule.backward, schedule.graph, schedule.version)

        @wraps(generator)
        def generate(rank: int, schedule: Schedule, **others: Any) -> Iterator[Action]:
            found = generator(rank, schedule, **others)
            return _explain(found, schedule) if isinstance(found, Iterator) else found

        return Factory(generate, signature, shape, limits)

    return decorate if generator is None else decorate(generator)


def _explain(actions: Iterator[Action], schedule: Schedule) -> Iterator[Action]:
    """Yield actions that are made from those of a schedule; an error in between is about the latter."""
    with explain_misfits(schedule):
        yield from actions


KEPT = Limits(
    memory=lambda rank, schedule, **others: schedule.memory(rank),
    versions=lambda rank, schedule, **others: schedule.versions(rank),
)
