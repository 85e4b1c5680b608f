# SPDX-License-Identifier: Apache-2.0
"""A snapshot of the Python state around a model, so that a run on fake tensors leaves no trace.

Problem. A forward changes more than module attributes. On its first call it may install hooks and buffers, and fill
dicts and lists in modules, helper objects, closures and globals; in a capture, it fills them with fake tensors.

Idea. Walk everything that the model's code reaches: the tables of modules, the containers and objects in them, the
cells and defaults of functions (hooks and losses included), and the globals that those functions use. Record the
contents of each container, one level deep, so that they can be compared and restored.

Invariant: a container belongs to the model's copy if the copy reaches it without going through a function and the
original does not reach it. All others are `outside`: they belong to the user.

Runs when a plan is made; `restore_containers` and `restore_attributes` run in every step, `restore_model` in `verify`.
"""

from __future__ import annotations

import dis
import functools
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import is_not
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from fpipe.tensors.tree import PLAIN
from fpipe.torch_private import FakeTensor

NOT_SET = object()
LEAVES = (Tensor, *PLAIN, type(None), type, ModuleType, BuiltinFunctionType, CodeType)
LIBRARIES = frozenset({"builtins", "torch", "optree", "numpy", "logging", "threading", "_thread", "weakref", "inspect"})
"""Packages whose objects, other than modules, are not walked into: what they hold is not the model's."""
CACHED: Any = type(functools.lru_cache(id))
STORES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})


class AssignedGlobals(NamedTuple):
    """The globals that a function assigns to, as a container."""

    table: dict[str, Any]
    names: tuple[str, ...]


class ClassAttributes(NamedTuple):
    """Some attributes of a class, as a container."""

    kind: type
    names: tuple[str, ...]


class ContainerState(NamedTuple):
    """A container, its recorded contents, and whether it is outside the model's copy."""

    container: Any
    contents: tuple[Any, ...]
    outside: bool

    @property
    def has_changed(self) -> bool:
        """True if it no longer holds the recorded objects."""
        now = contents(self.container)
        return len(now) != len(self.contents) or any(map(is_not, now, self.contents))

    def restore(self) -> None:
        """Restore the recorded contents."""
        if self.has_changed:
            fill(self.container, self.contents)


@dataclass(frozen=True)
class Snapshot:
    """The containers that a model and its loss reach, and their contents, by the container's identity."""

    containers: Mapping[object, ContainerState]

    @classmethod
    def of(cls, copied: nn.Module, shared: Collection[object], *others: object) -> Snapshot:
        """Record the containers reached from a model's copy, from other roots, and through functions.

        `shared` are the keys of the containers that the original model reaches.
        """
        walk = Walk()
        walk.follow([copied])
        mine = walk.containers.keys() - shared
        walk.enter()
        walk.follow(others)
        return cls({key: ContainerState(one, contents(one), key not in mine) for key, one in walk.containers.items()})

    def restore(self) -> None:
        """Restore the recorded contents of all containers."""
        for one in self.containers.values():
            one.restore()


@contextmanager
def restore_containers(
    written: Sequence[ContainerState], tensors: Sequence[Tensor], inside: AbstractContextManager[None]
) -> Iterator[None]:
    """Enter `inside`, and restore these containers on exit.

    Those of the model's copy get their contents of the capture. Those `outside` get their contents on entry, but only
    if some of `tensors` are fake.
    """
    fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
    before = [one._replace(contents=contents(one.container)) if one.outside else one for one in written]
    try:
        with inside:
            yield
    finally:
        for one in before:
            if fake or not one.outside:
                one.restore()


@contextmanager
def restore_attributes(touched: Sequence[tuple[nn.Module, str]]) -> Iterator[None]:
    """Restore these module attributes on exit, so that every call finds the same and no tensor stays alive."""
    missing = object()
    before = [(vars(module), name, vars(module).get(name, missing)) for module, name in touched]
    try:
        yield
    finally:
        for table, name, old in before:
            if old is missing:
                table.pop(name, None)
            else:
                table[name] = old


@contextmanager
def restore_model(model: nn.Module) -> Iterator[None]:
    """On exit, restore all containers that a model reaches, including its modules' tables and attributes."""
    walk = Walk()
    walk.follow([model])
    before = [ContainerState(one, contents(one), True) for one in walk.containers.values()]
    try:
        yield
    finally:
        for one in before:
            one.restore()


class Walk:
    """A walk over objects that collects the `containers` they reach, by key, and the `functions`.

    It goes into functions only once `enter` has been called. Everything seen stays alive, so that ids stay unique.
    """

    def __init__(self) -> None:
        self.into = False
        self.seen: dict[int, Any] = {}
        self.containers: dict[object, Any] = {}
        self.functions: list[FunctionType] = []

    def follow(self, roots: Iterable[object]) -> None:
        """Walk from `roots`."""
        stack = list(roots)
        while stack:
            one = stack.pop()
            if isinstance(one, LEAVES) or id(one) in self.seen:
                continue
            self.seen[id(one)] = one
            if isinstance(one, FunctionType):
                self.functions.append(one)
                stack += self._inside(one) if self.into else []
                continue
            if isinstance(one, AssignedGlobals | ClassAttributes):
                self.containers[id(one[0]), one.names] = one
                continue
            if isinstance(one, (dict, list, set, deque, CellType, CACHED)):
                self.containers[id(one)] = one
            stack += children(one)

    def enter(self) -> None:
        """Go into the functions found so far, and into those found later."""
        self.into = True
        self.follow([one for function in list(self.functions) for one in self._inside(function)])

    def _inside(self, function: FunctionType) -> list[Any]:
        """Return what a function holds; record the globals that it assigns to."""
        names = AssignedGlobals(function.__globals__, assigned_globals(function.__code__))
        if names.names:
            self.containers[id(names.table), names.names] = names
        return children(function)


def children(one: Any) -> list[Any]:
    """Return the objects that an object holds; none for leaves and for objects of libraries."""
    if isinstance(one, dict):
        return list(dict.values(one))
    if isinstance(one, list | tuple | set | frozenset | deque | CellType):
        return list(contents(one))
    if isinstance(one, FunctionType):
        held = [*(one.__closure__ or ()), *(one.__defaults__ or ()), one.__kwdefaults__, vars(one)]
        return [*held, *globals_of(one)]
    if isinstance(one, MethodType):
        return [one.__self__, one.__func__]
    if isinstance(one, partial):
        return [one.func, one.args, one.keywords]
    if isinstance(one, nn.Module):
        return [vars(one), type(one).forward]
    opened = hasattr(one, "__dict__") and type(one).__module__.split(".")[0] not in LIBRARIES
    return [vars(one)] if opened else []


def globals_of(function: FunctionType) -> Iterator[Any]:
    """Yield the globals that a function may change: containers, and objects defined in the function's module."""
    for name in {name for code in codes(function.__code__) for name in code.co_names}:
        one = function.__globals__.get(name)
        defined = getattr(one if isinstance(one, FunctionType) else type(one), "__module__", None)
        if isinstance(one, dict | list | set | deque) or defined == function.__module__:
            yield one


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object, and those of the functions defined in it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from codes(one)


def assigned_globals(code: CodeType) -> tuple[str, ...]:
    """Return the names of the globals that code assigns to or deletes."""
    if not any(dis.opmap[name] in one.co_code[::2] for one in codes(code) for name in STORES):  # nearly always
        return ()
    steps = [step for one in codes(code) for step in dis.get_instructions(one) if step.opname in STORES]
    return tuple(sorted({str(step.argval) for step in steps}))


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


def fill(container: Any, parts: tuple[Any, ...]) -> None:
    """Replace the contents of a container with `parts`, as `contents` returns them; clear a cache."""
    if isinstance(container, AssignedGlobals):
        _assign(container.table, zip(container.names, parts, strict=True))
    elif isinstance(container, ClassAttributes):
        for name, value in zip(container.names, parts, strict=True):
            delattr(container.kind, name) if value is NOT_SET else setattr(container.kind, name, value)
    elif isinstance(container, dict):
        kept = dict(zip(parts[::2], parts[1::2], strict=True))
        _assign(container, [*kept.items(), *((key, NOT_SET) for key in dict.keys(container) if key not in kept)])
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), parts)
    elif isinstance(container, CACHED):
        container.cache_clear()
    elif isinstance(container, CellType):
        _refill(container, parts)
    else:
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(parts)


def _assign(table: dict[Any, Any], items: Iterable[tuple[Any, Any]]) -> None:
    kind = OrderedDict if isinstance(table, OrderedDict) else dict
    for key, value in list(items):
        if value is not NOT_SET:
            kind.__setitem__(table, key, value)
        elif dict.__contains__(table, key):
            kind.__delitem__(table, key)


def _refill(cell: CellType, parts: tuple[Any, ...]) -> None:
    if parts:
        (cell.cell_contents,) = parts
    else:
        del cell.cell_contents
