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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, repeat
from operator import is_, itemgetter
from types import CodeType
from typing import Any, TypeAlias

from torch import Tensor, nn

from fpipe.errors import InputError
from fpipe.record.model.state import shared_attributes
from fpipe.record.model.walk import NOT_SET, is_users
from fpipe.record.reads.accesses import Accesses, Reach, Reads
from fpipe.record.reads.code_names import CodeNames, find_names
from fpipe.record.reads.expectations import Difference, Expectation, ExpectedContainer, ExpectedEntries, ExpectedValue
from fpipe.record.reads.namespaces import ModelState, ModuleState, Namespace, find_namespaces, gradient_flag
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


Lists: TypeAlias = tuple[list[Any], ...]

_flatten, _parts = chain.from_iterable, itemgetter("_modules", "_parameters", "_buffers")


@dataclass(frozen=True, eq=False)
class QuickCheck:
    """A comparison with lists that were collected when all module states held.

    - `modules`: weak references.
    - `empty`, `absent`: for each module, the names of attributes that were empty, or did not exist.
    - `tables`: the expected values of the other attributes, for modules that have any, with the module's position.
    - `lists`: the lists; `None` if there were no modules, or one no longer existed.
    """

    modules: Sequence[Callable[[], nn.Module | None]]
    empty: Sequence[tuple[str, ...]]
    absent: Sequence[tuple[str, ...]]
    tables: Sequence[tuple[int, ExpectedEntries]]
    lists: Lists | None = None

    @classmethod
    def of(cls, states: Sequence[ModuleState]) -> QuickCheck:
        """Return a check of the modules with these states, all of which must hold now."""
        known = [
            (k, state.attributes) for k, state in enumerate(states) if state.attributes.keys or state.attributes.inner
        ]
        check = cls(
            modules=[state.ref for state in states],
            empty=[state.attributes.empty for state in states],
            absent=[state.attributes.absent for state in states],
            tables=[(k, replace(table, empty=(), kinds=(), absent=())) for k, table in known],
        )
        return replace(check, lists=check._collect())

    def passes(self) -> bool:
        """Return whether all modules still exist and look the same."""
        return self.lists is not None and self.lists == self._collect()

    def _collect(self) -> Lists | None:
        """Return the lists as they are now; `None` if a module no longer exists or its attributes have changed."""
        modules = [ref() for ref in self.modules]
        kinds = [*map(type, modules)]
        if not modules or type(None) in kinds:
            return None
        attributes = [*map(vars, modules)]
        if not all(table.holds(attributes[k]) for k, table in self.tables):
            return None
        inside, parameters, buffers = zip(*map(_parts, attributes), strict=True)
        empty = [one.get(key) for one, keys in zip(attributes, self.empty, strict=True) for key in keys]
        exists = [key in one for one, keys in zip(attributes, self.absent, strict=True) for key in keys]
        children = [*_flatten(inside)], [*map(id, _flatten(map(dict.values, inside)))]
        return kinds, [*map(type, empty)], [*map(bool, empty)], exists, *children, *_tensor_lists(parameters, buffers)


def _tensor_lists(parameters: Sequence[dict[str, Tensor | None]], buffers: Sequence[dict[str, Tensor | None]]) -> Lists:
    """Return the names, ids and gradient flags of parameters, and the names of buffers and which of them are `None`."""
    found = [*_flatten(map(dict.values, parameters))]
    flags = [gradient_flag(p) for p in found if p is not None]
    missing = [(name, one is None) for table in buffers for name, one in table.items()]
    return [*_flatten(parameters)], [*map(id, found)], flags, missing


@dataclass(frozen=True, eq=False)
class QuickNamespaces:
    """A comparison of many namespaces in one sweep; all of the values must be the expected objects.

    - `now`: the functions that return the namespaces. `keys`: of plain values, for each. `values`: these, in one list.
    - `inner`: the expectations of the other values, with the position of the namespace and the key.
    """

    now: Sequence[Callable[[], Mapping[str, Any] | None]]
    keys: Sequence[tuple[Any, ...]]
    values: Sequence[Any]
    inner: Sequence[tuple[int, Any, Expectation]]

    @classmethod
    def of(cls, namespaces: Sequence[Namespace]) -> QuickNamespaces:
        """Return a check of these namespaces."""
        tables = [one.expected for one in namespaces]
        found = [(k, key, child) for k, table in enumerate(tables) for key, child in table.inner]
        found += [
            (k, key, ExpectedContainer.of(kind, {}, 0, None, 0))
            for k, table in enumerate(tables)
            for key, kind in zip(table.empty, table.kinds, strict=True)
        ]
        values = [*_flatten(table.values for table in tables)]
        return cls([one.now for one in namespaces], [table.keys for table in tables], values, found)

    def passes(self) -> bool:
        """Return whether all namespaces still exist and hold the same."""
        tables = [now() for now in self.now]
        known = [table for table in tables if table is not None]
        if len(known) < len(tables):
            return False
        missing = repeat(NOT_SET)
        now = [value for table, keys in zip(known, self.keys, strict=True) for value in map(table.get, keys, missing)]
        return all(map(is_, now, self.values)) and all(child.holds(known[k].get(key)) for k, key, child in self.inner)
