# SPDX-License-Identifier: Apache-2.0
"""Checkpointed functions that change buffers, such as those with batch normalization.

Problem. On one device such a function changes its buffers twice per microbatch: in the forward, and again when the
backward reruns it. In a pipeline, forwards of later microbatches come in between, and buffers are threaded through
forwards alone.

Idea. What a normalization adds to its statistics depends only on the microbatch, so the second change can come before
the next microbatch: right after a stage's forward, rerun these functions, in reverse order as a backward would, and
discard everything they compute.

Runs when a plan is made; the reruns are part of a stage's forward in every step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence, Set

from fpipe.errors import CaptureError
from fpipe.record.captured import Unit
from fpipe.record.trace.tape import Frame, Tape, outermost_checkpoints
from fpipe.tensors.effects import memory

NORMS = frozenset({"batch_norm", "instance_norm"})
"""These update running statistics, and do not read them when they do."""


class BufferCheckpoints:
    """The checkpointed functions of a tape that change buffers and are rerun by a backward.

    Raise `CaptureError` if one reads a buffer that one of them changes, other than to compute the buffer's next value:
    on one device the backward would not recompute what the forward did.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        frames = [*outermost_checkpoints(tape.frames)]
        for frame in frames:
            if any(map(self.has_any_in, frame.inner)):
                raise CaptureError(
                    f"module {frame.path or '(root)'}: got a checkpoint in a checkpoint, with a function that changes "
                    "a buffer, expected one checkpoint around it. On one device, three runs would change the buffer. "
                    "Drop one of the two."
                )
        writers = [unit for frame in frames if self.includes(frame) for unit in self._writers(frame)]
        changed = {one for unit in writers for one in tape.rewriters[unit]}
        for unit in (unit for frame in frames for unit in tape.units[frame.start : frame.stop] if changed):
            self._require_unread(unit, changed)

    def includes(self, frame: Frame) -> bool:
        """Return whether a frame is a checkpointed function that changes buffers and is rerun by a backward."""
        is_rerun = frame.checkpoint and any(self.tape.fakes[v].requires_grad for v in frame.returned.values())
        return is_rerun and bool(self._writers(frame))

    def has_any_in(self, frame: Frame) -> bool:
        """Return whether a frame is such a function, or contains one."""
        return self.includes(frame) or any(map(self.has_any_in, frame.inner))

    def in_backward_order(self, frames: Sequence[Frame], present: Collection[int]) -> Iterator[Frame]:
        """Yield such functions whose units are present, in the order in which a backward reruns them."""
        for frame in reversed(frames):
            if self.includes(frame):
                yield from [frame] if frame.start in present else ()
            else:
                yield from self.in_backward_order(frame.inner, present)

    def _writers(self, frame: Frame) -> list[int]:
        """Return the positions of the units inside a frame that change buffers."""
        return [position for position in self.tape.rewriters if frame.start <= position < frame.stop]

    def _require_unread(self, unit: Unit, changed: Set[int]) -> None:
        fakes, name = self.tape.fakes, unit.does.partition("[")[0]
        reads = not changed.isdisjoint(memory(fakes[value]) for value in unit.reads)
        if reads and name not in NORMS and any(memory(fakes[value]) not in changed for value in unit.makes):
            raise CaptureError(
                f"module {unit.path or '(root)'}, {name}: got a checkpointed function that reads a buffer that it or "
                "another checkpointed function changes, expected one that only updates it. On one device, the rerun in "
                "the backward would see another value than the forward did. Change the buffer before the checkpoint, "
                "or drop the checkpoint and let the schedule recompute the stage (schedules.recompute)."
            )
