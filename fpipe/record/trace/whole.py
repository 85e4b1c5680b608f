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

from collections.abc import Collection, Iterable, Iterator

from fpipe.errors import CutError
from fpipe.record.captured import Value
from fpipe.record.trace.buffer_checkpoints import BufferCheckpoints
from fpipe.record.trace.tape import PART, Frame, Tape
from fpipe.record.trace.usage import Usage, has_reentrant


class WholeCalls:
    """The calls of a tape that run as Python; `sources` are the values that no unit makes."""

    def __init__(self, tape: Tape, usage: Usage, sources: Collection[Value], checkpoints: BufferCheckpoints) -> None:
        self.tape, self.usage, self.sources, self.checkpoints = tape, usage, sources, checkpoints
        self.obstacles: dict[Frame, str | None] = {}
        self.needed: dict[Frame, bool] = {}
        self.checkpointed = {inner for frame in _all_frames(tape.frames) if frame.checkpoint for inner in frame.inner}
        for frame in _all_frames(tape.frames):  # each before those inside it
            self.checkpointed.update(frame.inner if frame in self.checkpointed else ())

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
        if self._takes_fast_path(frame) and self.tape.draws_between(frame.first_tick, frame.last_tick):
            return "draws random numbers next to attention on torch's fast path"
        if any(map(self.checkpoints.has_any_in, frame.inner)):
            again = ", which another runs again" if frame.checkpoint else ""
            return f"changes a buffer in a checkpointed function{again}"
        if any(map(has_reentrant, frame.inner)):
            return "contains a reentrant checkpoint (use_reentrant=False has no such limit)"
        return None

    def _takes_fast_path(self, frame: Frame) -> bool:
        """Return whether attention inside takes its fast path, which it would not while random numbers are keyed."""
        return any(frame.first_tick <= tick < frame.last_tick for tick in self.tape.fused)

    def _has_random_checkpoint(self, frame: Frame) -> bool:
        if frame.checkpoint and (frame.stream or self.tape.draws_between(frame.first_tick, frame.last_tick)):
            return True
        return any(map(self._has_random_checkpoint, frame.inner))

    def _describe(self, value: Value) -> str:
        """Describe a value by the torch call that makes it."""
        unit = self.tape.units[self.usage.maker[value]]
        return f"made by {unit.does.split('[')[0]} in module {unit.path or '(root)'}"


def _all_frames(frames: Iterable[Frame]) -> Iterator[Frame]:
    """Yield all frames, each before the frames inside it."""
    for frame in frames:
        yield frame
        yield from _all_frames(frame.inner)


def cut_error(frame: Frame, content: str, obstacle: str) -> CutError:
    """Return the error for a call that can neither be opened, because of its `content`, nor run as a whole."""
    return CutError(
        f"module {frame.path or '(root)'}: got {content}, expected a call that can run as a whole, but this one "
        f"{obstacle}. Move the cut out of the module, pass what it uses as arguments, and return what others use."
    )
