# SPDX-License-Identifier: Apache-2.0
"""Find what keeps a call from running as a whole.

A whole call gets its arguments, and the parameters and buffers put into its modules. It delivers what it returns, what
it assigns to attributes, and what modules inside it return. It must neither need nor deliver anything else.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections.abc import Collection

from fpipe.capture.trace.buffer_checkpoints import BufferCheckpoints
from fpipe.capture.trace.usage import Usage, has_reentrant
from fpipe.errors import CutError
from fpipe.ir.captured import Value
from fpipe.ir.tape import Frame, Tape


class Obstacles:
    """Finds what keeps calls of a tape from running as a whole; `sources` are the values that no unit makes."""

    def __init__(self, tape: Tape, usage: Usage, sources: Collection[Value], checkpoints: BufferCheckpoints) -> None:
        self.tape, self.usage, self.sources, self.checkpoints = tape, usage, sources, checkpoints

    def find(self, frame: Frame) -> str | None:
        """Return why a call cannot run as a whole, as the end of a sentence; `None` if it can."""
        return self._hidden_input(frame) or self._hidden_output(frame) or self._checkpoint_inside(frame)

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


def require_open(frame: Frame, obstacle: str | None) -> None:
    """Raise `CutError` if a frame that cannot be called as a whole cannot be opened either.

    `obstacle` is `None` if it could be called as a whole, but a cut goes through it.
    """
    if frame.sealed:
        raise cut_error(frame, frame.sealed, "crosses a cut" if obstacle is None else obstacle)


def cut_error(frame: Frame, content: str, obstacle: str) -> CutError:
    """Return the error for a call that can neither be opened, because of its `content`, nor run as a whole."""
    return CutError(
        f"module {frame.path or '(root)'}: got {content}, expected a call that can run as a whole, but this one "
        f"{obstacle}. Move the cut out of the module, pass what it uses as arguments, and return what others use."
    )
