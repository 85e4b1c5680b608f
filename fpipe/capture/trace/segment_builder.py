# SPDX-License-Identifier: Apache-2.0
"""Build the function of a segment of a tape: whole module calls where possible, torch call by torch call elsewhere.

A call that falls entirely within a segment runs as its author wrote it, unless there is an obstacle, or it would do
something else without the Python state that calls of other segments leave. Such a call is opened: its contents run
instead.

Runs when a plan is made; the functions that it builds run in every step (`fpipe.runtime.segments`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import TypeAlias

from fpipe.capture.trace.buffer_checkpoints import BufferCheckpoints
from fpipe.capture.trace.obstacles import Obstacles, cut_error, require_open
from fpipe.capture.trace.operations import Operations, require_own_casts
from fpipe.capture.trace.rehearsal import Rehearse, Rehearsed
from fpipe.capture.trace.usage import Usage
from fpipe.ir.captured import Function, Labels, Operation, Unit, Value, compose
from fpipe.ir.modes import Modes, apply_modes
from fpipe.ir.tape import Frame, Tape
from fpipe.model.snapshot import ContainerState
from fpipe.runtime.segments.keying import stream_ends
from fpipe.runtime.segments.seats import Seats, seat_inputs

SegmentItem: TypeAlias = Frame | Unit | tuple[Modes, Operation]
"""One item of a segment: a whole call, a torch call, or an operation that begins or ends a stream."""
Segment: TypeAlias = tuple[int, int, frozenset[int]]
"""The positions of a segment's first unit and of the one after its last, and of those between that are left out."""


class SegmentBuilder:
    """Builds the functions of segments.

    - `results`: the values that leave the model. `written`: the containers that a run of the model changes.
    - `rehearsal`: makes calls again without those of other segments. `rehearsals`: the outcomes, by segment.
    """

    def __init__(
        self,
        tape: Tape,
        seats: Seats,
        sources: set[Value],
        results: Sequence[Value],
        written: Sequence[ContainerState],
        rehearsal: Callable[[], AbstractContextManager[Rehearse]],
    ) -> None:
        self.tape, self.seats, self.written = tape, seats, written
        self.rehearsal, self.rehearsals = rehearsal, dict[Segment, Rehearsed]()
        self.checkpoints, usage = BufferCheckpoints(tape), Usage(tape, results)
        self.obstacles = Obstacles(tape, usage, sources, self.checkpoints)
        self.operations = Operations(tape, usage, seats, self.checkpoints)
        self.position = {unit: k for k, unit in enumerate(tape.units)}

    def fuse(
        self,
        units: Sequence[Unit],
        random_units: Mapping[Unit, Labels],
        inputs: tuple[Value, ...],
        outputs: tuple[Value, ...],
    ) -> Function:
        """Return the function of a segment of the tape, in order; see `fpipe.ir.captured.Fuse`."""
        if not units:
            return Function(compose([], inputs, outputs))
        present = [self.position[unit] for unit in units]
        start, stop = present[0], present[-1] + 1
        segment = start, stop, frozenset(range(start, stop)).difference(present)
        rehearsed = self.rehearse([segment])[0]
        items = [*self._items(segment, rehearsed.differing), *self._reruns(start, stop)]
        run = compose(apply_modes(items, outputs), inputs, outputs)
        written = [*{id(one.container): one for one in (*rehearsed.changed, *self.written)}.values()]
        seats = [(*seat, k) for k, value in enumerate(inputs) for seat in self.seats.get(value, ())]
        require_own_casts(self.tape, self.seats, start, stop)
        return seat_inputs(run, seats, written, self._may_rerun(start, stop))

    def replay(
        self,
        units: Sequence[Unit],
        random_units: Mapping[Unit, Labels],
        inputs: tuple[Value, ...],
        outputs: tuple[Value, ...],
    ) -> Function:
        """Return a function that runs these units one by one, and no module; see `fpipe.ir.captured.Captured`."""
        items = [(self.tape.modes[unit], self.operations.of_unit(unit)) for unit in units]
        return Function(compose(apply_modes(items, outputs), inputs, outputs))

    def _may_rerun(self, start: int, stop: int) -> bool:
        """Return whether a backward may rerun something between units `start` and `stop`, in any branch."""
        branching = any(frame.start < stop and start < frame.stop for frame in self.tape.streams)
        return branching or any(start <= position < stop for position in self.tape.hooked)

    def _items(self, segment: Segment, differing: Mapping[Frame, str]) -> Iterator[tuple[Modes, Operation]]:
        """Yield the operations of a segment, each with the modes it runs under."""
        for piece in self._pieces(self.tape.frames, segment, differing):
            if isinstance(piece, Frame):
                yield piece.modes, self.operations.of_frame(piece)
            elif isinstance(piece, Unit):
                yield self.tape.modes[piece], self.operations.of_unit(piece)
            else:
                yield piece

    def _reruns(self, start: int, stop: int) -> Iterator[tuple[Modes, Operation]]:
        """Yield the reruns of checkpointed functions that change buffers, each with the modes it runs under."""
        for frame in self.checkpoints.in_backward_order(self.tape.frames, start, stop):
            yield frame.modes, self.operations.rerun(frame)

    # ---------------------------------------------------------------------------------------------------------- pieces

    def _pieces(
        self, frames: Sequence[Frame], segment: Segment, differing: Mapping[Frame, str]
    ) -> Iterator[SegmentItem]:
        """Yield the frames to call as a whole, the contents of the others, and the units between them, in order."""
        start, stop, absent = segment
        at = start
        for frame in frames:
            first, last = max(frame.start, start), min(frame.stop, stop)
            if first >= last:
                continue
            yield from self._units(at, first, absent)
            at = last
            obstacle = self.obstacles.find(frame) or differing.get(frame)
            if (
                (first, last) == (frame.start, frame.stop)
                and obstacle is None
                and absent.isdisjoint(range(first, last))
            ):
                yield frame
            elif not absent.issuperset(range(first, last)):
                require_open(frame, obstacle)
                yield from self._contents(frame, (first, last, absent), differing)
        yield from self._units(at, stop, absent)

    def _units(self, start: int, stop: int, absent: frozenset[int]) -> Iterator[Unit]:
        return (self.tape.units[k] for k in range(start, stop) if k not in absent)

    def _contents(self, frame: Frame, segment: Segment, differing: Mapping[Frame, str]) -> Iterator[SegmentItem]:
        """Yield the part of a frame that is in a segment, between the ends of its stream if it draws from one."""
        inside = self._pieces(frame.inner, segment, differing)
        if frame.stream is None:
            yield from inside
            return
        if segment[:2] != (frame.start, frame.stop):
            raise cut_error(frame, "control flow on data", "crosses a cut")
        first, last = stream_ends(frame)
        yield frame.modes, first
        yield from inside
        yield frame.modes, last

    # ------------------------------------------------------------------------------------------------------- rehearsals

    def rehearse(self, segments: Sequence[Segment]) -> list[Rehearsed]:
        """Return, for each segment, which calls must not run as a whole, and what state the others change; cached."""
        new = [segment for segment in segments if segment not in self.rehearsals]
        if new:
            with self.rehearsal() as rehearse:
                self.rehearsals.update({segment: self._open_differing(segment, rehearse) for segment in new})
        return [self.rehearsals[segment] for segment in segments]

    def differing_frames(self, positions: Sequence[int]) -> frozenset[Frame]:
        """Return the calls that could run as a whole, but differ if the tape is cut before these units."""
        ends = pairwise((0, *positions, len(self.tape.units)))
        segments = [(start, stop, frozenset[int]()) for start, stop in ends]
        return frozenset(frame for rehearsed in self.rehearse(segments) for frame in rehearsed.differing)

    def _open_differing(self, segment: Segment, rehearse: Rehearse) -> Rehearsed:
        """Open calls that differ until none does: an opened call no longer changes state that others use."""
        differing: dict[Frame, str] = {}
        while True:
            pieces = [*self._pieces(self.tape.frames, segment, differing)]
            as_recorded = len(pieces) == 1 and segment == (0, len(self.tape.units), frozenset())
            rehearsed = rehearse([one for one in pieces if isinstance(one, Frame) and not as_recorded])
            if not rehearsed.differing:
                return rehearsed._replace(differing=differing)
            for frame, difference in rehearsed.differing.items():
                differing[frame] = f"finds other Python state in its stage ({difference})"
