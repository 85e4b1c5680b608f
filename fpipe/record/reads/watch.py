# SPDX-License-Identifier: Apache-2.0
"""Check before each step that what a plan assumed at capture still holds.

A step uses the parameters and buffers that it is passed, and the batch with its numbers and flags. Everything else is a
snapshot: the model (its modules, their attributes and flags, which parameters are trained), and the globals, closures,
class attributes and helper objects that code reads, in forwards, losses, hooks and backwards alike. If any of it
changes, the next step raises an error.

Changes are not detected in values that code looks up by a computed name, in the state of iterators, generators and C
extensions, in the elements of large containers, in tensors that share memory with a constant, and in a model that no
longer exists. `fpipe.pipelines.recheck` finds those by capturing the model again.

Runs when a plan is made, to make a `Watch`, and in every step, to check it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType
from typing import Any

from fpipe.errors import InputError
from fpipe.record.capture.originals import shared_attributes
from fpipe.record.model.walk import is_users
from fpipe.record.reads.accesses import Accesses, Reach
from fpipe.record.reads.attribute_reads import Reads
from fpipe.record.reads.code_names import CodeNames, find_names
from fpipe.record.reads.containers import ExpectedEntries
from fpipe.record.reads.expectation import Difference, ExpectedValue
from fpipe.record.reads.model_state import ModelState, ModuleState
from fpipe.record.reads.namespaces import Namespace, find_namespaces
from fpipe.record.reads.quick_check import QuickCheck, QuickNamespaces
from fpipe.tensors.settings import captured_settings

MAX_SHOWN = 5
"""The number of differences that one error lists."""


@dataclass(frozen=True)
class Watch:
    """The expected states of the model's modules, its number of parameters, and what code reads outside of it."""

    modules: tuple[ModuleState, ...] = ()
    parameters: int = 0
    outside: tuple[Namespace, ...] = ()

    @classmethod
    def union(cls, watches: Iterable[Watch]) -> Watch:
        """Return the union of several, each module state once."""
        modules, outside, counts = dict[Any, ModuleState](), list[Namespace](), list[int]()
        for watch in watches:
            modules.update({state.key: state for state in watch.modules})
            outside += watch.outside
            counts.append(watch.parameters)
        return cls(tuple(modules.values()), max([0, *counts]), tuple(outside))

    def require_unchanged(self) -> None:
        """Raise `InputError`, naming modules and attributes, if anything has changed."""
        is_same = self._quick_check.passes() or self._holds()
        if is_same and (self._quick_namespaces.passes() or all(one.holds() for one in self.outside)):
            return
        inside = [one for state in self.modules for one in state.differences()]
        if not is_same and not inside:
            inside = [Difference("parameters", f"{len(self._parameters())} different ones", f"{self.parameters}")]
        if inside:
            _raise_changed(inside, "when the pipeline was built: it runs a copy of the model. Restore it")
        outside = list(dict.fromkeys(one for namespace in self.outside for one in namespace.differences()))
        if outside:
            _raise_changed(
                outside,
                "when it was captured: recorded code does not read it again. Restore it, pass it with the batch if it "
                "changes from step to step",
            )

    @cached_property
    def _quick_check(self) -> QuickCheck:
        """A check that the model looks as it did at the first step, if nothing had changed by then."""
        return QuickCheck.of(self.modules if self._holds() else ())

    @cached_property
    def _quick_namespaces(self) -> QuickNamespaces:
        """A check that the namespaces hold exactly the expected objects."""
        return QuickNamespaces.of(self.outside)

    def _holds(self) -> bool:
        """Return whether all modules that exist are unchanged and, if all exist, have as many parameters in total."""
        if not all(state.holds() for state in self.modules):
            return False
        return len(self._parameters()) == self.parameters or any(state.ref() is None for state in self.modules)

    def _parameters(self) -> set[int]:
        """Return the ids of the distinct parameters that exist now."""
        modules = [module for state in self.modules if (module := state.ref()) is not None]
        return {id(p) for module in modules for p in module._parameters.values() if p is not None}


def _raise_changed(found: Sequence[Difference], when: str) -> None:
    first, *others = found[:MAX_SHOWN]
    more = "".join(f"; {one.where}: got {one.got}, expected {one.expected}" for one in others)
    more += f"; and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
    raise InputError(
        f"{first.where}: got {first.got}, expected {first.expected}{more}, as {when}, or make a new pipeline with "
        "pipe.rebuilt(model)."
    )


@dataclass(frozen=True)
class Watcher:
    """A factory of watches for the model that a pipeline was built from, and its loss.

    `codes`: a cache of the names in code objects.
    """

    origin: ModelState
    loss: Any
    codes: dict[CodeType, CodeNames] = field(default_factory=dict)

    def shared_attributes(self) -> frozenset[str]:
        """Return the attributes of the model whose contents the loss reaches other than through the model."""
        model = self.origin.model
        return frozenset() if model is None else shared_attributes(model, self.loss)

    def watch(self, reads: Reads, training: bool) -> Watch:
        """Return the watch over what a capture with these `reads` assumed."""
        accesses = Accesses(Reach(self._roots(reads), self._names))
        losses = [] if self.loss is None else [self.loss]
        outside = find_namespaces(losses, reads, accesses)
        modules = self.origin.select(reads, accesses, training)
        return Watch(modules, self.origin.parameters, (*outside, _torch_settings()))

    def _roots(self, reads: Reads) -> Iterator[Any]:
        """Yield the model, the loss, and of each class of module the members that a capture read."""
        model = self.origin.model
        parameters = () if model is None else model.parameters()
        yield from (self.loss, model, *(hook for p in parameters for hook in (p._backward_hooks or {}).values()))
        for kind in {*reads.read, *(state.kind for state, _ in self.origin.modules.values())}:
            if is_users(kind):
                yield kind
                for base in kind.__mro__:
                    read = {*reads.read.get(kind, ()), "forward"} & vars(base).keys() if is_users(base) else set()
                    yield from [vars(base)[name] for name in read]

    def _names(self, code: CodeType) -> CodeNames:
        if code not in self.codes:
            self.codes[code] = find_names(code)
        return self.codes[code]


def _torch_settings() -> Namespace:
    """Return the namespace of torch's settings that must stay as they were at capture."""
    values = {name: ExpectedValue(value) for name, value in captured_settings().items()}
    return Namespace(captured_settings, ExpectedEntries.of(values, None, "{}"), "torch: ")
