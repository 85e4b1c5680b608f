# SPDX-License-Identifier: Apache-2.0
"""Walk over what Python values hold, and what code reaches from them.

Problem. A model's Python state is scattered over modules, helper objects, containers, closures, globals and classes. To
restore it, to copy it, to compare it, and to know which code runs, the same graph is walked.

Idea. `held` returns what one value holds. `Walk` follows it and collects containers and functions: what a model may
change. `fpipe.record.reads.accesses.Reach`, a walk that also enters classes, finds what code may read.

Invariants. There is one list of packages that are not entered, `LIBRARIES`. Names looked up by a computed string
(`getattr(self, name)`) are missed.

Runs when a pipeline is built and when a plan is made; `entries` also runs in every step.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from numbers import Number
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from fpipe.tensors.tree import PLAIN

PLAIN_VALUES: Final = (*PLAIN, Number, type(None))
"""Types whose instances are compared by value and hold nothing."""
OPEN_MODULES: Final = frozenset({"__main__", "argparse", "types", "dataclasses", "collections"})
"""Modules of the standard library whose instances hold users' values."""
LIBRARIES: Final = frozenset(sys.stdlib_module_names - OPEN_MODULES) | {
    *(
        "torch",
        "numpy",
        "optree",
        "packaging",
        "sympy",
        "pytest",
        "_pytest",
        "pluggy",
        "hypothesis",
        "fpipe",
        "schedules",
    )
}
"""Packages whose code is not read, and whose objects, other than modules of torch, are not opened."""
MAPPINGS: Final = (dict, OrderedDict, defaultdict)
SEQUENCES: Final = (list, tuple, torch.Size, deque)
TRANSPARENT: Final = (dict, list, tuple, set, frozenset, deque, CellType, FunctionType, MethodType, partial)
MAX_SIZE: Final = 256
"""The number of entries up to which code is looked for in a container, and its entries are compared."""
CACHED: Final[Any] = type(functools.lru_cache(id))
STORES: Final = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
NOT_SET: Final = object()


class AssignedGlobals(NamedTuple):
    """The globals that a function assigns to, as a container."""

    table: dict[str, Any]
    names: tuple[str, ...]


class ClassAttributes(NamedTuple):
    """Some attributes of a class, as a container."""

    kind: type
    names: tuple[str, ...]


# ---------------------------------------------------------------------------------------------------------- one value


def is_library(name: str) -> bool:
    """Return whether a Python module of this name belongs to a package that is not entered."""
    return name.partition(".")[0] in LIBRARIES


def is_users(value: Any) -> bool:
    """Return whether a function or class is defined by a user or by a library of models."""
    return not is_library(getattr(value, "__module__", None) or "")


def is_container(kind: type) -> bool:
    """Return whether instances of a class have elements rather than attributes."""
    return kind in MAPPINGS or kind in SEQUENCES


def has_entries(value: Any) -> bool:
    """Return whether a value is a container, or an object with attributes and of a user's class."""
    kind = type(value)
    if is_container(kind):
        return True
    if isinstance(value, type | ModuleType | FunctionType) or not is_users(kind):
        return False
    return hasattr(value, "__dict__") or bool(_slot_names(kind))


def entries(value: Any) -> Mapping[Any, Any]:
    """Return the elements of a container by key or position, or the attributes of an object by name."""
    kind = type(value)
    if kind in MAPPINGS:
        mapping: Mapping[Any, Any] = value
        return mapping
    if kind in SEQUENCES:
        return dict(enumerate(value))
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    slots = _slot_names(kind)
    return {**attributes, **{name: getattr(value, name, None) for name in slots}} if slots else attributes


def _slot_names(kind: type) -> Sequence[str]:
    declared = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for slots in declared for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if not name.startswith("__")]


def contents(container: Any) -> tuple[Any, ...]:
    """Return a container's contents: for a dict, keys and values in turn; for a cache, how often it was filled."""
    if isinstance(container, dict):  # bypass a subclass's own items()
        return tuple(chain.from_iterable(dict.items(container)))
    if isinstance(container, AssignedGlobals | ClassAttributes):
        table = container.table if isinstance(container, AssignedGlobals) else vars(container.kind)
        return tuple([table.get(name, NOT_SET) for name in container.names])
    if isinstance(container, CACHED):
        return (container.cache_info().misses,)
    if isinstance(container, CellType):
        try:
            return (container.cell_contents,)
        except ValueError:
            return ()
    return tuple(container)


def held(one: Any) -> list[Any]:
    """Return the objects that an object holds; none for leaves and for objects of libraries."""
    kind = type(one)  # `isinstance` would read `__class__`, which a capture notes for modules
    if issubclass(kind, nn.Module):
        return [vars(one), kind.forward]
    if issubclass(kind, dict):
        return list(dict.values(one))
    if issubclass(kind, (list, tuple, set, frozenset, deque, CellType)):
        return list(contents(one))
    if issubclass(kind, FunctionType):
        return [*(one.__closure__ or ()), *(one.__defaults__ or ()), one.__kwdefaults__, vars(one)]
    if issubclass(kind, MethodType):
        return [one.__self__, one.__func__]
    if issubclass(kind, partial):
        return [one.func, one.args, one.keywords]
    if issubclass(kind, (staticmethod, classmethod)):
        return [one.__func__]
    if issubclass(kind, property):
        return [one.fget]
    if not has_entries(one):
        return []
    slots = [getattr(one, name, None) for name in _slot_names(type(one))]
    return [*([vars(one)] if hasattr(one, "__dict__") else []), *slots]


def visible(holder: Any) -> Iterator[Any]:
    """Yield an object and all that it holds through containers and functions, but not through other objects."""
    stack, seen = [holder], dict[int, Any]()
    while stack:
        one = stack.pop()
        if id(one) not in seen:
            seen[id(one)] = one
            yield one
            stack += held(one) if isinstance(one, TRANSPARENT) else ()


# --------------------------------------------------------------------------------------------------------------- code


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object, and those of the functions defined in it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from codes(one)


def code_names(function: FunctionType) -> set[str]:
    """Return the names of globals and attributes in a function's code, and in that of functions defined in it."""
    return {name for code in codes(function.__code__) for name in code.co_names}


def named_globals(function: FunctionType) -> dict[str, Any]:
    """Return the globals that a function's code names, and that exist, in the order of the code."""
    table = function.__globals__
    return {name: table[name] for code in codes(function.__code__) for name in code.co_names if name in table}


def assigned_globals(code: CodeType) -> tuple[str, ...]:
    """Return the names of the globals that code assigns to or deletes."""
    if not any(dis.opmap[name] in one.co_code[::2] for one in codes(code) for name in STORES):  # nearly always
        return ()
    steps = [step for one in codes(code) for step in dis.get_instructions(one) if step.opname in STORES]
    return tuple(sorted({str(step.argval) for step in steps}))


def _changeable_globals(function: FunctionType) -> Iterator[Any]:
    """Yield the globals that a function may change: containers, and objects defined in the function's module."""
    for one in named_globals(function).values():
        defined = getattr(one if isinstance(one, FunctionType) else type(one), "__module__", None)
        if isinstance(one, dict | list | set | deque) or defined == function.__module__:
            yield one


# -------------------------------------------------------------------------------------------------------------- walks


class Walk:
    """A walk over objects that collects the `containers` they hold, by key, and the `functions`.

    It goes into functions only once `enter` has been called. Everything seen stays alive, so that ids stay unique.
    """

    LEAVES: tuple[type, ...] = (Tensor, *PLAIN_VALUES, type, ModuleType, BuiltinFunctionType, CodeType)

    def __init__(self) -> None:
        self.into = False
        self.seen: dict[int, Any] = {}
        self.containers: dict[object, Any] = {}
        self.functions: list[FunctionType] = []
        self.are_leaves: dict[type, bool] = {}

    def follow(self, roots: Iterable[object]) -> None:
        """Walk from `roots`."""
        stack = list(roots)
        while stack:
            one = stack.pop()
            if id(one) in self.seen or self._is_leaf(type(one)):
                continue
            self.seen[id(one)] = one
            stack += self.visit(one)

    def _is_leaf(self, kind: type) -> bool:
        """Return whether objects of a class hold nothing; ask once for each class, since an abstract one is slow."""
        if kind not in self.are_leaves:
            self.are_leaves[kind] = issubclass(kind, self.LEAVES)
        return self.are_leaves[kind]

    def enter(self) -> None:
        """Go into the functions found so far, and into those found later."""
        self.into = True
        self.follow([one for function in list(self.functions) for one in self._inside(function)])

    def visit(self, one: Any) -> Iterable[Any]:
        """Record an object, and return the objects to visit next."""
        kind = type(one)
        if issubclass(kind, FunctionType):
            self.functions.append(one)
            return self._inside(one) if self.into else ()
        if issubclass(kind, (AssignedGlobals, ClassAttributes)):
            self.containers[id(one[0]), one.names] = one
            return ()
        if issubclass(kind, (dict, list, set, deque, CellType, CACHED)):
            self.containers[id(one)] = one
        return held(one)

    def _inside(self, function: FunctionType) -> list[Any]:
        """Return what a function holds; record the globals that it assigns to."""
        names = AssignedGlobals(function.__globals__, assigned_globals(function.__code__))
        if names.names:
            self.containers[id(names.table), names.names] = names
        return [*held(function), *_changeable_globals(function)]
