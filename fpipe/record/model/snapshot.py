# SPDX-License-Identifier: Apache-2.0
"""A snapshot of the Python state around a model, so that a run on fake tensors leaves no trace.

Problem. A forward changes more than module attributes. On its first call it may install hooks and buffers, and fill
dicts and lists in modules, helper objects, closures and globals; in a capture, it fills them with fake tensors.

Idea. Walk everything that the model's code reaches: the tables of modules, the containers and objects in them, the
cells and defaults of functions (hooks and losses included), and the globals that those functions use. Record the
contents of each container, one level deep, so that they can be compared and restored.

A forward may also cache a mask or a table where no snapshot looks: with `functools.lru_cache`, in a dict of a class, or
in a global of another file. In a run on fake tensors, the cached tensor is fake, and the capture's next run, or later
the user's own code, finds it. Most models leave none, so the default front end searches for these *leftovers* only if a
run has failed: in the files that define the loss and the classes of the model's modules, or, if the run found a fake
tensor of an earlier run, in all files outside of libraries. What it finds is removed, and later runs restore those
containers. Front ends that make graphs search after every capture.

Invariant: a container belongs to the model's copy if the copy reaches it without going through a function and the
original does not reach it. All others are `outside`: they belong to the user.

Runs when a plan is made; `restore_containers` and `restore_attributes` run in every step, `restore_model` in `verify`.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_not
from types import CellType, FunctionType, ModuleType
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from fpipe.record.model.walk import (
    CACHED,
    NOT_SET,
    AssignedGlobals,
    ClassAttributes,
    Walk,
    contents,
    is_library,
    is_users,
)
from fpipe.tensors.torch_private import FakeTensor

CONTAINERS: Final = (dict, list, set, deque)
NOT_OPENED: Final = (type, ModuleType, FunctionType, Tensor, nn.Module)
CONTAINER_DEPTH: Final = 4
SET_BY_IMPORT: Final = frozenset({"__builtins__", "__loader__", "__spec__", "__path__"})
"""Globals that Python's import system sets in each file: no forward writes to what they hold, which is large."""


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

    @property
    def by_key(self) -> Mapping[object, Any]:
        """The recorded contents by key or position."""
        if isinstance(self.container, dict):
            return dict(zip(self.contents[::2], self.contents[1::2], strict=True))
        return dict(enumerate(self.contents))

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


def restore_attributes(touched: Iterable[tuple[nn.Module, str]]) -> AbstractContextManager[None]:
    """Restore these module attributes on exit, so that every call finds the same and no tensor stays alive."""
    return _restore([AssignedGlobals(vars(module), (name,)) for module, name in touched])


def restore_model(model: nn.Module) -> AbstractContextManager[None]:
    """On exit, restore all containers that a model reaches, including its modules' tables and attributes."""
    walk = Walk()
    walk.follow([model])
    return _restore(walk.containers.values())


@contextmanager
def _restore(containers: Iterable[Any]) -> Iterator[None]:
    before = [ContainerState(one, contents(one), True) for one in containers]
    try:
        yield
    finally:
        for one in before:
            one.restore()


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


# ---------------------------------------------------------------------------------------------------------- leftovers


def user_classes(model: nn.Module) -> set[type]:
    """Return the classes of a model's modules and their base classes, without those of libraries."""
    return {base for one in model.modules() for base in type(one).__mro__ if is_users(base)}


def defining_files(kinds: Iterable[type], loss: object) -> set[str]:
    """Return the names of the files that define these classes and the loss, without those of libraries."""
    found = {kind.__module__ for kind in kinds} | {str(getattr(loss, "__module__", "__main__"))}
    return {name for name in found if not is_library(name)}


def user_files() -> list[str]:
    """Return the names of all imported files outside of libraries."""
    return [name for name in list(sys.modules) if not is_library(name)]


def find_caches(*roots: object) -> list[Any]:
    """Return the `functools.lru_cache` functions that are reachable from these objects."""
    walk = Walk()
    walk.enter()
    walk.follow(roots)
    return [one for one in walk.containers.values() if isinstance(one, CACHED)]


def remove_fakes(files: Iterable[str], kinds: Iterable[type], others: Iterable[Any] = ()) -> list[Any]:
    """Remove fake tensors from containers in these files and classes, and from `others`; return those that held any."""
    searched = {id(one): one for one in (*_containers(files, kinds), *others)}  # many files import the same ones
    found = [one for one in searched.values() if _holds_fake(one)]
    for one in found:
        _empty(one)
    return found


def _containers(files: Iterable[str], kinds: Iterable[type]) -> Iterator[Any]:
    """Yield the containers in these files and classes that a forward may write to."""
    tables = [vars(file) for name in files if isinstance(file := sys.modules.get(name), ModuleType)]
    inside = [one for table in tables for one in list(table.values()) if isinstance(one, type)]
    for table in tables:
        for name, value in list(table.items()):
            if name not in SET_BY_IMPORT:
                yield from _written(value, AssignedGlobals(table, (name,)))
    names = {table.get("__name__") for table in tables}
    for kind in [*kinds, *[one for one in inside if one.__module__ in names]]:
        for name, value in list(vars(kind).items()):
            yield from _written(value, ClassAttributes(kind, (name,)))


def _written(value: Any, place: AssignedGlobals | ClassAttributes) -> Iterator[Any]:
    """Yield what a forward may have written of a global or a class attribute.

    That is a container; for a fake tensor, its `place`; and for a plain object, its `__dict__`.
    """
    value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    if type(value) is FakeTensor:
        yield place
    elif isinstance(value, (*CONTAINERS, CACHED)):
        yield value
    elif isinstance(value, threading.local) or vars(object)["__getattribute__"] is type(value).__getattribute__:
        held = getattr(value, "__dict__", None) if not isinstance(value, NOT_OPENED) else None
        yield from [held] if type(held) is dict else []


def _holds_fake(value: Any, depth: int = CONTAINER_DEPTH) -> bool:
    """Return whether a value is a fake tensor, or contains one at most `depth` containers deep."""
    if isinstance(value, FakeTensor | AssignedGlobals | ClassAttributes):
        return True
    if isinstance(value, CACHED):
        return any(_holds_fake(one, depth) for one in gc.get_referents(value))  # its keys, its results, or both
    if not depth or not isinstance(value, (*CONTAINERS, tuple)):
        return False
    return any(_holds_fake(one, depth - 1) for one in contents(value))


def _empty(container: Any) -> None:
    """Remove fake tensors from a container and those inside it; a fake global or class attribute becomes `None`."""
    if not isinstance(container, CONTAINERS):
        fill(container, (None,))
        return
    size = 2 if isinstance(container, dict) else 1
    parts = contents(container)
    entries = [parts[k : k + size] for k in range(0, len(parts), size)]
    for *_, value in entries:
        if isinstance(value, CONTAINERS):
            _empty(value)
    fill(
        container,
        tuple(chain(*[one for one in entries if isinstance(one[-1], CONTAINERS) or not _holds_fake(one[-1])])),
    )
