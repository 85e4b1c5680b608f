# SPDX-License-Identifier: Apache-2.0
"""The calls that a recorded run is in, and those that have finished."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from fpipe.capture.generators import Generators
from fpipe.capture.guards import here, places
from fpipe.capture.trace.values import Values
from fpipe.ir.tape import Attribute, Span
from fpipe.tensors.settings import changed


class Spans:
    """A stack of calls; `outermost` are those not inside another. Modules in `within` may depend on data.

    If there are `generators`, they are checked around each call.
    """

    def __init__(self, model: nn.Module, within: Collection[str], generators: Generators | None = None) -> None:
        self.within = tuple(within)
        self.outermost: list[Span] = []
        self.stack: list[Span] = []
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.names = places(model)
        self.generators = generators

    def begin(self, span: Span) -> Span:
        """Begin a call inside the innermost one."""
        (self.stack[-1].inner if self.stack else self.outermost).append(span)
        self.stack.append(span)
        return span

    @contextmanager
    def running(self, span: Span) -> Iterator[None]:
        """Begin a call, and end it on exit."""
        self._look()
        self.notice()
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
        """Mark the innermost running module as one that cannot be opened."""
        for span in reversed(self.stack):
            if not span.checkpoint:
                span.sealed = reason
                return

    def notice(self) -> None:
        """Seal the innermost module if it has changed torch's settings since it was called."""
        names = changed(self.stack[-1].settings) if self.stack else ""
        if names:
            self.seal(f"a change of torch's settings ({names}) around what it calls")

    def assigned(self, module: nn.Module, name: str, value: object, values: Values) -> None:
        """Note an assignment to an attribute."""
        for span in self.stack:
            if (module, name) not in span.touched:
                span.touched.append((module, name))
            span.assigned = [one for one in span.assigned if (one.module, one.name) != (module, name)]
            if isinstance(value, Tensor) and id(value) in values.known:
                span.assigned.append(Attribute(module, name, values.known[id(value)]))

    @property
    def module(self) -> nn.Module | None:
        """The innermost running module; `None` inside a loss that is not a module."""
        called = [span.invocation.function for span in reversed(self.stack)]
        return next((module for module in called if isinstance(module, nn.Module)), None)

    @property
    def opaque(self) -> bool:
        """True if a module is running that always runs as is, whatever happens inside."""
        return any(map(self._is_within, self.stack))

    @property
    def innermost(self) -> list[Span]:
        """The call of the innermost running module, and checkpointed functions in it."""
        last = next((k for k, span in enumerate(reversed(self.stack)) if not span.checkpoint), 0)
        return self.stack[-last - 1 :]

    @property
    def outermost_branching(self) -> Span:
        """The outermost call that may branch on data, or checkpointed call that contains one."""
        return next(span for span in self.stack if span.checkpoint or self._is_within(span))

    def _is_within(self, span: Span) -> bool:
        return any(f"{span.path}.".startswith(f"{name}.") for name in self.within)

    @property
    def path(self) -> str:
        """The path of the innermost running module."""
        return self.stack[-1].path if self.stack else ""

    @property
    def where(self) -> str:
        """The innermost running module, for error messages."""
        return f"module {self.path or '(root)'}"

    def here(self) -> str:
        """Return the innermost module in whose method the caller runs."""
        return here(self.names, self.where)
