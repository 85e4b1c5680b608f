# SPDX-License-Identifier: Apache-2.0
"""Find the calls that a step makes as Python, and what keeps a call from that.

Nearly all calls are *opened*: a step runs the torch calls that were recorded inside them. What must run as Python is a
call that branches on data, one whose Python does something that no list of torch calls does (a backward hook, a change
of torch's settings), and a reentrant checkpoint. If such a call needs tensors that only the call around it can provide,
that one runs as Python, too.

A whole call gets its arguments, and the parameters and buffers put into its modules. It delivers what it returns, what
it assigns to attributes, and what modules inside it return. It must neither need nor deliver anything else.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from torch import nn

from fpipe.errors import CutError
from fpipe.record.captured import Value
from fpipe.record.fakes.fast_paths import FUSED
from fpipe.record.trace.checkpoints import BufferCheckpoints
from fpipe.record.trace.draws import ModuleFrames
from fpipe.record.trace.frames import PART, Frame, all_frames
from fpipe.record.trace.record import Record
from fpipe.record.trace.whole_calls import InnerOutput, Outputs


class Usage:
    """The units of a record that make and use its values.

    `maker` is, by value, the position of the unit that makes it, `last_use` that of the last unit that reads it. The
    `results` leave the model, and count as read after the last unit.
    """

    def __init__(self, record: Record, results: Sequence[Value]) -> None:
        self.record = record
        self.maker = {value: k for k, unit in enumerate(record.units) for value in unit.makes}
        self.last_use = {value: k for k, unit in enumerate(record.units) for value in unit.reads}
        self.last_use.update(dict.fromkeys(results, len(record.units)))

    def read_in(self, frame: Frame) -> dict[Value, None]:
        """Return the values read inside a frame, in order."""
        return dict.fromkeys(value for unit in self.record.units_in(frame) for value in unit.reads)

    def is_made_in(self, frame: Frame, value: Value) -> bool:
        """Return whether a unit inside the frame makes a value."""
        return self.maker.get(value, -1) in range(frame.start, frame.stop)

    def used_outside(self, frame: Frame) -> tuple[Value, ...]:
        """Return the values made in a frame and read after it, in order."""
        made = dict.fromkeys(value for unit in self.record.units_in(frame) for value in unit.makes)
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
    for one in all_frames(frame.inner):
        module = one.invocation.function
        if not isinstance(module, nn.Module):
            continue
        for leaf, value in one.returned.items():
            if value in wanted and not (module._backward_hooks or module._backward_pre_hooks):
                found.setdefault(value, InnerOutput(one.path, module, count[module], leaf))
        count[module] += 1
    return found


def has_reentrant(frame: Frame) -> bool:
    """Return whether a frame is a reentrant checkpoint, or contains one."""
    return any(one.reentrant for one in all_frames([frame]))


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


class WholeCalls:
    """The calls of a record that run as Python."""

    def __init__(self, record: Record, usage: Usage, checkpoints: BufferCheckpoints) -> None:
        self.record, self.usage, self.checkpoints = record, usage, checkpoints
        self.sources = set(record.values.sources)
        self.obstacles: dict[Frame, str | None] = {}
        self.needed: dict[Frame, bool] = {}
        self.checkpointed = {
            inner for frame in all_frames(record.frames) if frame.checkpoint for inner in all_frames(frame.inner)
        }

    def includes(self, frame: Frame) -> bool:
        """Return whether a call must run as Python, or the one inside it that must cannot run without it."""
        return frame.stream is not None or self._must(frame)

    def _must(self, frame: Frame) -> bool:
        """Return whether a call cannot be opened, or one inside it that can't be opened needs it."""
        if frame not in self.needed:
            needs = any(self._must(one) and self.obstacle(one) is not None for one in frame.inner)
            self.needed[frame] = needs or frame.reentrant or (frame.sealed not in ("", PART) and not frame.checkpoint)
        return self.needed[frame]

    def seal(self, frame: Frame) -> str:
        """Return why no stage may begin inside a call; empty if one may."""
        return frame.sealed or self.reason(frame)

    def reason(self, frame: Frame) -> str:
        """Return why a step makes a call as Python; empty if it does not."""
        if not self.runs(frame):
            return ""
        return frame.sealed or ("control flow on data" if frame.stream else "a call inside it cannot run without it")

    def obstacle(self, frame: Frame) -> str | None:
        """Return why a call cannot run as a whole, as the end of a sentence; `None` if it can."""
        if frame not in self.obstacles:
            found = self._hidden_input(frame) or self._hidden_output(frame) or self._checkpoint_inside(frame)
            self.obstacles[frame] = found
        return self.obstacles[frame]

    def runs(self, frame: Frame) -> bool:
        """Return whether a step makes a call as Python, if it is not inside another such call."""
        return self.includes(frame) and self.obstacle(frame) is None

    def outermost(self, frames: Iterable[Frame]) -> Iterator[Frame]:
        """Yield the calls in `frames` that a step makes as Python, in order."""
        for frame in frames:
            yield from [frame] if self.runs(frame) else self.outermost(frame.inner)

    def is_checkpointed(self, frame: Frame) -> bool:
        """Return whether a call is inside a checkpointed function."""
        return frame in self.checkpointed

    def _hidden_input(self, frame: Frame) -> str | None:
        if frame.invocation.opaque:
            return f"gets an object in which tensors may hide ({frame.invocation.opaque})"
        given = {*frame.invocation.reads, *self.sources}
        for value in self.usage.read_in(frame):
            if value not in given and not self.usage.is_made_in(frame, value):
                return f"reads a tensor that is not an argument ({self._describe(value)})"
        return None

    def _hidden_output(self, frame: Frame) -> str | None:
        lost = self.usage.lost(frame)
        return f"makes a tensor that is used outside, but not returned ({self._describe(lost[0])})" if lost else None

    def _checkpoint_inside(self, frame: Frame) -> str | None:
        """Return why checkpointed functions inside cannot run as their author wrote them; `None` if they can."""
        if not frame.checkpoint and any(map(self._has_random_checkpoint, frame.inner)):
            return "draws random numbers in a checkpointed function"
        if self._takes_fast_path(frame) and self.record.draws_between(frame.first_tick, frame.last_tick):
            return "draws random numbers next to attention on torch's fast path"
        if any(map(self.checkpoints.has_any_in, frame.inner)):
            again = ", which another runs again" if frame.checkpoint else ""
            return f"changes a buffer in a checkpointed function{again}"
        if any(map(has_reentrant, frame.inner)):
            return "contains a reentrant checkpoint (use_reentrant=False has no such limit)"
        return None

    def _takes_fast_path(self, frame: Frame) -> bool:
        """Return whether attention inside takes its fast path, which it would not while random numbers are keyed."""
        ticks = (tick for function in FUSED for tick in self.record.ticks[function])
        return any(frame.first_tick <= tick < frame.last_tick for tick in ticks)

    def _has_random_checkpoint(self, frame: Frame) -> bool:
        return any(
            one.checkpoint and (one.stream or self.record.draws_between(one.first_tick, one.last_tick))
            for one in all_frames([frame])
        )

    def _describe(self, value: Value) -> str:
        """Describe a value by the torch call that makes it."""
        unit = self.record.units[self.usage.maker[value]]
        return f"made by {unit.does.split('[')[0]} in module {unit.path or '(root)'}"


def cut_error(frame: Frame, content: str, obstacle: str) -> CutError:
    """Return the error for a call that can neither be opened, because of its `content`, nor run as a whole."""
    return CutError(
        f"module {frame.path or '(root)'}: got {content}, expected a call that can run as a whole, but this one "
        f"{obstacle}. Move the cut out of the module, pass what it uses as arguments, and return what others use."
    )
