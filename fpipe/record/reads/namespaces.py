# SPDX-License-Identifier: Apache-2.0
"""The namespaces that code reads besides its arguments and the model: globals, closures, class attributes.

A step runs recorded calls, which do not read them again. So what code read is recorded here, and compared with the
current values before each step.

Runs when a plan is made, to find namespaces, and in every step, to compare them.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from fpipe.record.capture.eager_types import STAND_INS
from fpipe.record.capture.places import module_place
from fpipe.record.model.walk import is_users
from fpipe.record.reads.accesses import Accesses
from fpipe.record.reads.attribute_reads import Reads
from fpipe.record.reads.containers import Expectations, ExpectedContainer, ExpectedEntries, select_relevant
from fpipe.record.reads.expectation import Difference, Expectation, ExpectedValue, expect_object
from fpipe.record.reads.model_state import NOT_ATTRIBUTES
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
