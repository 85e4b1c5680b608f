# SPDX-License-Identifier: Apache-2.0
"""Check whether a checkpointed function does the same when the backward reruns it.

Problem. By then the forward has moved on: a list that blocks fill is longer, a counter is higher. On one device the
function finds them so, and gets gradients of something other than the forward computed; in a stage they are as before.

Idea. Rehearse these functions from the state in which a forward begins, and from that in which it ends. If both are as
recorded, it does not matter which of the two they find.
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
