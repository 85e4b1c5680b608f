# SPDX-License-Identifier: Apache-2.0
"""Turn frames and units of a tape into the operations that a segment runs.

Each operation draws random numbers as if it ran alone: the generator is seeded for each torch call that draws, or once
for a call that branches on data (see `fpipe.runtime.segments.keying`).

Runs when a plan is made; the operations run in every step.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch

from fpipe.capture.trace.buffer_checkpoints import BufferCheckpoints
from fpipe.capture.trace.usage import Usage, stream_frames
from fpipe.errors import CutError
from fpipe.ir.captured import Labels, Operation, Unit, Value, single
from fpipe.ir.modes import contexts
from fpipe.ir.tape import Frame, Tape
from fpipe.runtime.segments.answers import answer_on_fakes
from fpipe.runtime.segments.keying import key_draws, key_stream, seed_once
from fpipe.runtime.segments.reentrant import Reentrant
from fpipe.runtime.segments.rerun import rerun_for_buffers
from fpipe.runtime.segments.seats import Seat, Seats
from fpipe.runtime.segments.whole_calls import attach_outputs, call_whole, drop_unread
from fpipe.tensors.random import stream_label


class Operations:
    """Makes operations from a tape's frames and units; `seats` are where modules keep parameters and buffers."""

    def __init__(self, tape: Tape, usage: Usage, seats: Seats, checkpoints: BufferCheckpoints) -> None:
        self.tape, self.usage, self.seats, self.checkpoints = tape, usage, seats, checkpoints

    def of_unit(self, unit: Unit) -> Operation:
        """Return the operation that repeats one torch call."""
        first, last = self.tape.ticks[unit]
        draws = self.tape.draws_between(first, last)
        labels = next((Labels(d.label, d.devices) for d in draws.values() if d.tick == first), None)
        operation = answer_on_fakes(single(unit, labels), self.tape.answers_between(first, last))
        return operation if labels or not draws else key_draws(operation, draws, (), {}, unit.path)

    def of_frame(self, frame: Frame) -> Operation:
        """Return the operation that makes a call as a whole."""
        frame = self._differentiable(frame) if frame.reentrant else frame
        operation = call_whole(frame, self.usage.outputs(frame))
        operation = answer_on_fakes(operation, self.tape.answers_between(frame.first_tick, frame.last_tick))
        if frame.branching:
            operation = attach_outputs(frame, operation, self._parameters(frame))
        operation = drop_unread(operation, self.usage.read_in(frame), self.tape.fakes)
        return self._key(frame, operation)

    def rerun(self, frame: Frame) -> Operation:
        """Return the operation that reruns a checkpointed function, as its backward would, to update buffers."""
        operation = answer_on_fakes(
            rerun_for_buffers(frame), self.tape.answers_between(frame.first_tick, frame.last_tick)
        )
        return seed_once(operation, self._checkpoint_labels(frame))

    def _key(self, frame: Frame, operation: Operation) -> Operation:
        """Return the operation of a whole call with its random draws keyed."""
        if frame.stream:
            return key_stream(operation, frame)
        if frame.checkpoint:
            return seed_once(operation, self._checkpoint_labels(frame))
        draws, inner = self.tape.draws_between(frame.first_tick, frame.last_tick), stream_frames(frame.inner)
        if not draws and not inner:
            return operation
        counts = self.tape.draw_counts(frame.first_tick, frame.last_tick)
        return key_draws(operation, draws, inner, counts, f"module {frame.path or '(root)'}")

    def _checkpoint_labels(self, frame: Frame) -> Labels | None:
        """Return the labels by which to seed a checkpointed function; `None` if it draws nothing.

        Inside a stream, return `None` unless the function is rerun to update buffers.
        """
        stream = self.tape.stream_at(frame.first_tick)
        if stream is None or frame.stream:
            draw = next(iter(self.tape.draws_between(frame.first_tick, frame.last_tick).values()), None)
            return frame.stream or (None if draw is None else Labels(draw.label, draw.devices))
        again = Labels(stream_label(str(stream.label), frame.start), stream.devices)
        return again if self.checkpoints.includes(frame) else None

    def _differentiable(self, frame: Frame) -> Frame:
        """Return a reentrant checkpoint as a frame that supports `torch.autograd.grad`."""
        seats = self._parameters(frame)
        invocation = copy(frame.invocation)
        invocation.function = Reentrant(
            modes=contexts(frame.modes.in_ambient),
            devices=self._devices(frame),
            parameters=lambda: [table[name] for table, name in seats],
        )
        return replace(frame, invocation=invocation)

    def _devices(self, frame: Frame) -> tuple[torch.device, ...]:
        """Return the devices on which a frame may draw; inside a stream, those of the stream."""
        stream = self.tape.stream_at(frame.first_tick)
        if stream is not None:
            return stream.devices
        draws = self.tape.draws_between(frame.first_tick, frame.last_tick).values()
        return tuple(dict.fromkeys(device for draw in draws for device in draw.devices))

    def _parameters(self, frame: Frame) -> list[Seat]:
        """Return a seat of each trainable parameter that a frame uses; others of its module may be absent."""
        used = self.usage.read_in(frame)
        return [self.seats[v][0] for v in used if v in self.seats and self.tape.fakes[v].requires_grad]


def require_own_casts(tape: Tape, seats: Seats, start: int, stop: int) -> None:
    """Raise `CutError` if a weight is used both inside and outside of units `start` to `stop` under one autocast.

    On one device, autocast casts it once and caches the result for all uses.
    """
    for value in _cast_on_both_sides(tape, start, stop):
        if value in seats and tape.fakes[value].requires_grad:
            raise CutError(
                f"module {tape.units[start].path or '(root)'}: got the weight {seats[value][0][1]!r} on both sides of "
                "a cut under one autocast, expected all of its uses in one stage, because autocast casts it once for "
                "all of them. Move the cut, or put autocast into the modules."
            )


def _cast_on_both_sides(tape: Tape, start: int, stop: int) -> list[Value]:
    """Return the values that one autocast region casts both inside and outside of units `start` to `stop`."""
    sides: dict[tuple[Value, int], set[bool]] = {}
    for k, unit in enumerate(tape.units):
        region = tape.modes[unit].region
        for value in tape.casts[unit] if region else ():
            sides.setdefault((value, region), set()).add(start <= k < stop)
    return [value for (value, _), inside in sides.items() if len(inside) > 1]
