# SPDX-License-Identifier: Apache-2.0
"""The calls in progress while a model is recorded: where it is, and what keeps a stage from beginning there.

Runs while a model is recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from fpipe.record.fakes.generators import Generators
from fpipe.record.model.places import current_place, places
from fpipe.record.trace.frames import PART, Attribute, Frame
from fpipe.record.trace.record import Values
from fpipe.tensors.settings import changes_since
from fpipe.tensors.torch_private import count_dispatch_modes


class CallStack:
    """The calls of a run.

    - `frames`: the calls in progress, outermost first. `roots`: all calls so far that are not inside another.
    - `within`: the names of modules in which control flow may depend on data.
    - `paths`: the path of each module, by `id`. `names`: what errors call it.
    - `generators`: checked around each call, if given.
    """

    def __init__(self, model: nn.Module, within: Collection[str], generators: Generators | None = None) -> None:
        self.within = tuple(within)
        self.roots: list[Frame] = []
        self.frames: list[Frame] = []
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.names = places(model)
        self.generators = generators

    def begin(self, frame: Frame) -> Frame:
        """Push a call, inside the innermost one."""
        (self.frames[-1].inner if self.frames else self.roots).append(frame)
        self.frames.append(frame)
        return frame

    @contextmanager
    def enter(self, frame: Frame) -> Iterator[None]:
        """Push a call, and pop it on exit."""
        self._look()
        self.check_settings()
        if not frame.checkpoint:  # one enters its own modes before the function is called
            self.check_modes()
        self.begin(frame)
        try:
            yield
        finally:
            self._look()
            self.frames.pop()

    def _look(self) -> None:
        if self.generators is not None:
            self.generators.look(self.where)

    def seal(self, reason: str) -> None:
        """Seal the innermost running module: it must run as a whole, for this reason if there is none yet."""
        for frame in reversed(self.frames):
            if not frame.checkpoint:
                frame.sealed = reason if frame.sealed in ("", PART) else frame.sealed
                return

    def check_settings(self) -> None:
        """Seal the innermost module if it has changed torch's settings since it was called."""
        names = changes_since(self.frames[-1].settings) if self.frames else ""
        if names:
            self.seal(f"a change of torch's settings ({names}) around what it calls")

    def check_modes(self) -> None:
        """Seal the innermost module if it has entered a dispatch mode, which sees what torch calls do."""
        if self.frames and count_dispatch_modes() != self.frames[-1].depth:
            self.seal("a dispatch mode around what it calls")

    def note_assignment(self, module: nn.Module, name: str, value: object, values: Values) -> None:
        """Record an assignment to an attribute in every call in progress."""
        for frame in self.frames:
            if (module, name) not in frame.touched:
                frame.touched.append((module, name))
            frame.assigned = [one for one in frame.assigned if (one.module, one.name) != (module, name)]
            if isinstance(value, Tensor) and id(value) in values.known:
                frame.assigned.append(Attribute(module, name, values.known[id(value)]))

    @property
    def module(self) -> nn.Module | None:
        """The innermost running module; `None` inside a loss that is not a module."""
        called = [frame.invocation.function for frame in reversed(self.frames)]
        return next((module for module in called if isinstance(module, nn.Module)), None)

    @property
    def is_opaque(self) -> bool:
        """True inside a module of `within`, which may branch on data because it is never cut."""
        return any(map(self._is_within, self.frames))

    @property
    def innermost(self) -> list[Frame]:
        """The call of the innermost running module, then the checkpointed functions running inside it."""
        last = next((k for k, frame in enumerate(reversed(self.frames)) if not frame.checkpoint), 0)
        return self.frames[-last - 1 :]

    @property
    def outermost_branching(self) -> Frame:
        """The outermost call in progress that may branch on data or is checkpointed."""
        return next(frame for frame in self.frames if frame.checkpoint or self._is_within(frame))

    def _is_within(self, frame: Frame) -> bool:
        return any(f"{frame.path}.".startswith(f"{name}.") for name in self.within)

    @property
    def path(self) -> str:
        """The path of the innermost running module."""
        return self.frames[-1].path if self.frames else ""

    @property
    def where(self) -> str:
        """The innermost running module, for error messages."""
        return f"module {self.path or '(root)'}"

    def here(self) -> str:
        """Return the innermost module that has a method running, for error messages."""
        return current_place(self.names, self.where)
