# SPDX-License-Identifier: Apache-2.0
"""Replace functions of torch, for one thread.

Problem. A capture must see and answer calls for which torch has no hook, so it replaces functions at their one place in
torch. All threads share that place, and a new batch shape is captured in the middle of training: a data loader's thread
that calls `torch.manual_seed` at that moment must get torch's own function.

Idea. Put a switch there, which calls the calling thread's newest replacement, or the original if the thread has none.
Nothing else in fpipe replaces functions of torch.

Invariants. A thread sees its own replacements, and so do the threads in which torch runs a backward for it; no other
thread does. When the last replacement of a place ends, in whichever thread, the original is put back.

Runs when a model is captured, once per kind of batch, and when its sizes are measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import getattr_static
from threading import RLock, get_ident
from types import FrameType, ModuleType
from typing import Any, Final

from fpipe.tensors.torch_private import get_thread_local, has_thread_local, set_thread_local

OWNER: Final = "fpipe: the thread that captures"
"""The key of a thread-local number that torch passes to the threads in which it runs a backward."""
MISSING: Final = object()
"""A placeholder for a name that its place does not have."""
CLASS_METHODS: Final = (classmethod, type(vars(dict)["fromkeys"]))
"""Class methods, written in Python or in C."""


class ByThread:
    """A stack of values for each thread; a thread of the autograd engine sees that of the thread it works for."""

    def __init__(self) -> None:
        self.stacks: dict[int, list[Any]] = {}

    def newest(self, otherwise: Any) -> Any:
        """Return the newest value of the calling thread, or `otherwise` if it has none."""
        stack = self.stacks.get(get_ident())
        if stack is None and has_thread_local(OWNER):
            stack = self.stacks.get(get_thread_local(OWNER))
        return stack[-1] if stack else otherwise

    def push(self, value: Any) -> int:
        """Push a value for the calling thread; return the thread's id, which `pop` needs."""
        thread = get_ident()
        set_thread_local(OWNER, thread)
        self.stacks.setdefault(thread, []).append(value)
        return thread

    def pop(self, thread: int) -> None:
        """Remove the newest value of a thread."""
        self.stacks[thread].pop()
        if not self.stacks[thread]:
            del self.stacks[thread]


class _Switch(ByThread):
    """The function at a place while any thread replaces it."""

    def __init__(self, owner: Any, name: str) -> None:
        super().__init__()
        self.owner, self.name = owner, name
        self.before = vars(owner).get(name, MISSING)
        self.is_class_method = isinstance(getattr_static(owner, name, None), CLASS_METHODS)
        self.is_property = isinstance(self.before, property)
        self.original = _callable(owner, name, self.before)

    def install(self) -> None:
        """Put the switch in its place."""
        newest, original, stacks = self.newest, self.original, self.stacks

        def switch(*args: Any, **kwargs: Any) -> Any:
            stack = stacks.get(get_ident())  # a capture comes here for each attribute of a module that is read
            return (stack[-1] if stack else newest(original))(*args, **kwargs)

        kind = classmethod if self.is_class_method else property if self.is_property else None
        setattr(self.owner, self.name, switch if kind is None else kind(switch))

    def remove(self) -> None:
        """Put the original back."""
        if self.before is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


class _ValueSwitch(_Switch):
    """A switch for a module's attribute that is not called: `__getattr__` looks it up for every thread."""

    def install(self) -> None:
        """Remove the attribute from the module, and return it from the module's `__getattr__` instead."""

        def missing(name: str) -> Any:
            if name == self.name:
                return self.newest(self.before)
            raise AttributeError(f"module {self.owner.__name__!r} has no attribute {name!r}")

        self.owner.__getattr__ = missing
        delattr(self.owner, self.name)

    def remove(self) -> None:
        """Put the attribute back."""
        setattr(self.owner, self.name, self.before)
        del self.owner.__getattr__


# The only mutable state in fpipe's modules: the current replacements, which belong to the process.
_SWITCHES: dict[tuple[int, str], _Switch] = {}
_SHARED: dict[str, _Shared] = {}
_LOCK = RLock()


@contextmanager
def replace(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Inside, call `replacement` wherever this thread calls the function `name` of a class or module.

    A replacement of a class method gets the class as its first argument, one of a property the instance.
    """
    with _replace(_Switch, owner, name, replacement):
        yield


@contextmanager
def replace_value(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """Inside, return `value` when this thread looks up an attribute of a module; imports look it up, too."""
    with _replace(_ValueSwitch, module, name, value):
        yield


@contextmanager
def _replace(kind: type[_Switch], owner: Any, name: str, value: Any) -> Iterator[None]:
    place = id(owner), name
    with _LOCK:
        switch = _SWITCHES.get(place)
        if switch is None:
            switch = _SWITCHES[place] = kind(owner, name)
            switch.install()
        thread = switch.push(value)
    try:
        yield
    finally:
        with _LOCK:
            switch.pop(thread)
            if not switch.stacks:
                del _SWITCHES[place]
                switch.remove()


@dataclass
class _Shared:
    """A name that `count` contexts set: by id, each namespace in which they do, and what was there before."""

    before: dict[int, tuple[dict[str, Any], Any]] = field(default_factory=dict)
    count: int = 0


@contextmanager
def share(spaces: Iterable[dict[str, Any]], name: str, value: Any) -> Iterator[None]:
    """Inside, set the global `name` of modules to `value`, given their namespaces.

    No hook sees how functions look up their globals, so every thread finds the value, which must itself check which
    thread uses it (see `ByThread`). All namespaces keep it until the last context for `name` ends.
    """
    with _LOCK:
        shared = _SHARED.setdefault(name, _Shared())
        shared.count += 1
        for space in spaces:  # thousands, several times per pipeline
            shared.before.setdefault(id(space), (space, space.get(name, MISSING)))
            space[name] = value
    try:
        yield
    finally:
        with _LOCK:
            shared.count -= 1
            if not shared.count:
                del _SHARED[name]
                _unshare(shared, name)


def _unshare(shared: _Shared, name: str) -> None:
    for space, before in shared.before.values():
        if before is MISSING:
            space.pop(name, None)
        else:
            space[name] = before


def current(owner: Any, name: str) -> Any:
    """Return the function that a call from this thread would reach; a new replacement calls it in turn.

    A class method takes the class as its first argument.
    """
    switch = _SWITCHES.get((id(owner), name))
    return _callable(owner, name, vars(owner).get(name, MISSING)) if switch is None else switch.newest(switch.original)


def original(owner: Any, name: str) -> Any:
    """Return what a place holds or inherits if nothing is replaced, as it is stored: a `classmethod`, say."""
    switch = _SWITCHES.get((id(owner), name))
    if switch is None or switch.before is MISSING:
        owners = owner.__mro__[switch is not None :] if isinstance(owner, type) else (owner,)
        return next((vars(one)[name] for one in owners if name in vars(one)), MISSING)
    return switch.before


def caller() -> FrameType:
    """Return the frame that called the replaced function; the replacement must call this."""
    frame: Any = sys._getframe(2)
    while frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    found: FrameType = frame
    return found


def _callable(owner: Any, name: str, before: Any) -> Any:
    """Return the function to call for threads that replace nothing; a class may inherit it."""
    static = getattr_static(owner, name, None)
    if isinstance(static, CLASS_METHODS) and (before is MISSING or before is static):
        return lambda cls, /, *args, **kwargs: static.__get__(None, cls)(*args, **kwargs)
    if before is not MISSING:
        return before.fget if isinstance(before, property) else before
    return getattr(owner, name, _no_attribute) if name == "__getattr__" else getattr(owner, name)


def _no_attribute(instance: Any, name: str) -> Any:
    raise AttributeError(f"{type(instance).__name__!r} object has no attribute {name!r}")
