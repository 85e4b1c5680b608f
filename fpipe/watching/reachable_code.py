# SPDX-License-Identifier: Apache-2.0
"""Find the users' code that some functions can reach, and the objects in its globals, closures and attributes.

Follow functions through the globals and variables that their bytecode names, and through the classes of the objects
there, but not into torch or the standard library. A value that code looks up by a computed name is missed.

Runs when a plan is made; `closure_variables` also runs in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from fpipe.watching.code_names import CodeNames
from fpipe.watching.entries import CLOSED_PACKAGES, MAX_DEPTH, MAX_SIZE, entries, has_entries
from fpipe.watching.expectation import COMPARABLE

MAX_OBJECTS = 2000
"""The limit on functions and objects; nothing beyond it is followed."""


class ReachableCode:
    """The code and objects that can be reached from the values in `roots`, some of which are functions.

    - `functions`, `classes`, `modules` (Python's), `objects`: each once.
    - `names`: the names in the code of all functions.
    """

    def __init__(self, roots: Iterable[Any], names_of: Callable[[CodeType], CodeNames]) -> None:
        self.names_of, self.names = names_of, CodeNames()
        self.functions: list[FunctionType] = []
        self.classes: list[type] = []
        self.modules: list[ModuleType] = []
        self.objects: list[Any] = []
        self.seen: dict[int, Any] = {}
        for root in roots:
            self._visit(root, MAX_DEPTH)
        count = -1
        while count != len(self.seen) < MAX_OBJECTS:  # new functions add names, which lead to new functions
            count = len(self.seen)
            holders: list[type | ModuleType] = [*self.classes, *self.modules]
            for holder in holders:
                self._visit_members(holder)

    def _visit_members(self, holder: type | ModuleType) -> None:
        bases = holder.__mro__ if isinstance(holder, type) else (holder,)
        for base in bases:
            for name, value in list(vars(base).items()):
                if name in self.names.attributes or name == "__call__":
                    self._visit(value, MAX_DEPTH)

    def _visit(self, value: Any, depth: int) -> None:
        if isinstance(value, (*COMPARABLE, Tensor, nn.Module)) or id(value) in self.seen or not depth:
            return
        if len(self.seen) >= MAX_OBJECTS:
            return
        self.seen[id(value)] = value
        for one in self._successors(value):
            self._visit(one, depth - 1 if has_entries(value) else MAX_DEPTH)

    def _successors(self, value: Any) -> Iterable[Any]:
        """Return the values that a value refers to; record the value if it is a user's."""
        if isinstance(value, MethodType):
            return value.__func__, value.__self__
        if isinstance(value, partial):
            return value.func, *value.args, *value.keywords.values()
        if isinstance(value, staticmethod | classmethod):
            return (value.__func__,)
        if isinstance(value, property):
            return (value.fget,)
        if isinstance(value, FunctionType):
            return self._function(value) if is_users(value) else ()
        if isinstance(value, type):
            self.classes += [value] if is_users(value) else []
            return ()
        if isinstance(value, ModuleType):
            self.modules += [value] if value.__name__.partition(".")[0] not in CLOSED_PACKAGES else []
            return ()
        if not has_entries(value):
            return ()
        self.objects.append(value)
        inside = entries(value)
        return type(value), *(inside.values() if len(inside) <= MAX_SIZE else ())

    def _function(self, function: FunctionType) -> list[Any]:
        self.functions.append(function)
        found = self.names_of(function.__code__)
        self.names |= found
        known = [function.__globals__[name] for name in found.outer if name in function.__globals__]
        return [*known, *closure_variables(function).values(), *(function.__defaults__ or ())]


def is_users(value: Any) -> bool:
    """Return whether a function or class is defined by a user or by a library of models."""
    return (getattr(value, "__module__", None) or "").partition(".")[0] not in CLOSED_PACKAGES


def closure_variables(function: FunctionType) -> dict[str, Any]:
    """Return the variables that a function closes over, by name, without those that are not set yet."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found
