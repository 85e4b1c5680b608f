# SPDX-License-Identifier: Apache-2.0
"""Find which units of a tape make and use each value, and which values a call must deliver to later units.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import nn

from fpipe.record.captured import Value
from fpipe.record.trace.collected import InnerOutput
from fpipe.record.trace.keying import ModuleFrames
from fpipe.record.trace.tape import Frame, Tape
from fpipe.record.trace.whole_calls import Outputs


class Usage:
    """The units of a tape that make and use its values.

    `maker` is, by value, the position of the unit that makes it, `last_use` that of the last unit that reads it. The
    `results` leave the model, and count as read after the last unit.
    """

    def __init__(self, tape: Tape, results: Sequence[Value]) -> None:
        self.tape = tape
        self.maker = {value: k for k, unit in enumerate(tape.units) for value in unit.makes}
        self.last_use = {value: k for k, unit in enumerate(tape.units) for value in unit.reads}
        self.last_use.update(dict.fromkeys(results, len(tape.units)))

    def read_in(self, frame: Frame) -> dict[Value, None]:
        """Return the values read inside a frame, in order."""
        return dict.fromkeys(value for unit in self.tape.units[frame.start : frame.stop] for value in unit.reads)

    def is_made_in(self, frame: Frame, value: Value) -> bool:
        """Return whether a unit inside the frame makes a value."""
        return self.maker.get(value, -1) in range(frame.start, frame.stop)

    def used_outside(self, frame: Frame) -> tuple[Value, ...]:
        """Return the values made in a frame and read after it, in order."""
        made = dict.fromkeys(value for unit in self.tape.units[frame.start : frame.stop] for value in unit.makes)
        return tuple(value for value in made if self.last_use.get(value, 0) >= frame.stop)

    def outputs(self, frame: Frame) -> Outputs:
        """Return where a call delivers the values it makes: its result, attributes, or inner modules' results."""
        returned = {value: leaf for leaf, value in frame.returned.items() if self.is_made_in(frame, value)}
        assigned = {one.value: one for one in frame.assigned if self.is_made_in(frame, one.value)}
        assigned = {value: one for value, one in assigned.items() if value not in returned}
        return Outputs(returned, assigned, inner_outputs(frame, self._kept_inside(frame)))

    def lost(self, frame: Frame) -> list[Value]:
        """Return the values used outside of a frame that would be lost if it were called as a whole."""
        inside = self._kept_inside(frame)
        collected = inner_outputs(frame, inside)
        return [value for value in inside if value not in collected]

    def _kept_inside(self, frame: Frame) -> list[Value]:
        """Return the values made in a frame and used outside of it that it neither returns nor assigns."""
        reached = {*frame.returned.values(), *(attribute.value for attribute in frame.assigned)}
        return [value for value in self.used_outside(frame) if value not in reached]


def inner_outputs(frame: Frame, wanted: Collection[Value]) -> Mapping[Value, InnerOutput]:
    """Return where to collect those of the `wanted` values that modules inside a call return.

    Empty if the call is or contains a reentrant checkpoint, which computes them without a graph.
    """
    if not wanted or has_reentrant(frame):
        return {}
    found: dict[Value, InnerOutput] = {}
    count: Counter[nn.Module] = Counter()
    for one in _module_frames(frame):
        module = one.invocation.function
        assert isinstance(module, nn.Module), "the call of a module"
        for leaf, value in one.returned.items():
            if value in wanted and not (module._backward_hooks or module._backward_pre_hooks):
                found.setdefault(value, InnerOutput(one.path, module, count[module], leaf))
        count[module] += 1
    return found


def has_reentrant(frame: Frame) -> bool:
    """Return whether a frame is a reentrant checkpoint, or contains one."""
    return frame.reentrant or any(map(has_reentrant, frame.inner))


def _module_frames(frame: Frame) -> Iterator[Frame]:
    """Yield the module calls inside a frame, in the order in which they begin."""
    for one in frame.inner:
        if isinstance(one.invocation.function, nn.Module):
            yield one
        yield from _module_frames(one)


def stream_frames(frames: Sequence[Frame]) -> list[ModuleFrames]:
    """Return all calls in `frames`, outside of streams, of each module of which at least one call is a stream."""
    found = defaultdict[nn.Module, list[Frame | None]](list)

    for frame in _outside_streams(frames):
        function = frame.invocation.function
        if isinstance(function, nn.Module):
            found[function].append(None if frame.stream is None else frame)
    return [ModuleFrames(module, calls) for module, calls in found.items() if any(calls)]


def _outside_streams(frames: Sequence[Frame]) -> Iterator[Frame]:
    """Yield all frames that are in no stream, each before those inside it."""
    for frame in frames:
        yield frame
        if frame.stream is None:
            yield from _outside_streams(frame.inner)
