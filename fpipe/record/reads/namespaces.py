# SPDX-License-Identifier: Apache-2.0
"""The state that a capture read: of the model that a pipeline was built from, and of globals, closures and classes.

Problem. A pipeline runs a copy of the model, and a step runs recorded calls, which read nothing again. A user who
freezes a parameter of the original, or changes a dropout rate or a global, expects the next step to reflect that.

Idea. When the pipeline is built, record every module's attributes, flags and submodules; when a plan is made, what its
code reads elsewhere. Before each step, compare what was read with the current values.

Invariant: modules, and the tensors and objects in them, are held by weak reference. Those that no longer exist are not
compared.

Runs when a pipeline is built or a plan is made, to record state, and in every step, to compare it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import getattr_static
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from fpipe.record.fakes.eager_types import STAND_INS
from fpipe.record.model.places import module_place
from fpipe.record.model.walk import is_users
from fpipe.record.reads.accesses import Accesses, Reads
from fpipe.record.reads.expectations import (
    Difference,
    Expectation,
    Expectations,
    ExpectedContainer,
    ExpectedEntries,
    ExpectedObject,
    ExpectedValue,
    expect_object,
    select_relevant,
)
from fpipe.tensors.closures import closure_variables

IGNORED_TYPES = (ModuleType, logging.Logger, logging.LoggerAdapter)
"""Types whose contents don't affect results."""


class Namespace(NamedTuple):
    """A namespace that code reads: a function that returns it, the expected entries, and its name in errors.

    The function returns `None` if the namespace no longer exists.
    """

    now: Callable[[], Mapping[str, Any] | None]
    expected: ExpectedEntries
    where: str

    def holds(self) -> bool:
        """Return whether it is unchanged."""
        found = self.now()
        return found is None or self.expected.holds(found)

    def differences(self) -> Iterator[Difference]:
        """Yield what has changed."""
        found = self.now()
        return iter(()) if found is None else self.expected.differences(found, self.where)


def find_namespaces(roots: Iterable[Any], reads: Reads, accesses: Accesses) -> tuple[Namespace, ...]:
    """Return the namespaces that reached code and the losses in `roots` read, as they are now."""
    return tuple(_NamespaceFinder(reads, accesses).find(roots))


class _NamespaceFinder:
    """A search for the namespaces that reached code reads, and for the part of each that it reads."""

    def __init__(self, reads: Reads, accesses: Accesses) -> None:
        self.reads, self.accesses, self.reach = reads, accesses, accesses.reach
        self.expectations, self.seen = Expectations(), set[int]()

    def find(self, roots: Iterable[Any]) -> Iterator[Namespace]:
        """Yield all namespaces from which something is read."""
        yield from self._closures()
        for table, used in self._globals():
            values = {name: table[name] for name in sorted(used)}
            yield from self._namespace(
                partial(_same_table, table), table, values, f"module {table.get('__name__')}, global "
            )
        for owner, names in self._owners():
            read = [name for name in vars(owner) if name in names and not name.startswith("__")]
            values = {name: vars(owner)[name] for name in read}
            kind = "class" if isinstance(owner, type) else "module"
            yield from self._namespace(partial(vars, owner), owner, values, f"{kind} {owner.__name__}, attribute ")
        for root in roots:
            yield from self._root(root)

    def _closures(self) -> Iterator[Namespace]:
        """Yield the closures of functions, without functions and classes in them, which are reached themselves."""
        for function in self.reach.functions:
            variables = closure_variables(function)
            values = {name: one for name, one in variables.items() if not isinstance(one, FunctionType | type)}
            where = f"{function.__module__}.{function.__qualname__}, which closes over "
            now = partial(_variables, weakref.ref(function))  # what it closes over may be the model
            yield from self._namespace(now, function, values, where)

    def _globals(self) -> Iterable[tuple[dict[str, Any], set[str]]]:
        """Return the tables of globals, each with the names that are read."""
        found: dict[int, tuple[dict[str, Any], set[str]]] = {}
        for function in self.reach.functions:
            table = function.__globals__
            names = self.reach.names_of(function.__code__).outer & table.keys()
            found.setdefault(id(table), (table, set()))[1].update(names)
        return found.values()

    def _owners(self) -> Iterable[tuple[type | ModuleType, set[str]]]:
        """Return classes and Python modules, each once, with the names that are read."""
        names = self.accesses.names.attributes
        found: dict[type | ModuleType, set[str]] = {file: {*names} for file in self.reach.files}
        for kind in self.reach.classes:
            for base in [base for base in kind.__mro__ if is_users(base)]:
                found.setdefault(base, {*names}).update(self.reads.read.get(kind, ()))
        return found.items()

    def _root(self, root: Any) -> Iterator[Namespace]:
        """Yield the namespaces of a loss that is a module or another object with attributes."""
        if isinstance(root, nn.Module):
            for path, module in root.named_modules(prefix="loss"):
                table = vars(module)
                read = {*self.reads.of(path, type(module), table), *self.accesses.of_module(module)}
                values = {name: table[name] for name in read & table.keys() if name not in NOT_ATTRIBUTES}
                where = f"{module_place(path[5:], module)} of the loss, attribute "
                yield from self._namespace(partial(vars, module), module, values, where)
        elif not isinstance(root, FunctionType):
            yield from self._namespace(partial(dict, loss=root), None, {"loss": root}, "the ")

    def _namespace(
        self, now: Callable[[], Mapping[str, Any] | None], owner: object, values: Mapping[str, Any], where: str
    ) -> Iterator[Namespace]:
        """Yield a namespace with these `values` of `owner`, if any of them can be compared."""
        fixed = {name: one for name, one in values.items() if not self.accesses.is_assigned(owner, name)}
        children = {name: child for name, one in fixed.items() if (child := self._expect(one)) is not None}
        relevant = select_relevant(children, self.accesses, self.seen)
        expected = {
            name: child
            for name, child in relevant.items()
            if not (isinstance(child, ExpectedContainer) and not child.children)
        }
        if expected:
            yield Namespace(now, ExpectedEntries.of(expected, None, "{!r}"), where)

    def _expect(self, value: Any) -> Expectation | None:
        """Return the expectation that a variable stays as it is; `None` if it can't or needn't be compared."""
        if any(value is stand_in for stand_in in STAND_INS):  # a capture is in progress
            return None
        is_code = isinstance(value, type) or (callable(value) and type(value).__module__ in ("builtins", "functools"))
        if is_code and isinstance(value, MethodType | partial):  # what they hold may be the model
            return expect_object(value)
        expectation = ExpectedValue(value) if is_code else self.expectations.expect(value)
        return None if isinstance(value, IGNORED_TYPES) else expectation


def _variables(function: Callable[[], FunctionType | None]) -> Mapping[str, Any] | None:
    """Return what a function closes over; `None` if it no longer exists."""
    alive = function()
    return None if alive is None else closure_variables(alive)


def _same_table(table: Mapping[str, Any]) -> Mapping[str, Any]:
    return table


NOT_ATTRIBUTES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_compiled_call_impl")
NO_MODULE = ExpectedObject(lambda: None, "none")
MODULE_NAMES = frozenset(dir(nn.Module)) - {"forward"}


@dataclass(frozen=True, eq=False)
class ModuleState:
    """The relevant state of one module.

    - `ref`: a weak reference to the module. `where`: its name in errors. `kind`: its class.
    - `attributes`: the attributes that the capture read.
    - `parameters`: by name, whether it requires a gradient and its number of hooks; `None` if irrelevant.
    - `buffers`: by name, whether it is a tensor rather than `None`; `None` if irrelevant.
    - `modules`: the submodules by name.
    """

    ref: Callable[[], nn.Module | None]
    where: str
    kind: type
    attributes: ExpectedEntries
    parameters: Mapping[str, tuple[bool, int] | None] | None
    buffers: Mapping[str, bool] | None
    modules: Mapping[str, ExpectedObject]

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is unique among the module states of one model."""
        table = self.attributes
        return self.where, table.keys, table.empty, tuple([key for key, _ in table.inner]), self.parameters is None

    def holds(self) -> bool:
        """Return whether the module, if it still exists, is unchanged."""
        module = self.ref()
        if module is None:
            return True
        table = vars(module)
        inside, parameters, buffers = table["_modules"], table["_parameters"], table["_buffers"]
        return (
            type(module) is self.kind
            and len(inside) == len(self.modules)
            and (not inside or all(map(is_, inside.values(), [one.ref() for one in self.modules.values()])))
            and self.attributes.holds(table)
            and (self.parameters is None or self.parameters == (parameters and gradient_flags(parameters)))
            and (self.buffers is None or self.buffers == (buffers and which_exist(buffers)))
        )

    def differences(self) -> Iterator[Difference]:
        """Yield what has changed."""
        module = self.ref()
        if module is None:
            return
        table = vars(module)
        if type(module) is not self.kind:
            yield Difference(self.where, type(module).__name__, self.kind.__name__)
        yield from self.attributes.differences(table, f"{self.where}, attribute ")
        if self.parameters is not None:
            found = gradient_flags(table["_parameters"])
            yield from self._differences_by_name("parameter", found, self.parameters, _flag_text)
        if self.buffers is not None:
            yield from self._differences_by_name("buffer", which_exist(table["_buffers"]), self.buffers, _presence_text)
        for name in {**self.modules, **table["_modules"]}:
            old, new = self.modules.get(name, NO_MODULE), table["_modules"].get(name)
            if old.ref() is not new or (name in self.modules) is not (name in table["_modules"]):
                got = "none" if new is None else f"another {type(new).__name__}"
                yield Difference(f"{self.where}, submodule {name!r}", got, old.text)

    def _differences_by_name(
        self, what: str, got: Mapping[str, Any], expected: Mapping[str, Any], said: Callable[[Any], str]
    ) -> Iterator[Difference]:
        for name in {**expected, **got}:
            if got.get(name) != expected.get(name):
                where = f"{self.where}, {what} {name!r}"
                yield Difference(where, said(got.get(name)), said(expected.get(name)))


def gradient_flags(parameters: Mapping[str, Any]) -> dict[str, tuple[bool, int] | None]:
    """Return the `gradient_flag` of each parameter, by name; `None` for one that is `None`."""
    return {name: None if p is None else gradient_flag(p) for name, p in parameters.items()}


def gradient_flag(parameter: Any) -> tuple[bool, int]:
    """Return whether a parameter requires a gradient, and the number of hooks on its gradient."""
    return parameter.requires_grad, len(parameter._backward_hooks or ())


def _flag_text(flag: tuple[bool, int] | None) -> str:
    if flag is None:
        return "none"
    return f"requires_grad={flag[0]}" + (f" and {flag[1]} hooks on its gradient" if flag[1] else "")


def which_exist(buffers: Mapping[str, Any]) -> dict[str, bool]:
    """Return whether each buffer is a tensor rather than `None`, by name."""
    return {name: one is not None for name, one in buffers.items()}


def _presence_text(there: bool | None) -> str:
    return "none" if there is None else "a tensor" if there else "None"


@dataclass(frozen=True, eq=False)
class ModelState:
    """The states of a model's modules, by name, each with all attributes; and the number of distinct parameters."""

    modules: Mapping[str, tuple[ModuleState, Mapping[str, Expectation | None]]]
    parameters: int

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """Return the current state of the modules of `model`."""
        expectations, found = Expectations(), {}
        for path, module in model.named_modules():
            table = vars(module)
            attributes = {n: None if n in NOT_ATTRIBUTES else expectations.expect(one) for n, one in table.items()}
            found[path] = _module_state(path, module), attributes
        return cls(found, len(list(model.parameters())))

    @property
    def model(self) -> nn.Module | None:
        """The model, if it still exists."""
        return self.modules[""][0].ref()

    @property
    def places(self) -> dict[int, str]:
        """The names, for errors, of the modules that still exist, by id."""
        found = ((state.ref(), state.where) for state, _ in self.modules.values())
        return {id(module): where for module, where in found if module is not None}

    def select(self, reads: Reads, accesses: Accesses, training: bool) -> tuple[ModuleState, ...]:
        """Return the states, reduced to what a capture or reached code reads.

        In evaluation, without training and gradient flags.
        """
        seen: set[int] = set()

        def select_read(path: str, state: ModuleState, known: Mapping[str, Expectation | None]) -> ModuleState:
            module = state.ref()
            names = {*reads.of(path, state.kind, known), *(() if module is None else accesses.of_module(module))}
            names -= {"training"} if not training else set()
            elsewhere = MODULE_NAMES | state.modules.keys() | {*(state.parameters or ()), *(state.buffers or ())}
            absent = [n for n in names if n not in known and n not in elsewhere and not _is_cached(state.kind, n)]
            children = {name: child for name in names if (child := known.get(name)) is not None}
            relevant = select_relevant(children, accesses, seen)
            return replace(
                state,
                attributes=ExpectedEntries.of(relevant, None, "{!r}", tuple(absent)),
                parameters=state.parameters if training else None,
                buffers=None if "_buffers" in reads.written.get(path, ()) else state.buffers,
            )

        return tuple(select_read(path, *one) for path, one in self.modules.items())


def _is_cached(kind: type, name: str) -> bool:
    """Return whether an attribute is a `cached_property`, which exists only once it has been read."""
    return isinstance(getattr_static(kind, name, None), cached_property)


def _module_state(path: str, module: nn.Module) -> ModuleState:
    table = vars(module)
    inside = table["_modules"]
    return ModuleState(
        ref=weakref.ref(module),
        where=module_place(path, module),
        kind=type(module),
        attributes=ExpectedEntries.of({}, None, "{!r}"),
        parameters=gradient_flags(table["_parameters"]),
        buffers=which_exist(table["_buffers"]),
        modules={
            n: NO_MODULE if m is None else ExpectedObject(weakref.ref(m), type(m).__name__) for n, m in inside.items()
        },
    )
