# SPDX-License-Identifier: Apache-2.0
"""The names that a capture read, and what they stood for: in modules, globals, closures, classes and the loss.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import getattr_static
from itertools import chain
from operator import itemgetter
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

from torch import nn

from fpipe.record.fakes.eager_types import STAND_INS
from fpipe.record.model.places import module_place
from fpipe.record.model.walk import NOT_SET, is_users
from fpipe.record.reads.accesses import Accesses, Reads
from fpipe.record.reads.code_names import find_names
from fpipe.record.reads.expectations import (
    Difference,
    Expectation,
    Expectations,
    ExpectedContainer,
    ExpectedEntries,
    ExpectedValue,
    Ref,
    expect_object,
    select_relevant,
)
from fpipe.tensors.settings import captured_settings
from fpipe.tensors.tree import closure_variables

IGNORED_TYPES: Final = (ModuleType, logging.Logger, logging.LoggerAdapter)
"""Types whose contents don't affect results."""
NOT_ATTRIBUTES: Final = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_compiled_call_impl")
MODULE_NAMES: Final = frozenset(dir(nn.Module)) - {"forward"}

_flatten, _TABLES_OF = chain.from_iterable, itemgetter("_modules", "_parameters", "_buffers")


class Namespace(NamedTuple):
    """An object whose names a capture read, and the expected values.

    - `where`: its name in errors, up to that of an entry.
    - `owner`: returns the object; `None` if it no longer exists. `kind`: its class.
    - `table`: returns the names and values of an owner.
    """

    where: str
    owner: Ref
    kind: type
    table: Callable[[Any], Mapping[str, Any]]
    expected: ExpectedEntries

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is unique among the namespaces of one model."""
        return self.where, *map(tuple, (self.expected.plain, self.expected.empty, self.expected.inner))

    def holds(self) -> bool:
        """Return whether the object, if it still exists, is unchanged."""
        owner = self.owner()
        return owner is None or (type(owner) is self.kind and self.expected.holds(self.table(owner)))

    def differences(self) -> Iterator[Difference]:
        """Yield what has changed."""
        owner = self.owner()
        if owner is None:
            return
        if type(owner) is not self.kind:
            yield Difference(self.where.partition(",")[0], type(owner).__name__, self.kind.__name__)
        yield from self.expected.differences(self.table(owner), self.where)


# ---------------------------------------------------------------------------------------------------------- the model


class ExpectedTable(NamedTuple):
    """The expected names in a module's table of parameters, buffers or submodules, and what counts of each entry.

    - `where`: the name of an entry in errors, up to its own.
    - `mark`: returns what counts of an entry. `text`: returns that as text.
    """

    where: str
    mark: Callable[[Any], Any]
    text: Callable[[Any], str]
    marks: Mapping[str, Any]
    texts: Mapping[str, str]

    @classmethod
    def of(
        cls, where: str, table: Mapping[str, Any], mark: Callable[[Any], Any], text: Callable[[Any], str]
    ) -> ExpectedTable:
        """Return the expectation that a table stays as it is."""
        marks = {name: mark(one) for name, one in table.items()}
        return cls(where, mark, text, marks, {name: text(one) for name, one in marks.items()})

    def holds(self, value: Mapping[str, Any]) -> bool:
        """Return whether the table has the same names and marks."""
        return self.marks == {name: self.mark(one) for name, one in value.items()}

    def differences(self, value: Mapping[str, Any], where: str) -> Iterator[Difference]:
        """Yield each entry that has changed; `where` is not used."""
        marks = {name: self.mark(one) for name, one in value.items()}
        for name in {**self.marks, **marks}:
            if marks.get(name, NOT_SET) != self.marks.get(name, NOT_SET):
                got, expected = self.text(marks[name]) if name in marks else "none", self.texts.get(name, "none")
                yield Difference(f"{self.where}{name!r}", f"another {got}" if got == expected else got, expected)


def _flag(parameter: Any) -> tuple[bool, int] | None:
    """Return whether a parameter requires a gradient, and the number of hooks on its gradient."""
    return None if parameter is None else (parameter.requires_grad, len(parameter._backward_hooks or ()))


def _flag_text(flag: tuple[bool, int] | None) -> str:
    if flag is None:
        return "none"
    return f"requires_grad={flag[0]}" + (f" and {flag[1]} hooks on its gradient" if flag[1] else "")


def _is_there(buffer: Any) -> bool:
    return buffer is not None


def _presence_text(there: bool) -> str:
    return "a tensor" if there else "None"


def _identity(module: nn.Module | None) -> Ref | None:
    return None if module is None else weakref.ref(module)


def _class_text(identity: Ref | None) -> str:
    return "none" if identity is None else type(identity()).__name__


MODULE_TABLES: Final = (
    ("_parameters", "parameter", _flag, _flag_text),
    ("_buffers", "buffer", _is_there, _presence_text),
    ("_modules", "submodule", _identity, _class_text),
)


class ModuleState(NamedTuple):
    """The state of one module: a weak reference to it, its class, its name in errors, its attributes and tables."""

    ref: Ref
    kind: type
    where: str
    attributes: Mapping[str, Expectation | None]
    tables: Mapping[str, ExpectedTable]

    def namespace(self, expected: Mapping[str, Expectation]) -> Namespace:
        """Return what is expected of some attributes of the module."""
        entries = ExpectedEntries.of(expected, "{!r}")
        return Namespace(f"{self.where}, attribute ", self.ref, self.kind, vars, entries)


@dataclass(frozen=True, eq=False)
class ModelState:
    """The states of a model's modules, by name; and the number of distinct parameters."""

    modules: Mapping[str, ModuleState]
    parameters: int

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """Return the current state of the modules of `model`."""
        expectations, found = Expectations(), {}
        for path, module in model.named_modules():
            held, where = vars(module), module_place(path, module)
            attributes = {n: None if n in NOT_ATTRIBUTES else expectations.expect(one) for n, one in held.items()}
            tables = {
                name: ExpectedTable.of(f"{where}, {what} ", held[name], *how) for name, what, *how in MODULE_TABLES
            }
            found[path] = ModuleState(weakref.ref(module), type(module), where, attributes, tables)
        return cls(found, len(list(model.parameters())))

    @property
    def model(self) -> nn.Module | None:
        """The model, if it still exists."""
        found: nn.Module | None = self.modules[""].ref()
        return found

    @property
    def places(self) -> dict[int, str]:
        """The names, for errors, of the modules that still exist, by id."""
        return {id(module): one.where for one in self.modules.values() if (module := one.ref()) is not None}

    def attributes(self, reads: Reads, accesses: Accesses, training: bool) -> tuple[Namespace, ...]:
        """Return the attributes that a capture or reached code reads of each module; in evaluation not `training`."""
        seen: set[int] = set()
        return tuple([self._read_of(path, reads, accesses, training, seen) for path in self.modules])

    def _read_of(self, path: str, reads: Reads, accesses: Accesses, training: bool, seen: set[int]) -> Namespace:
        state = self.modules[path]
        module, known = state.ref(), state.attributes
        names = {*reads.of(path, state.kind, known), *(() if module is None else accesses.of_module(module))}
        names -= {"training"} if not training else set()
        elsewhere = MODULE_NAMES.union(*(table.marks for table in state.tables.values()))
        absent = [n for n in names if n not in known and n not in elsewhere and not _is_cached(state.kind, n)]
        children = {name: child for name in names if (child := known.get(name)) is not None}
        relevant = select_relevant(children, accesses, seen) | dict.fromkeys(absent, ExpectedValue(NOT_SET))
        return state.namespace(relevant)

    def tables(self, reads: Reads, training: bool) -> tuple[Namespace, ...]:
        """Return the tables of each module, without those that it changes; in evaluation without gradient flags."""
        ignored = [{*(() if training else ["_parameters"]), *reads.written.get(path, ())} for path in self.modules]
        return tuple(
            [
                state.namespace({name: table for name, table in state.tables.items() if name not in left_out})
                for state, left_out in zip(self.modules.values(), ignored, strict=True)
            ]
        )


def read_tables(modules: Sequence[nn.Module]) -> tuple[list[Any], ...]:
    """Return what counts of the tables of all modules, in a few long lists, each filled in one sweep."""
    inside, parameters, buffers = zip(*map(_TABLES_OF, map(vars, modules)), strict=True)
    found = [*_flatten(map(dict.values, parameters))]
    return (
        [*map(type, modules), *map(len, (*inside, *parameters, *buffers)), *_flatten((*inside, *parameters, *buffers))],
        [*map(id, _flatten(map(dict.values, inside))), *map(id, found), *map(_flag, found)],
        [one is None for table in buffers for one in table.values()],
    )


def _is_cached(kind: type, name: str) -> bool:
    """Return whether an attribute is a `cached_property`, which exists only once it has been read."""
    return isinstance(getattr_static(kind, name, None), cached_property)


# ----------------------------------------------------------------------------------------------------- everything else


def torch_settings() -> Namespace:
    """Return the namespace of torch's settings that must stay as they were at capture."""
    values = {name: ExpectedValue(value) for name, value in captured_settings().items()}
    return Namespace("torch: ", captured_settings, dict, _itself, ExpectedEntries.of(values, "{}"))


class NamespaceFinder:
    """A search for the namespaces outside of the model that reached code reads, and for the part of each it reads."""

    def __init__(self, reads: Reads, accesses: Accesses) -> None:
        self.reads, self.accesses, self.reach = reads, accesses, accesses.reach
        self.expectations, self.seen = Expectations(), set[int]()

    def find(self, loss: Any) -> Iterator[Namespace]:
        """Yield all namespaces from which something is read, as they are now; those of the loss last."""
        for function in self.reach.functions:  # functions and classes in its closure are reached themselves
            variables = closure_variables(function)
            values = {name: one for name, one in variables.items() if not isinstance(one, FunctionType | type)}
            where = f"{function.__module__}.{function.__qualname__}, which closes over "
            # a weak reference: what it closes over may be the model
            yield from self._namespace(where, function, weakref.ref(function), closure_variables, values)
        for table, used in self._globals():
            values = {name: table[name] for name in sorted(used)}
            where = f"module {table.get('__name__')}, global "
            yield from self._namespace(where, table, partial(_itself, table), _itself, values)
        for owner, names in self._owners():
            values = {name: one for name, one in vars(owner).items() if name in names and not name.startswith("__")}
            where = f"{'class' if isinstance(owner, type) else 'module'} {owner.__name__}, attribute "
            yield from self._namespace(where, owner, partial(_itself, owner), vars, values)
        if isinstance(loss, nn.Module):
            for path, module in loss.named_modules(prefix="loss"):
                held = vars(module)
                read = {*self.reads.of(path, type(module), held), *self.accesses.of_module(module)}
                values = {name: held[name] for name in read & held.keys() if name not in NOT_ATTRIBUTES}
                where = f"{module_place(path[5:], module)} of the loss, attribute "
                yield from self._namespace(where, module, partial(_itself, module), vars, values)
        elif loss is not None and not isinstance(loss, FunctionType):
            yield from self._namespace("the ", {}, partial(dict, loss=loss), _itself, {"loss": loss})

    def _globals(self) -> Iterable[tuple[dict[str, Any], set[str]]]:
        """Return the tables of globals, each with the names that are read."""
        found: dict[int, tuple[dict[str, Any], set[str]]] = {}
        for function in self.reach.functions:
            table = function.__globals__
            names = find_names(function.__code__).outer & table.keys()
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

    def _namespace(
        self, where: str, owner: object, ref: Ref, table: Callable[[Any], Mapping[str, Any]], values: Mapping[str, Any]
    ) -> Iterator[Namespace]:
        """Yield a namespace with these `values` of `owner`, if any of them can be compared."""
        fixed = {name: one for name, one in values.items() if not self.accesses.is_assigned(owner, name)}
        children = {name: child for name, one in fixed.items() if (child := self._expect(one)) is not None}
        relevant = select_relevant(children, self.accesses, self.seen)
        expected = {n: c for n, c in relevant.items() if not isinstance(c, ExpectedContainer) or c.children}
        if expected:
            yield Namespace(where, ref, type(owner), table, ExpectedEntries.of(expected, "{!r}"))

    def _expect(self, value: Any) -> Expectation | None:
        """Return the expectation that a variable stays as it is; `None` if it can't or needn't be compared."""
        if any(value is stand_in for stand_in in STAND_INS):  # a capture is in progress
            return None
        is_code = isinstance(value, type) or (callable(value) and type(value).__module__ in ("builtins", "functools"))
        if is_code and isinstance(value, MethodType | partial):  # what they hold may be the model
            return expect_object(value)
        expectation = ExpectedValue(value) if is_code else self.expectations.expect(value)
        return None if isinstance(value, IGNORED_TYPES) else expectation


def _itself(one: Any) -> Any:
    return one
