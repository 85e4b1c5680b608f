# SPDX-License-Identifier: Apache-2.0
"""The actions a schedule may contain at all: compute actions, on its own stages and microbatches, each on its rank.

These are the first two rules of `check`. Other code reads actions as they come, inside `explain_misfits`: if it fails,
the error is about the first action that breaks these rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from schedules.errors import PipelineError, ScheduleError, quote
from schedules.language.actions import GATHERINGS, KINDS, Action, is_own
from schedules.language.schedule import Actions, Schedule

_COMPUTE = tuple(kind for kind, word in KINDS.items() if not word.does)
_KINDS = frozenset(_COMPUTE)


def require_compute_only(schedule: Schedule, rank: int, actions: Actions) -> Actions:
    """Require compute actions on the schedule's own stages and microbatches; `lower` inserts the transfers."""
    S, M, slices = schedule.stages, schedule.microbatches, schedule.slices
    for position, action in enumerate(actions):
        if type(action) is Action:
            kind, stage, i, peer, part = action
            if (
                (kind in _KINDS or is_own(kind))
                and peer is None
                and type(stage) is type(i) is int  # True and 1.0 equal 1, but print differently
                and 0 <= stage < S
                and (0 <= i < M or (kind in GATHERINGS and i >= M))
                and (part is None if slices == 1 or not KINDS[kind].after else type(part) is int and 0 <= part < slices)
            ):
                yield action
                continue
        got = action if type(action) is Action else quote(action).strip("'")
        raise ScheduleError("compute_only", rank, position, got, *_explain_misfit(schedule, action))


def _explain_misfit(schedule: Schedule, action: Action) -> tuple[str, str]:
    if type(action) is not Action:
        return f"got {quote(action)}, expected an action", "Yield actions such as F(stage, microbatch)."
    if (action.kind not in _KINDS and not is_own(action.kind)) or action.peer is not None:
        kinds = ", ".join(_COMPUTE)
        return "is not a compute action", f"Yield only {kinds}; lower() inserts the transfers."
    if not type(action.stage) is type(action.microbatch) is int:
        return f"got {tuple(action)}, expected integers", "Make stage and microbatch ints."
    if not 0 <= action.stage < schedule.stages:
        return f"stage {action.stage} does not exist", f"Use stages 0 to {schedule.stages - 1}."
    if action.kind in GATHERINGS and action.microbatch < 0:
        return f"gathering {action.microbatch} does not exist", "Count the stage's gatherings from 0."
    if action.kind not in GATHERINGS and not 0 <= action.microbatch < schedule.microbatches:
        return f"microbatch {action.microbatch} does not exist", f"Use microbatches 0 to {schedule.microbatches - 1}."
    if schedule.slices == 1 or not KINDS[action.kind].after:
        return f"slice {action.slice} does not exist", "Leave the slice out: this action has none."
    return f"slice {action.slice} does not exist", f"Use slices 0 to {schedule.slices - 1}."


def require_placed(schedule: Schedule, rank: int, actions: Actions) -> Actions:
    """Require every action to be on the rank that holds its stage for its microbatch."""
    routes = schedule.placement.routes
    R = len(routes)
    for position, action in enumerate(actions):
        home = routes[action.microbatch % R][action.stage]
        if home != rank:
            what = f"stage {action.stage}" if R == 1 else f"stage {action.stage} for microbatch {action.microbatch}"
            problem = f"{what} lives on rank {home}"
            raise ScheduleError("placed", rank, position, action, problem, f"Yield {action} on rank {home}.")
        yield action


@contextmanager
def explain_misfits(schedule: Schedule) -> Iterator[None]:
    """Raise `ScheduleError` if code in this context fails, and an action breaks these rules or comes a second time."""
    try:
        yield
    except PipelineError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError):
        for rank in range(schedule.ranks):
            seen = set[tuple[object, ...]]()
            actions = require_placed(schedule, rank, require_compute_only(schedule, rank, schedule.actions(rank)))
            for position, action in enumerate(actions):
                step = KINDS[action.kind].crosses, *action[1:]
                if step[0] and step in seen:
                    problem = "has already run", f"Drop {action}: each runs once."
                    raise ScheduleError("forward_before_backward", rank, position, action, *problem) from None
                seen.add(step)
        raise
