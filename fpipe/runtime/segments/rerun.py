# SPDX-License-Identifier: Apache-2.0
"""Checkpointed functions that change buffers, such as those with batch normalization.

Problem. On one device such a function changes its buffers twice per microbatch: in the forward, and again when the
backward reruns it. In a pipeline, forwards of later microbatches come in between, and buffers are threaded through
forwards alone.

Idea. What a normalization adds to its statistics depends only on the microbatch, so the second change may come before
the next microbatch: once a stage has run forward, rerun these functions, last one first as in a backward, and discard
everything they make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from copy import copy
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fpipe.errors import CaptureError
from fpipe.ir.captured import Operation, Tensors, Unit
from fpipe.ir.tape import Frame, Tape, outermost_checkpoints
from fpipe.tensors.effects import memory

NORMS = frozenset({"batch_norm", "instance_norm"})
"""These update running statistics, and do not read them when they do."""


class Rewriting:
    """The checkpointed functions of a tape that change buffers and are rerun by a backward.

    Raise `CaptureError` if one reads a buffer that one changes, other than to compute the buffer's next value: on one
    device the backward would not recompute what the forward did.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        again = [*outermost_checkpoints(tape.frames)]
        changed = {one for frame in again if self.of(frame) for k in self._writers(frame) for one in tape.rewriters[k]}
        for unit in (unit for frame in again for unit in tape.units[frame.start : frame.stop] if changed):
            self._require_unread(unit, changed)

    def _writers(self, frame: Frame) -> list[int]:
        return [position for position in self.tape.rewriters if frame.start <= position < frame.stop]

    def _require_unread(self, unit: Unit, changed: Set[int]) -> None:
        fakes, name = self.tape.fakes, unit.does.partition("[")[0]
        reads = not changed.isdisjoint(memory(fakes[value]) for value in unit.reads)
        if reads and name not in NORMS and any(memory(fakes[value]) not in changed for value in unit.makes):
            raise CaptureError(
                f"module {unit.path or '(root)'}, {name}: got a checkpointed function that reads a buffer which one "
                "changes, expected one that only updates it: when the backward runs it again, on one device it "
                "computes something else than the forward did. Change the buffer before the checkpoint, or drop the "
                "checkpoint and let the schedule recompute the stage (schedules.recompute)."
            )

    def inside(self, frame: Frame) -> bool:
        """Return whether a frame is such a function, or contains one."""
        return self.of(frame) or any(map(self.inside, frame.inner))

    def of(self, frame: Frame) -> bool:
        """Return whether a frame is such a function."""
        runs_again = frame.checkpoint and any(self.tape.fakes[v].requires_grad for v in frame.returned.values())
        return runs_again and bool(self._writers(frame))

    def within(self, frames: Sequence[Frame], start: int, stop: int) -> Iterator[Frame]:
        """Yield such functions from unit `start` to `stop`, in the order in which a backward reruns them."""
        for frame in reversed(frames):
            if frame.stop > start and frame.start < stop:
                yield from [frame] if self.of(frame) else self.within(frame.inner, start, stop)


def once_more(frame: Frame) -> Operation:
    """Return the step that changes buffers as the backward of a checkpointed function does."""
    plain = copy(frame.invocation)
    plain.function = _plainly

    def call(key: int, *tensors: Tensor) -> Tensors:
        with saved_tensors_hooks(_dropped, _dropped):
            plain(tensors)
        return ()

    return Operation(frame.invocation.reads, (), call)


def _plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _dropped(saved: object) -> Any:
    """Pack or unpack a tensor that autograd saves as `None`."""
