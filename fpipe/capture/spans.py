# SPDX-License-Identifier: Apache-2.0
"""The calls that a recorded run is in, and those that it has been in."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from fpipe.capture.generators import Generators
from fpipe.capture.guards import here, places
from fpipe.capture.tape import Attribute, Span
from fpipe.capture.values import Values


class Spans:
    """A stack of calls; `outermost` are those in no other one. What is in the modules `within` may depend on data.

    `generators` are looked at around each call, if there are any.
    """

    def __init__(self, model: nn.Module, within: Collection[str], generators: Generators | None = None) -> None:
        self.within = tuple(within)
        self.outermost: list[Span] = []
        self.stack: list[Span] = []
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.names = places(model)
        self.generators = generators

    def begin(self, span: Span) -> Span:
        """A call begins inside the innermost one."""
        (self.stack[-1].inner if self.stack else self.outermost).append(span)
        self.stack.append(span)
        return span

    @contextmanager
    def running(self, span: Span) -> Iterator[None]:
        """A call begins, and ends behind."""
        self._look()
        self.begin(span)
        try:
            yield
        finally:
            self._look()
            self.stack.pop()

    def _look(self) -> None:
        if self.generators is not None:
            self.generators.look(self.where)

    def seal(self, reason: str) -> None:
        """The innermost module that runs cannot be opened."""
        for span in reversed(self.stack):
            if not span.checkpoint:
                span.sealed = reason
                return

    def assigned(self, module: nn.Module, name: str, value: object, values: Values) -> None:
        """Note that an attribute was assigned to."""
        for span in self.stack:
            if (module, name) not in span.touched:
                span.touched.append((module, name))
            span.assigned = [one for one in span.assigned if (one.module, one.name) != (module, name)]
            if isinstance(value, Tensor) and id(value) in values.known:
                span.assigned.append(Attribute(module, name, values.known[id(value)]))

    @property
    def module(self) -> nn.Module | None:
        """The innermost module that runs; `None` in a loss that is none."""
        called = [span.invocation.function for span in reversed(self.stack)]
        return next((module for module in called if isinstance(module, nn.Module)), None)

    @property
    def opaque(self) -> bool:
        """Whether a module runs that never runs but as itself, whatever it does inside."""
        return any(map(self._is_within, self.stack))

    @property
    def innermost(self) -> list[Span]:
        """The call of the innermost module that runs, and checkpointed functions in it."""
        last = next((k for k, span in enumerate(reversed(self.stack)) if not span.checkpoint), 0)
        return self.stack[-last - 1 :]

    @property
    def outermost_branching(self) -> Span:
        """The outermost call of those that may branch on data, or that torch runs again and that hold such a one."""
        return next(span for span in self.stack if span.checkpoint or self._is_within(span))

    def _is_within(self, span: Span) -> bool:
        return any(f"{span.path}.".startswith(f"{name}.") for name in self.within)

    @property
    def path(self) -> str:
        """The innermost module that runs."""
        return self.stack[-1].path if self.stack else ""

    @property
    def where(self) -> str:
        """The same, for messages."""
        return f"module {self.path or '(root)'}"

    def here(self) -> str:
        """The innermost module in whose method the caller runs."""
        return here(self.names, self.where)
