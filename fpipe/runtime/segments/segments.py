# SPDX-License-Identifier: Apache-2.0
"""Play back a stretch of a tape: call modules that lie wholly inside as they are, the rest torch call by torch call.

The modules are those of a skeleton without tensors. The stage's parameters and buffers are put in place for the
duration of a call, by writing to the tables in which modules keep them, and removed afterwards.

Random numbers are drawn as if every torch call were played alone, and every call that branches on data as a whole (see
`fpipe.runtime.segments.keying`). A module around a checkpointed function that draws random numbers is never played
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from fpipe.errors import CutError, InputError
from fpipe.ir.captured import Function, Labels, Operation, Tensors, Unit, Value, compose, single
from fpipe.ir.modes import Modes, apply_modes, contexts
from fpipe.ir.tape import Frame, Tape, pick, require_constants
from fpipe.model.snapshot import ContainerState, restore_attributes, restore_containers
from fpipe.runtime.segments.answers import answering
from fpipe.runtime.segments.branching import attached
from fpipe.runtime.segments.collected import Inner, Noted, inner
from fpipe.runtime.segments.keying import bounds, calls, keyed, seeded, streaming
from fpipe.runtime.segments.reentrant import Reentrant
from fpipe.runtime.segments.rerun import Rewriting, once_more
from fpipe.tensors.random import stream_label

Seat: TypeAlias = tuple[dict[str, Any], str]
"""Where a module keeps a tensor: one of its tables, and the name there."""
Seats: TypeAlias = Mapping[Value, Sequence[Seat]]
Part: TypeAlias = Frame | Unit | tuple[Modes, Operation]
"""What is played: a frame called as is, a torch call, or a step run before or after others."""


class Rehearsed(NamedTuple):
    """The outcome of a rehearsal: the calls that differed and why, and the state that the calls changed."""

    differing: Mapping[Frame, str]
    changed: Sequence[ContainerState]


Rehearse: TypeAlias = Callable[[Sequence[Frame]], Rehearsed]


class Seated:
    """A context in which tensors are in their places; on exit, put back what was there before.

    `seats` are tables, names, and the key in `tensors` of what belongs there.
    """

    def __init__(
        self, seats: Sequence[tuple[dict[str, Any], str, int]], tensors: Sequence[Tensor] | Mapping[Value, Tensor]
    ) -> None:
        self.seats, self.tensors = seats, tensors

    def __enter__(self) -> None:
        seats, tensors = self.seats, self.tensors
        self.before = [table[name] for table, name, _ in seats]
        for table, name, k in seats:
            table[name] = tensors[k]

    def __exit__(self, *error: object) -> None:
        for (table, name, _), old in zip(self.seats, self.before, strict=True):
            table[name] = old


class SegmentBuilder:
    """Fuses stretches of a tape into functions.

    `needed` are the values that leave the model; `written` the containers that a run of it changes. `rehearsal` finds
    out what calls do without those of other stretches; `rehearsed` caches its results, by first and last position.
    """

    def __init__(
        self,
        tape: Tape,
        seats: Seats,
        sources: set[Value],
        needed: Sequence[Value],
        written: Sequence[ContainerState],
        rehearsal: Callable[[], AbstractContextManager[Rehearse]],
    ) -> None:
        self.tape, self.seats, self.sources, self.written = tape, seats, sources, written
        self.rehearsal, self.rehearsed = rehearsal, dict[tuple[int, int], Rehearsed]()
        self.rewriting = Rewriting(tape)
        self.position = {unit: k for k, unit in enumerate(tape.units)}
        self.maker = {value: k for k, unit in enumerate(tape.units) for value in unit.makes}
        self.last_use = {value: k for k, unit in enumerate(tape.units) for value in unit.reads}
        self.last_use.update(dict.fromkeys(needed, len(tape.units)))

    def fuse(
        self,
        units: Sequence[Unit],
        random_units: Mapping[Unit, Labels],
        inputs: tuple[Value, ...],
        outputs: tuple[Value, ...],
    ) -> Function:
        """Return a stretch of the tape as a function."""
        if not units:
            return Function(compose([], inputs, outputs))
        start, stop = self.position[units[0]], self.position[units[-1]] + 1
        again = [(frame.modes, self._again(frame)) for frame in self.rewriting.within(self.tape.frames, start, stop)]
        rehearsed = self.rehearse([(start, stop)])[0]
        operations = apply_modes([*self._steps(start, stop, rehearsed.differing), *again], outputs)
        run = compose(operations, inputs, outputs)
        written = [*{id(one.container): one for one in (*rehearsed.changed, *self.written)}.values()]
        seats = [(*seat, k) for k, value in enumerate(inputs) for seat in self.seats.get(value, ())]

        def placed(tensors: Tensors) -> AbstractContextManager[None]:
            seated = Seated(seats, tensors)
            return restore_containers(written, tensors, seated) if written else seated

        def played(key: int, *tensors: Tensor) -> Tensors:
            with placed(tensors):
                return run(key, *tensors)

        self._require_own_casts(start, stop)
        return Function(played, placed if self._runs_again(start, stop) else None)

    def _runs_again(self, start: int, stop: int) -> bool:
        """Return whether a backward may rerun something from unit `start` to `stop`, in some branch."""
        branching = any(frame.start < stop and start < frame.stop for frame in self.tape.streams)
        return branching or any(start <= position < stop for position in self.tape.hooked)

    def rehearse(self, stretches: Sequence[tuple[int, int]]) -> list[Rehearsed]:
        """Return, for each stretch of units, which calls must not be made as is, and what state the others change."""
        new = [stretch for stretch in stretches if stretch not in self.rehearsed]
        if new:
            with self.rehearsal() as rehearse:
                self.rehearsed.update({(start, stop): self._rehearsed(start, stop, rehearse) for start, stop in new})
        return [self.rehearsed[stretch] for stretch in stretches]

    def apart(self, positions: Sequence[int]) -> frozenset[Frame]:
        """Return the calls that could be made as is, but are not if the tape is cut before these units."""
        stretches = [*pairwise((0, *positions, len(self.tape.units)))]
        return frozenset(frame for found in self.rehearse(stretches) for frame in found.differing)

    def _rehearsed(self, start: int, stop: int, rehearse: Rehearse) -> Rehearsed:
        """Open calls that differ until none does; an opened call no longer changes state that others may use."""
        differing: dict[Frame, str] = {}
        while True:
            parts = [*self._parts(self.tape.frames, start, stop, differing)]
            whole = len(parts) == 1 and stop - start == len(self.tape.units)  # exactly as recorded
            found = rehearse([one for one in parts if isinstance(one, Frame) and not whole])
            if not found.differing:
                return found._replace(differing=differing)
            for frame, why in found.differing.items():
                differing[frame] = f"uses Python state that is another one in its stage ({why})"

    def _steps(self, start: int, stop: int, differing: Mapping[Frame, str]) -> Iterator[tuple[Modes, Operation]]:
        """Yield the steps from unit `start` to `stop`."""
        for one in self._parts(self.tape.frames, start, stop, differing):
            if isinstance(one, Frame):
                yield one.modes, self._whole(one)
            else:
                yield (self.tape.modes[one], self._unit(one)) if isinstance(one, Unit) else one

    def _parts(self, frames: Sequence[Frame], start: int, stop: int, differing: Mapping[Frame, str]) -> Iterator[Part]:
        """Yield whole frames where possible, their contents elsewhere."""
        at = start
        for frame in frames:
            first, last = max(frame.start, start), min(frame.stop, stop)
            if first >= last:
                continue
            yield from self.tape.units[at:first]
            obstacle = self.obstacle(frame) or differing.get(frame)
            if (first, last) == (frame.start, frame.stop) and obstacle is None:
                yield frame
            else:
                _require_open(frame, obstacle)
                yield from self._opened(frame, first, last, differing)
            at = last
        yield from self.tape.units[at:stop]

    def _opened(self, frame: Frame, start: int, stop: int, differing: Mapping[Frame, str]) -> Iterator[Part]:
        """Yield a frame's contents from unit `start` to `stop`; mark its ends if it draws from a stream."""
        if frame.stream is None:
            yield from self._parts(frame.inner, start, stop, differing)
            return
        if (start, stop) != (frame.start, frame.stop):
            raise _uncallable(frame, "control flow on data", "lies on both sides of a cut")
        first, last = bounds(frame)
        yield frame.modes, first
        yield from self._parts(frame.inner, start, stop, differing)
        yield frame.modes, last

    def _unit(self, unit: Unit) -> Operation:
        first, last = self.tape.ticks[unit]
        draws = self.tape.draws_between(first, last)
        labels = next((Labels(d.label, d.devices) for d in draws.values() if d.tick == first), None)
        operation = answering(single(unit, labels), self.tape.answers_between(first, last))
        return operation if labels or not draws else keyed(operation, draws, (), {}, unit.path)

    def obstacle(self, frame: Frame) -> str | None:
        """Return why a frame cannot be called from outside, or `None` if it can."""
        inside = range(frame.start, frame.stop)
        given = {*frame.invocation.reads, *self.sources}
        reached = {*frame.returned.values(), *(attribute.value for attribute in frame.assigned)}
        units = self.tape.units[frame.start : frame.stop]
        if frame.invocation.opaque:
            return f"gets an object in which tensors may hide ({frame.invocation.opaque})"
        foreign = [v for unit in units for v in unit.reads if v not in given and self.maker[v] not in inside]
        if foreign:
            return f"reads a tensor that is no argument ({self._said(foreign[0])})"
        lost = self._lost(frame, reached)
        if lost := [value for value in lost if value not in self._collected(frame, lost)]:
            return f"makes a tensor that is used outside, but not returned ({self._said(lost[0])})"
        if not frame.checkpoint and any(self._random_checkpoint(inner) for inner in frame.inner):
            return "draws random numbers in a checkpointed function"
        if self._fused(frame) and self.tape.draws_between(frame.first_tick, frame.last_tick):
            return "draws random numbers beside attention on torch's fast path"
        if any(map(self.rewriting.inside, frame.inner)):
            again = ", which another runs again" if frame.checkpoint else ""
            return f"changes a buffer in a checkpointed function{again}"
        if any(map(_is_reentrant, frame.inner)):
            return "holds a reentrant checkpoint, which use_reentrant=False changes"
        return None

    def _fused(self, frame: Frame) -> bool:
        """Return whether attention takes its fast path inside, which it does not while random numbers are keyed."""
        return any(frame.first_tick <= tick < frame.last_tick for tick in self.tape.fused)

    def _lost(self, frame: Frame, reached: Collection[Value]) -> list[Value]:
        """Return the values that a frame makes and others use, except those `reached` once it has returned."""
        made = [value for unit in self.tape.units[frame.start : frame.stop] for value in unit.makes]
        return [value for value in made if value not in reached and self.last_use.get(value, 0) >= frame.stop]

    def _collected(self, frame: Frame, lost: Collection[Value]) -> Mapping[Value, Inner]:
        """Return those of the `lost` values that inner modules return.

        None for a reentrant checkpoint, which computes them without gradients.
        """
        return {} if _is_reentrant(frame) else inner(frame, lost)

    def _said(self, value: Value) -> str:
        """Describe a value by the torch call that makes it."""
        unit = self.tape.units[self.maker[value]]
        return f"made by {unit.does.split('[')[0]} in module {unit.path or '(root)'}"

    def _random_checkpoint(self, frame: Frame) -> bool:
        if frame.checkpoint and (frame.stream or self.tape.draws_between(frame.first_tick, frame.last_tick)):
            return True
        return any(self._random_checkpoint(inner) for inner in frame.inner)

    def _whole(self, frame: Frame) -> Operation:
        """Return a frame as one step that calls it as is."""
        frame = self._differentiable(frame) if frame.reentrant else frame
        draws = self.tape.draws_between(frame.first_tick, frame.last_tick)
        inside = range(frame.start, frame.stop)
        new = {value: leaf for leaf, value in frame.returned.items() if self.maker.get(value) in inside}
        assigned = {one.value: one for one in frame.assigned if self.maker.get(one.value) in inside}
        assigned = {value: one for value, one in assigned.items() if value not in new}
        others = self._collected(frame, self._lost(frame, {*new, *assigned}))
        picks, where = tuple(new.values()), f"module {frame.path or '(root)'}"

        def simply(key: int, *tensors: Tensor) -> Tensors:
            return pick(frame.invocation(tensors), picks, where)

        def call(key: int, *tensors: Tensor) -> Tensors:
            with restore_attributes(frame.touched), Noted(tuple(others.values())) as noted:
                out = frame.invocation(tensors)
                require_constants(out, frame.constants, where)
                made = pick(out, picks, where)
                return *made, *[getattr(one.module, one.name) for one in assigned.values()], *noted.tensors

        simple = not (frame.touched or frame.constants or others)
        operation = Operation(frame.invocation.reads, (*new, *assigned, *others), simply if simple else call)
        operation = answering(operation, self.tape.answers_between(frame.first_tick, frame.last_tick))
        operation = self._with_ghosts(
            frame, _attached(frame, operation, self._parameters(frame)) if frame.branching else operation
        )
        if frame.stream:
            return streaming(operation, frame)
        if frame.checkpoint:
            return seeded(operation, self._seed(frame))
        within = calls(frame.inner)
        counts = self.tape.draw_counts(frame.first_tick, frame.last_tick)
        return keyed(operation, draws, within, counts, where) if draws or within else operation

    def _devices(self, frame: Frame) -> tuple[torch.device, ...]:
        """Return the devices on which a frame may draw, including a frame inside a stream."""
        stream = self.tape.stream_at(frame.first_tick)
        draws = self.tape.draws_between(frame.first_tick, frame.last_tick)
        return (
            stream.devices if stream else tuple(dict.fromkeys(one for draw in draws.values() for one in draw.devices))
        )

    def _again(self, frame: Frame) -> Operation:
        """Return a step that reruns a checkpointed function as its backward does, for the state it changes."""
        operation = answering(once_more(frame), self.tape.answers_between(frame.first_tick, frame.last_tick))
        return seeded(operation, self._seed(frame))

    def _seed(self, frame: Frame) -> Labels | None:
        """Return how to seed a checkpointed function.

        One inside a stream is not seeded, unless it must be run again later.
        """
        stream = self.tape.stream_at(frame.first_tick)
        if stream is None or frame.stream:
            draw = next(iter(self.tape.draws_between(frame.first_tick, frame.last_tick).values()), None)
            return frame.stream or (None if draw is None else Labels(draw.label, draw.devices))
        again = Labels(stream_label(str(stream.label), frame.start), stream.devices)
        return again if self.rewriting.of(frame) else None

    def _differentiable(self, frame: Frame) -> Frame:
        """Return a reentrant checkpoint as a frame that supports `torch.autograd.grad`."""
        seats = self._parameters(frame)
        how = Reentrant(
            modes=contexts(frame.modes._replace(grad=True)),
            devices=self._devices(frame),
            parameters=lambda: [table[name] for table, name in seats],
        )
        invocation = copy(frame.invocation)
        invocation.function = how
        return replace(frame, invocation=invocation)

    def _parameters(self, frame: Frame) -> list[Seat]:
        """Return the seats of the parameters that a frame may use; its module's others may be absent."""
        used = dict.fromkeys(value for unit in self.tape.units[frame.start : frame.stop] for value in unit.reads)
        return [self.seats[v][0] for v in used if v in self.seats and self.tape.fakes[v].requires_grad]

    def _require_own_casts(self, start: int, stop: int) -> None:
        """Raise `CutError` if a weight is used both inside and outside under one autocast, which would cast it once."""
        regions: dict[tuple[Value, int], set[bool]] = {}
        for k, unit in enumerate(self.tape.units):
            for value in self.tape.casts[unit] if self.tape.modes[unit].region else ():
                regions.setdefault((value, self.tape.modes[unit].region), set()).add(start <= k < stop)
        for value, _ in (where for where, inside in regions.items() if len(inside) > 1):
            if value in self.seats and self.tape.fakes[value].requires_grad:
                raise CutError(
                    f"module {self.tape.units[start].path or '(root)'}: got a {self.seats[value][0][1]!r} that is used "
                    "on both sides of a cut under one autocast, expected both uses in one stage: autocast casts a "
                    "weight once for all of its uses. Move the cut, or put autocast into the modules."
                )

    def _with_ghosts(self, frame: Frame, operation: Operation) -> Operation:
        """Return the step with only those arguments that are read; pass zeros without memory for the others.

        A value that is merely passed through, or not used at all, need not be sent to this stage.
        """
        used = {value for unit in self.tape.units[frame.start : frame.stop] for value in unit.reads}
        reads = tuple(value for value in operation.reads if value in used)
        if reads == operation.reads:
            return operation
        ghosts = {v: _ghost(self.tape.fakes[v]) for v in operation.reads if v not in used}

        def call(key: int, *tensors: Tensor) -> Tensors:
            values = ghosts | dict(zip(reads, tensors, strict=True))
            return operation.call(key, *[values[value] for value in operation.reads])

        return Operation(reads, operation.makes, call)


def _ghost(fake: Tensor) -> Tensor:
    """Return a real tensor of the same shape: code that checks for fake tensors must find none in a step."""
    return torch.zeros((), dtype=fake.dtype, device=fake.device).expand(fake.shape)


def _is_reentrant(frame: Frame) -> bool:
    return frame.reentrant or any(map(_is_reentrant, frame.inner))


def _require_open(frame: Frame, obstacle: str | None) -> None:
    if frame.sealed:
        raise _uncallable(frame, frame.sealed, "lies on both sides of a cut" if obstacle is None else obstacle)


def _uncallable(frame: Frame, what: str, why: str) -> CutError:
    return CutError(
        f"module {frame.path or '(root)'}: got {what} in a call that {why}, expected one that can be run as a whole. "
        "Move the cut out of it, pass what it uses as arguments, and return what others use."
    )


def _attached(frame: Frame, operation: Operation, parameters: Sequence[Seat]) -> Operation:
    module = frame.invocation.function  # a module, or the loss
    assigned = {(id(one.module._buffers), one.name) for one in frame.assigned}

    def call(key: int, *tensors: Tensor) -> Tensors:
        before = [*_buffers(module)]
        made = operation.call(key, *tensors)
        for table, name, tensor in before:
            if table.get(name) is not tensor and (id(table), name) not in assigned:
                raise InputError(
                    f"module {frame.path or '(root)'}: got an assignment to the buffer {name!r}, expected none, since "
                    "the branch taken at capture made none: it would be lost. Write copy_() instead."
                )
        return attached(made, (*tensors, *[table[name] for table, name in parameters]))

    return operation._replace(call=call)


def _buffers(module: object) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the buffers of a module and its submodules: the table, the name, and the tensor."""
    for one in module.modules() if isinstance(module, nn.Module) else ():
        yield from [(one._buffers, name, tensor) for name, tensor in one._buffers.items()]
