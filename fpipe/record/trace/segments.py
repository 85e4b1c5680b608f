# SPDX-License-Identifier: Apache-2.0
"""Turn units of a record into one function, which runs the recorded torch calls in order.

The user's Python ran at capture. A step repeats its torch calls, each under the modes in which it was recorded, and
seeds the generator before each call that draws. Calls of checkpointed functions run under torch's checkpoint. Only
*whole calls* run as Python again, in the skeleton of the model (see `fpipe.record.trace.whole`). They may not read
Python state that other calls leave, because these do not run: a rehearsal of each segment finds that.

Runs when a plan is made; the functions run in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch

from fpipe.errors import CutError
from fpipe.record.captured import (
    Function,
    Labels,
    Operation,
    Tensors,
    Unit,
    Value,
    compose,
    join,
    operation_of,
    seed_once,
)
from fpipe.record.model.snapshot import ContainerState
from fpipe.record.trace.answers import answer_on_fakes
from fpipe.record.trace.checkpoints import BufferCheckpoints, Reentrant, checkpoint_calls, rerun_for_buffers
from fpipe.record.trace.comparison import Rehearse
from fpipe.record.trace.draws import begin_stream, end_stream, key_draws
from fpipe.record.trace.frames import Frame
from fpipe.record.trace.record import Record
from fpipe.record.trace.whole import Usage, WholeCalls, cut_error, stream_frames
from fpipe.record.trace.whole_calls import Seat, Seats, attach_outputs, call_whole, drop_unread, seat_inputs
from fpipe.tensors.random import stream_label


@dataclass(frozen=True, eq=False)
class Checkpointed:
    """A checkpointed function, as the pieces that it consists of."""

    frame: Frame
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, eq=False)
class StreamEnd:
    """The beginning or the end of a call that draws from a stream, and the function to call there."""

    frame: Frame
    call: Callable[[Frame, int], Tensors]


Piece: TypeAlias = Unit | Frame | Checkpointed | StreamEnd
"""A torch call, a whole call, a checkpointed function, or an end of a stream."""


class Segments:
    """Makes functions of a record's units.

    - `seats`: where modules keep parameters and buffers. `results`: the values that leave the model.
    - `written`: the containers that a run of the model changes.
    - `rehearse`: makes whole calls without the other calls of the model.
    """

    def __init__(
        self,
        record: Record,
        seats: Seats,
        results: Sequence[Value],
        written: Sequence[ContainerState],
        rehearse: Rehearse,
    ) -> None:
        self.record, self.seats, self.written, self.rehearse = record, seats, written, rehearse
        self.usage, self.checkpoints = Usage(record, results), BufferCheckpoints(record)
        self.whole = WholeCalls(record, self.usage, self.checkpoints)
        self.position = {unit: k for k, unit in enumerate(record.units)}

    def fuse(
        self,
        units: Sequence[Unit],
        random_units: Mapping[Unit, Labels],
        inputs: tuple[Value, ...],
        outputs: tuple[Value, ...],
    ) -> Function:
        """Return the function that runs these units, in the order of the record; see `fpipe.record.captured.Fuse`."""
        present = frozenset(self.position[unit] for unit in units)
        pieces = self._pieces(self.record.frames, range(len(self.record.units)), present)
        operations = [self._operation(piece, keyed=True) for piece in pieces]
        operations += [self._rerun(frame) for frame in self.checkpoints.in_backward_order(self.record.frames, present)]
        require_own_casts(self.record, self.seats, present)
        run, whole = compose(operations, inputs, outputs), [*_frames(pieces)]
        redraws = any(isinstance(piece, Checkpointed) for piece in pieces)
        if not whole:
            form = self._form(pieces, inputs, outputs) if len(operations) == len(pieces) else None
            return Function(run, redraws=redraws, form=form)
        written = {id(one.container): one for one in (*self._rehearse(whole), *self.written)}
        seats = [(*seat, k) for k, value in enumerate(inputs) for seat in self.seats.get(value, ())]
        reruns = any(self._reruns(frame) for frame in whole)
        return replace(seat_inputs(run, seats, [*written.values()]), redraws=redraws or reruns)

    def _form(self, pieces: Sequence[Piece], inputs: Sequence[Value], outputs: Sequence[Value]) -> Hashable:
        """Return the form of torch calls, with values numbered in their order; `None` if it is not known."""
        number, calls = {value: k for k, value in enumerate(inputs)}, list[Hashable]()
        for piece in pieces:
            form = self._form_of(piece) if isinstance(piece, Unit) else None
            if form is None or not isinstance(piece, Unit) or any(value not in number for value in piece.reads):
                return None
            for value in piece.makes:
                number.setdefault(value, len(number))
            calls.append((form, *[tuple([number[value] for value in group]) for group in (piece.reads, piece.makes)]))
        return (*calls, tuple([number[value] for value in outputs]))

    def _form_of(self, unit: Unit) -> Hashable:
        """Return the form of a torch call, which draws, exchanges and is told nothing."""
        facts = self.record.facts[unit]
        acts = facts.draw is not None or facts.communicates or self.record.draws_between(*facts.ticks)
        if acts or self.record.answers_between(*facts.ticks) or (form := facts.invocation.form) is None:
            return None
        return form, facts.picks, facts.modes

    def _rehearse(self, whole: Sequence[Frame]) -> Sequence[ContainerState]:
        """Return the containers that these calls change; raise `CutError` if one needs calls that do not run."""
        rehearsed = self.rehearse(whole)
        for frame, difference in rehearsed.differing.items():
            reason = frame.sealed or "control flow on data"
            raise cut_error(frame, reason, f"finds other Python state in its stage ({difference})")
        return rehearsed.changed

    def _reruns(self, frame: Frame) -> bool:
        """Return whether a backward may run a part of a whole call again, in any branch."""
        inside = any(frame.start <= position <= frame.stop for position in self.record.hooked)
        return inside or frame.branching or self.whole.is_checkpointed(frame)

    # ---------------------------------------------------------------------------------------------------------- pieces

    def _pieces(self, frames: Sequence[Frame], units: range, present: Collection[int]) -> list[Piece]:
        """Return the pieces that make up the units that are present, given the frames over `units`."""
        found: list[Piece] = []
        at = units.start
        for frame in frames:
            found += [self.record.units[k] for k in range(at, frame.start) if k in present]
            found += self._pieces_of(frame, present)
            at = max(at, frame.stop)
        return [*found, *(self.record.units[k] for k in range(at, units.stop) if k in present)]

    def _pieces_of(self, frame: Frame, present: Collection[int]) -> Iterable[Piece]:
        """Return the pieces of a call, as far as its units are present; raise `CutError` if a cut goes through it."""
        units = range(frame.start, frame.stop)
        count = sum(k in present for k in units)
        if not count:
            return ()
        is_whole = self.whole.includes(frame)
        if count < len(units) and (frame.checkpoint or frame.stream or (is_whole and frame.sealed)):
            raise cut_error(frame, frame.sealed or "control flow on data", "crosses a cut")
        if self.whole.runs(frame) and count == len(units):
            return _between_ends(frame, (frame,)) if frame.stream else (frame,)
        if is_whole and frame.sealed and (obstacle := self.whole.obstacle(frame)) is not None:
            raise cut_error(frame, frame.sealed, obstacle)
        pieces = self._pieces(frame.inner, units, present)
        if frame.checkpoint:
            return (Checkpointed(frame, tuple(pieces)),)
        return _between_ends(frame, pieces) if frame.stream else pieces

    # ------------------------------------------------------------------------------------------------------ operations

    def _operation(self, piece: Piece, keyed: bool) -> Operation:
        """Return the operation of a piece; unless `keyed`, what is around it is seeded."""
        if isinstance(piece, Unit):
            return self._repeat(piece, keyed)
        if isinstance(piece, Frame):
            return self._call(piece, keyed)._replace(modes=piece.modes)
        if isinstance(piece, Checkpointed):
            calls = self._calls(piece)
            labels = self._checkpoint_labels(piece.frame) if keyed else None
            buffers = self._changed(calls.reads, self.record.rewriters)
            changed = self._changed(calls.reads, range(piece.frame.start, piece.frame.stop))
            operation = seed_once(checkpoint_calls(calls, piece.frame.how, buffers, changed), labels)
            return operation._replace(modes=piece.frame.modes)
        return Operation((), (), partial(piece.call, piece.frame), piece.frame.modes)

    def _repeat(self, unit: Unit, keyed: bool) -> Operation:
        """Return the operation that repeats one torch call."""
        facts = self.record.facts[unit]
        draws = self.record.draws_between(*facts.ticks) if keyed else {}
        labels = next((draw.labels for draw in draws.values() if draw.tick == facts.ticks[0]), None)
        operation = operation_of(unit, labels)._replace(modes=facts.modes)
        operation = answer_on_fakes(operation, self.record.answers_between(*facts.ticks))
        return operation if labels or not draws else key_draws(operation, draws, (), {}, unit.path)

    def _calls(self, piece: Checkpointed) -> Operation:
        """Return the calls of a checkpointed function as one operation, which makes what others use."""
        frame = piece.frame
        operations = [self._operation(one, keyed=False) for one in piece.pieces]
        inside = [operation._replace(modes=operation.modes.inside(frame.modes)) for operation in operations]
        return join(inside, self.usage.used_outside(frame))

    def _changed(self, values: Sequence[Value], positions: Iterable[int]) -> frozenset[Value]:
        """Return those of the values that are buffers, or views of them, that the units at `positions` change."""
        changed = frozenset[int]().union(*(self.record.rewriters.get(k, frozenset()) for k in positions))
        return frozenset(value for value in values if self.record.values.storage[value] in changed)

    def _rerun(self, frame: Frame) -> Operation:
        """Return the operation that reruns a checkpointed function, as its backward would, to update buffers."""
        pieces = self._pieces(frame.inner, range(frame.start, frame.stop), range(frame.start, frame.stop))
        calls = rerun_for_buffers(self._calls(Checkpointed(frame, tuple(pieces))))
        return seed_once(calls, self._checkpoint_labels(frame))._replace(modes=frame.modes)

    def _call(self, frame: Frame, keyed: bool) -> Operation:
        """Return the operation that makes a call as a whole."""
        frame = self._differentiable(frame) if frame.reentrant else frame
        operation = call_whole(frame, self.usage.outputs(frame))
        operation = answer_on_fakes(operation, self.record.answers_between(frame.first_tick, frame.last_tick))
        if frame.branching:
            operation = attach_outputs(frame, operation, self._parameters(frame))
        operation = drop_unread(operation, self.usage.read_in(frame), self.record.values.tensors)
        return self._key(frame, operation) if keyed else operation

    def _key(self, frame: Frame, operation: Operation) -> Operation:
        """Return the operation of a whole call with its random draws keyed."""
        if frame.stream:
            return operation
        if frame.checkpoint:
            return seed_once(operation, self._checkpoint_labels(frame))
        draws, inner = self.record.draws_between(frame.first_tick, frame.last_tick), stream_frames(frame.inner)
        if not draws and not inner:
            return operation
        counts = self.record.draw_counts(frame.first_tick, frame.last_tick)
        return key_draws(operation, draws, inner, counts, f"module {frame.path or '(root)'}")

    def _checkpoint_labels(self, frame: Frame) -> Labels | None:
        """Return the labels by which to seed a checkpointed function; `None` if it draws nothing.

        Inside a stream, return `None` unless the function is rerun to update buffers.
        """
        stream = self.record.draws.stream_at(frame.first_tick)
        if stream is None or frame.stream:
            draw = next(iter(self.record.draws_between(frame.first_tick, frame.last_tick).values()), None)
            return frame.stream or (None if draw is None else draw.labels)
        again = Labels(stream_label(str(stream.label), frame.start), stream.devices)
        return again if self.checkpoints.includes(frame) else None

    def _differentiable(self, frame: Frame) -> Frame:
        """Return a reentrant checkpoint as a frame that supports `torch.autograd.grad`."""
        seats = self._parameters(frame)
        invocation = copy(frame.invocation)
        invocation.function = Reentrant(
            modes=frame.modes.in_ambient.contexts,
            devices=self._devices(frame),
            parameters=lambda: [table[name] for table, name in seats],
        )
        return replace(frame, invocation=invocation)

    def _devices(self, frame: Frame) -> tuple[torch.device, ...]:
        """Return the devices on which a frame may draw; inside a stream, those of the stream."""
        stream = self.record.draws.stream_at(frame.first_tick)
        if stream is not None:
            return stream.devices
        draws = self.record.draws_between(frame.first_tick, frame.last_tick).values()
        return tuple(dict.fromkeys(device for draw in draws for device in draw.labels.devices))

    def _parameters(self, frame: Frame) -> list[Seat]:
        """Return a seat of each trainable parameter that a frame uses; others of its module may be absent."""
        used = self.usage.read_in(frame)
        return [self.seats[v][0] for v in used if v in self.seats and self.record.values.tensors[v].requires_grad]


def _between_ends(frame: Frame, pieces: Iterable[Piece]) -> Iterable[Piece]:
    return (StreamEnd(frame, begin_stream), *pieces, StreamEnd(frame, end_stream))


def _frames(pieces: Iterable[Piece]) -> Iterator[Frame]:
    """Yield the whole calls among pieces, including those in checkpointed functions, in order."""
    for piece in pieces:
        if isinstance(piece, Frame):
            yield piece
        elif isinstance(piece, Checkpointed):
            yield from _frames(piece.pieces)


def require_own_casts(record: Record, seats: Seats, present: Collection[int]) -> None:
    """Raise `CutError` if a weight is used both in these units and in others under one autocast.

    On one device, autocast casts it once and caches the result for all uses.
    """
    sides: dict[tuple[Value, int], set[bool]] = {}
    for k, unit in enumerate(record.units):
        region = record.facts[unit].modes.region
        for value in record.facts[unit].casts if region else ():
            sides.setdefault((value, region), set()).add(k in present)
    for value in (value for (value, _), inside in sides.items() if len(inside) > 1):
        if value in seats and record.values.tensors[value].requires_grad:
            raise CutError(
                f"module {record.units[min(present)].path or '(root)'}: got the weight {seats[value][0][1]!r} on both "
                "sides of a cut under one autocast, expected all of its uses in one stage, because autocast casts it "
                "once for all of them. Move the cut, or put autocast into the modules."
            )
