# SPDX-License-Identifier: Apache-2.0
"""Check that checkpointed functions do the same when the backward reruns them.

Problem. By then the forward has moved on: a list that blocks fill is longer, a counter is higher. On one device, the
rerun sees that state, and the gradients are not those of the forward; in a stage, it sees the state before the forward.

Idea. Rehearse these functions in the state before the forward, and in the state after it. If they do what was recorded
both times, it does not matter which state the rerun sees.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from dataclasses import replace

from fpipe.capture.trace.rehearsal import Rehearse
from fpipe.errors import CaptureError
from fpipe.ir.tape import Frame, Tape, outermost_checkpoints


def require_same_again(tape: Tape, rehearse: Rehearse) -> None:
    """Raise `CaptureError` if a checkpointed function depends on Python state that the forward changes."""
    again = [frame for frame in outermost_checkpoints(tape.frames) if _is_rerun(tape, frame)]
    forward = [replace(frame, touched=[]) for frame in tape.frames]  # keep what it assigns
    for calls in ([*forward, *reversed(again)], *([frame] for frame in again)) if again else ():
        for frame, found in rehearse(calls).differing.items():
            raise CaptureError(
                f"module {frame.path or '(root)'}: got a checkpointed function that does something else when the "
                f"backward runs it again ({found}), expected the same. The forward has changed Python "
                "state that the function reads. Pass it as an argument, or let the schedule recompute the stage "
                "(schedules.recompute)."
            )


def _is_rerun(tape: Tape, frame: Frame) -> bool:
    return any(tape.fakes[value].requires_grad for value in frame.returned.values())
