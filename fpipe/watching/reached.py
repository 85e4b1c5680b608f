# SPDX-License-Identifier: Apache-2.0
"""The user's code that can be reached from some functions, and the objects in its globals, closures and attributes.

Functions are followed through the globals and variables that their bytecode names, and through the classes of the
objects found there; code of torch and of the standard library is not. A value looked up by a computed name is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from fpipe.watching.handle import CLOSED, DEPTH, PLAIN, SIZE, contents, has_contents
from fpipe.watching.names import Names

LIMIT = 2000  # functions and objects; nothing beyond is followed


class Reached:
    """The code and objects that can be reached from the values in `roots`, functions among them.

    - `functions`, `classes`, `modules` (Python's), `objects`: each once. `names`: those in the code of all functions.
    """

    def __init__(self, roots: Iterable[Any], names_of: Callable[[CodeType], Names]) -> None:
        self.names_of, self.names = names_of, Names()
        self.functions: list[FunctionType] = []
        self.classes: list[type] = []
        self.modules: list[ModuleType] = []
        self.objects: list[Any] = []
        self.met: dict[int, Any] = {}
        for root in roots:
            self._visit(root, DEPTH)
        count = -1
        while count != len(self.met) < LIMIT:  # new functions bring new names, and those bring new functions
            count = len(self.met)
            holders: list[type | ModuleType] = [*self.classes, *self.modules]
            for holder in holders:
                self._named(holder)

    def _named(self, holder: type | ModuleType) -> None:
        bases = holder.__mro__ if isinstance(holder, type) else (holder,)
        for base in bases:
            for name, value in list(vars(base).items()):
                if name in self.names.attributes or name == "__call__":
                    self._visit(value, DEPTH)

    def _visit(self, value: Any, depth: int) -> None:
        if isinstance(value, (*PLAIN, Tensor, nn.Module)) or id(value) in self.met or not depth:
            return
        if len(self.met) >= LIMIT:
            return
        self.met[id(value)] = value
        for one in self._behind(value):
            self._visit(one, depth - 1 if has_contents(value) else DEPTH)

    def _behind(self, value: Any) -> Iterable[Any]:
        """Return the values that a value leads to, and record it if it is the user's."""
        if isinstance(value, MethodType):
            return value.__func__, value.__self__
        if isinstance(value, partial):
            return value.func, *value.args, *value.keywords.values()
        if isinstance(value, staticmethod | classmethod):
            return (value.__func__,)
        if isinstance(value, property):
            return (value.fget,)
        if isinstance(value, FunctionType):
            return self._function(value) if is_ours(value) else ()
        if isinstance(value, type):
            self.classes += [value] if is_ours(value) else []
            return ()
        if isinstance(value, ModuleType):
            self.modules += [value] if value.__name__.partition(".")[0] not in CLOSED else []
            return ()
        if not has_contents(value):
            return ()
        self.objects.append(value)
        inside = contents(value)
        return type(value), *(inside.values() if len(inside) <= SIZE else ())

    def _function(self, function: FunctionType) -> list[Any]:
        self.functions.append(function)
        found = self.names_of(function.__code__)
        self.names |= found
        known = [function.__globals__[name] for name in found.outer if name in function.__globals__]
        return [*known, *cells(function).values(), *(function.__defaults__ or ())]


def is_ours(value: Any) -> bool:
    """Return whether a function or class belongs to the user or to a library of models."""
    return (getattr(value, "__module__", None) or "").partition(".")[0] not in CLOSED


def cells(function: FunctionType) -> dict[str, Any]:
    """Return what a function closes over, by name, without variables that are not set yet."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found
