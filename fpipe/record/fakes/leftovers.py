# SPDX-License-Identifier: Apache-2.0
"""Remove fake tensors that runs leave where a snapshot does not look: in function caches, classes and other files.

Problem. A forward may cache a mask or a table: with `functools.lru_cache`, in a dict of a class, or in a global of
another file. In a run on fake tensors, the cached tensor is fake, and the capture's next run, or later the user's own
code, finds it.

Idea. Most models leave none, so the default front end searches only if a run has failed: in the files that define the
loss and the classes of the model's modules, or, if the run found a fake tensor of an earlier run, in all files outside
of libraries. What it finds is removed, and later runs restore those containers. Front ends that make graphs search
after every capture.

Runs when a pipeline is built, and when a new kind of batch first comes.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any, Final

from torch import Tensor, nn

from fpipe.record.model.walk import CACHED, AssignedGlobals, ClassAttributes, Walk, contents, is_library
from fpipe.tensors.torch_private import FakeTensor

CONTAINERS: Final = (dict, list, set, deque)
NOT_OPENED: Final = (type, ModuleType, FunctionType, Tensor, nn.Module)
CONTAINER_DEPTH: Final = 4
SET_BY_IMPORT: Final = frozenset({"__builtins__", "__loader__", "__spec__", "__path__"})
"""Globals that Python's import system sets in each file: no forward writes to what they hold, which is large."""


def remove_fakes(files: Iterable[str], kinds: Iterable[type], others: Iterable[Any] = ()) -> list[Any]:
    """Remove fake tensors from containers in these files and classes, and from `others`; return those that held any."""
    searched = {id(one): one for one in (*_containers(files, kinds), *others)}  # many files import the same ones
    found = [one for one in searched.values() if _is_or_holds_fake(one)]
    for one in found:
        _empty(one)
    return found


def user_classes(model: nn.Module) -> set[type]:
    """Return the classes of a model's modules and their base classes, without those of libraries."""
    bases = {base for one in model.modules() for base in type(one).__mro__}
    return {kind for kind in bases if not is_library(kind.__module__)}


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


def _containers(files: Iterable[str], kinds: Iterable[type]) -> Iterator[Any]:
    """Yield the containers in these files and classes that a forward may write to."""
    for module in [sys.modules.get(name) for name in files]:
        yield from _of_file(module) if isinstance(module, ModuleType) else ()
    for kind in kinds:
        yield from _of_class(kind)


def _of_file(module: ModuleType) -> Iterator[Any]:
    table = vars(module)
    for name, value in list(table.items()):
        if name in SET_BY_IMPORT:
            continue
        if isinstance(value, type):
            yield from _of_class(value) if value.__module__ == module.__name__ else ()
        elif type(value) is FakeTensor:
            yield AssignedGlobals(table, (name,))
        else:
            yield from _inside(value)


def _of_class(kind: type) -> Iterator[Any]:
    for name, value in list(vars(kind).items()):
        if type(value) is FakeTensor:
            yield ClassAttributes(kind, (name,))
        else:
            yield from _inside(value.__func__ if isinstance(value, classmethod | staticmethod) else value)


def _inside(value: Any) -> Iterator[Any]:
    """Yield the value of a global or class attribute if it is a container; if it is a plain object, its `__dict__`."""
    if isinstance(value, (*CONTAINERS, CACHED)):
        yield value
    elif isinstance(value, threading.local) or vars(object)["__getattribute__"] is type(value).__getattribute__:
        held = getattr(value, "__dict__", None) if not isinstance(value, NOT_OPENED) else None
        yield from [held] if type(held) is dict else []


def _is_or_holds_fake(value: Any, depth: int = CONTAINER_DEPTH) -> bool:
    """Return whether a value is a fake tensor, or contains one at most `depth` containers deep."""
    if isinstance(value, FakeTensor | AssignedGlobals | ClassAttributes):
        return True
    if isinstance(value, CACHED):
        return any(_is_or_holds_fake(one, depth) for one in gc.get_referents(value))  # its keys, its results, or both
    if not depth or not isinstance(value, (*CONTAINERS, tuple)):
        return False
    return any(_is_or_holds_fake(one, depth - 1) for one in contents(value))


def _empty(container: Any) -> None:
    """Remove fake tensors from a container and those inside it; a fake global or class attribute becomes `None`."""
    if isinstance(container, AssignedGlobals):
        container.table.update(dict.fromkeys(container.names))
    elif isinstance(container, ClassAttributes):
        for name in container.names:
            setattr(container.kind, name, None)
    elif isinstance(container, CACHED):
        container.cache_clear()
    elif isinstance(container, dict):
        for key, value in list(dict.items(container)):
            _remove_value(value, lambda key=key: dict.pop(container, key))
    else:
        for value in list(container):
            _remove_value(value, lambda value=value: container.remove(value))


def _remove_value(value: Any, drop: Any) -> None:
    """Remove fake tensors from a container; call `drop` for another value that is or contains one."""
    if isinstance(value, CONTAINERS):
        _empty(value)
    elif _is_or_holds_fake(value):
        drop()
