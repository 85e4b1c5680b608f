# SPDX-License-Identifier: Apache-2.0
"""Tensors that runs on fakes leave where a snapshot does not look: in caches of functions, classes and other files.

Problem. A forward may keep a mask or a table that it made: by `functools.lru_cache`, in a dict of a class, in a global
of another file. On fake tensors that is a fake, for the next run of a capture to find, and for the user after it.

Idea. Most models have none, so look for them only if a run has failed: in the files in which the classes of the model's
modules and the loss are defined, and in all files that are not of a library if the second run of a capture has found
such a fake. What is found is removed, and belongs to the state that later runs restore.
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

from fpipe.model.snapshot import CACHED, LIBRARIES, AssignedGlobals, ClassAttributes, Walk, contents
from fpipe.torch_private import FakeTensor

LIBRARY_PACKAGES: Final = LIBRARIES.union(
    sys.stdlib_module_names, ("fpipe", "schedules", "sympy", "pytest", "hypothesis")
) - {"__main__"}
CONTAINERS: Final = (dict, list, set, deque)
NOT_OPENED: Final = (type, ModuleType, FunctionType, Tensor, nn.Module)
CONTAINER_DEPTH: Final = 4


def remove_fakes(files: Iterable[str], kinds: Iterable[type], others: Iterable[Any] = ()) -> list[Any]:
    """Remove fake tensors from containers in these files, classes and others; return those that held some."""
    found = [one for one in (*_containers(files, kinds), *others) if _is_or_holds_fake(one)]
    for one in found:
        _empty(one)
    return found


def user_classes(model: nn.Module) -> set[type]:
    """Return the user's classes of which a model's modules are."""
    bases = {base for one in model.modules() for base in type(one).__mro__}
    return {kind for kind in bases if _is_open(kind.__module__)}


def defining_files(kinds: Iterable[type], loss: object) -> set[str]:
    """Return the names of the files in which classes and a loss are defined."""
    found = {kind.__module__ for kind in kinds} | {str(getattr(loss, "__module__", "__main__"))}
    return {name for name in found if _is_open(name)}


def user_files() -> list[str]:
    """Return the names of all files that are not of a library."""
    return [name for name in list(sys.modules) if _is_open(name)]


def find_caches(*roots: object) -> list[Any]:
    """Return the cached functions that objects reach."""
    walk = Walk()
    walk.enter()
    walk.follow(roots)
    return [one for one in walk.containers.values() if isinstance(one, CACHED)]


def _is_open(name: str) -> bool:
    return name.partition(".")[0] not in LIBRARY_PACKAGES


def _containers(files: Iterable[str], kinds: Iterable[type]) -> Iterator[Any]:
    """Yield containers that a forward may write to."""
    for module in [sys.modules.get(name) for name in files]:
        yield from _of_file(module) if isinstance(module, ModuleType) else ()
    for kind in kinds:
        yield from _of_class(kind)


def _of_file(module: ModuleType) -> Iterator[Any]:
    table = vars(module)
    for name, value in list(table.items()):
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
    """Yield what a global or a class attribute is, or holds in its attributes, if that is a container."""
    if isinstance(value, (*CONTAINERS, CACHED)):
        yield value
    elif isinstance(value, threading.local) or vars(object)["__getattribute__"] is type(value).__getattribute__:
        held = getattr(value, "__dict__", None) if not isinstance(value, NOT_OPENED) else None
        yield from [held] if type(held) is dict else []


def _is_or_holds_fake(value: Any, depth: int = CONTAINER_DEPTH) -> bool:
    """Return whether a value is, or has inside, a fake tensor."""
    if isinstance(value, FakeTensor | AssignedGlobals | ClassAttributes):
        return True
    if isinstance(value, CACHED):
        return any(_is_or_holds_fake(one, depth) for one in gc.get_referents(value))  # its keys, its results, or both
    if not depth or not isinstance(value, (*CONTAINERS, tuple)):
        return False
    return any(_is_or_holds_fake(one, depth - 1) for one in contents(value))


def _empty(container: Any) -> None:
    """Remove fake tensors from a container and from those inside it; a variable that is one becomes `None`."""
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
    """Empty a container of fakes; drop anything else that is a fake or has one inside."""
    if isinstance(value, CONTAINERS):
        _empty(value)
    elif _is_or_holds_fake(value):
        drop()
