# SPDX-License-Identifier: Apache-2.0
"""Check that checkpointed functions do the same when the backward runs them again.

Problem. By then the forward has moved on: a list that blocks fill is longer, a counter is higher. On one device, the
rerun sees that state, and the gradients are not those of the forward. A step reruns what was recorded, or, in a whole
call, sees the state before the forward.

Idea. Rehearse these functions in the state before the forward, and in the state after it. If they do what was recorded
both times, it does not matter which state the rerun sees. If the forward changes no state, only Python code that a step
reruns needs this.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fpipe.errors import CaptureError
from fpipe.record.trace.rehearsal import Rehearse
from fpipe.record.trace.tape import Frame, Tape, outermost_checkpoints
from fpipe.record.trace.whole import WholeCalls


def require_same_again(tape: Tape, whole: WholeCalls, changes: bool, rehearse: Rehearse) -> None:
    """Raise `CaptureError` if a call that a backward runs again depends on Python state that the forward changes.

    `changes`: whether the forward changes any.
    """
    every = (one for one in outermost_checkpoints(tape.frames) if _is_rerun(tape, one))
    again = [*(every if changes else _reruns(tape, whole, tape.frames))]
    calls = tape.frames if changes else whole.outermost(tape.frames)
    forward = [replace(frame, touched=[]) for frame in calls]  # keep what they assign
    for together in ([*forward, *reversed(again)], *([frame] for frame in again)) if again else ():
        for frame, found in rehearse(together).differing.items():
            raise CaptureError(
                f"module {frame.path or '(root)'}: got a checkpointed function that does something else when the "
                f"backward runs it again ({found}), expected the same. The forward has changed Python "
                "state that the function reads. Pass it as an argument, or let the schedule recompute the stage "
                "(schedules.recompute)."
            )


def _reruns(tape: Tape, whole: WholeCalls, frames: Sequence[Frame]) -> Iterator[Frame]:
    """Yield the calls that a backward runs again as Python: in whole calls, or as whole calls of a checkpoint."""
    for frame in frames:
        if whole.runs(frame):
            yield from (one for one in outermost_checkpoints([frame]) if _is_rerun(tape, one))
        elif frame.checkpoint and _is_rerun(tape, frame):
            yield from whole.outermost(frame.inner)
        else:
            yield from _reruns(tape, whole, frame.inner)


def _is_rerun(tape: Tape, frame: Frame) -> bool:
    return any(tape.fakes[value].requires_grad for value in frame.returned.values())
