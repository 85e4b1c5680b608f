# SPDX-License-Identifier: Apache-2.0
"""Snapshots of values that are cheap to compare and keep nothing large alive.

Problem. Before every step we must know, within microseconds, whether any of thousands of values has changed. And
whatever held a value when the pipeline was built may be freed, with all its tensors.

Idea. Numbers, flags and strings are kept and compared; tensors are identified by a weak reference and their version,
functions and modules by a weak reference; containers and plain objects are trees of these. Most of a tree is compared
in C.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Number
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from fpipe.tensors.spec import Spec

PLAIN = (bool, Number, str, bytes, Enum, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
MAPPINGS = (dict, OrderedDict, defaultdict)
SEQUENCES = (list, tuple, torch.Size, deque)
DEPTH, SIZE = 4, 256  # limits of inspected containers and objects
OPEN = frozenset({"argparse", "types", "dataclasses", "collections"})  # users put values into their instances
CLOSED = (sys.stdlib_module_names - OPEN) | {"torch", "numpy", "optree", "packaging", "fpipe", "schedules"}

Ref: TypeAlias = Callable[[], Any]
Keep: TypeAlias = Callable[[str, bool], bool]
"""Returns whether an attribute (True) or a key of a mapping (False) is relevant."""


class Difference(NamedTuple):
    """Where a value is, what it is now, and what it was."""

    where: str
    got: str
    expected: str


class Handle(Protocol):
    """A snapshot of a value."""

    def holds(self, value: Any) -> bool:
        """Return whether `value` is unchanged."""

    def differences(self, value: Any, where: str) -> Iterator[Difference]:
        """Yield how `value` differs from the snapshot."""


class Plain(NamedTuple):
    """A number, flag or string, or `None`."""

    value: Any

    def holds(self, value: Any) -> bool:
        """Return whether the value has the same type and repr, so nan equals nan, and 0 differs from -0."""
        return value is self.value or (type(value) is type(self.value) and repr(value) == repr(self.value))

    def differences(self, value: Any, where: str) -> Iterator[Difference]:
        """Yield the value, if it has changed."""
        if not self.holds(value):
            yield Difference(where, said(value), said(self.value))


class Same(NamedTuple):
    """An object identified by a weak reference."""

    ref: Ref
    said: str

    def holds(self, value: Any) -> bool:
        """Return whether `value` is that object."""
        return value is self.ref()

    def differences(self, value: Any, where: str) -> Iterator[Difference]:
        """Yield the object, if it is another one."""
        if not self.holds(value):
            got = said(value)
            yield Difference(where, f"another {got}" if got == self.said else got, self.said)


class Held(NamedTuple):
    """A tensor and its version."""

    ref: Ref
    version: int | None
    said: str

    def holds(self, value: Any) -> bool:
        """Return whether `value` is that tensor, unmodified."""
        return value is self.ref() and version(value) == self.version

    def differences(self, value: Any, where: str) -> Iterator[Difference]:
        """Yield the tensor, if it is another one or has been modified."""
        if value is not self.ref():
            yield Difference(where, f"another value, {said(value)}", self.said)
        elif version(value) != self.version:
            yield Difference(where, f"{self.said} with other values", self.said)


@dataclass(frozen=True)
class Table:
    """A snapshot of some keys of a mapping: plain values, empty containers, and everything else (`inner`).

    - `count`: the number of elements; `None` if others may come and go. `named`: the format of a key in errors.
    - `absent`: keys that did not exist. `nones`: keys whose value was `None`, as distinct from a missing key. `kinds`:
      the classes of the empty containers.
    """

    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    empty: tuple[Any, ...]
    inner: tuple[tuple[Any, Handle], ...]
    count: int | None
    named: str
    absent: tuple[Any, ...] = ()
    kinds: tuple[type, ...] = ()
    nones: tuple[Any, ...] = ()

    @classmethod
    def of(cls, children: Mapping[Any, Handle], count: int | None, named: str, absent: tuple[Any, ...] = ()) -> Table:
        """Return a table of these children."""
        plain = {key: child.value for key, child in children.items() if isinstance(child, Plain)}
        empty = {k: c.kind for k, c in children.items() if isinstance(c, Container) and c.is_empty}
        inner = tuple((k, child) for k, child in children.items() if k not in plain and k not in empty)
        known = tuple(plain), tuple(plain.values()), tuple(empty)
        nones = tuple(key for key, value in plain.items() if value is None)
        return cls(*known, inner, count, named, absent, tuple(empty.values()), nones)

    def holds(self, table: Mapping[Any, Any]) -> bool:
        """Return whether the mapping is unchanged."""
        get = table.get
        return (
            (self.count is None or len(table) == self.count)
            and (all(map(is_, map(get, self.keys), self.values)) or self._alike(table))
            and not any(map(get, self.empty))
            and all(map(is_, map(type, map(get, self.empty)), self.kinds))
            and not any(map(table.__contains__, self.absent))
            and all(map(table.__contains__, self.nones))
            and (not self.inner or all(child.holds(get(key)) for key, child in self.inner))
        )

    def _alike(self, table: Mapping[Any, Any]) -> bool:
        return all(Plain(value).holds(table.get(key)) for key, value in zip(self.keys, self.values, strict=True))

    def differences(self, table: Mapping[Any, Any], where: str) -> Iterator[Difference]:
        """Yield what has changed."""
        for key, value in zip(self.keys, self.values, strict=True):
            yield from Plain(value).differences(table.get(key), self.at(where, key))
        for key in self.nones:
            if key not in table:
                yield Difference(self.at(where, key), "nothing", "None")
        for key in table.keys() & set(self.absent):
            yield Difference(self.at(where, key), f"{said(table[key])} of its own", "that of its class")
        for key, kind in zip(self.empty, self.kinds, strict=True):
            if table.get(key) or type(table.get(key)) is not kind:
                yield Difference(self.at(where, key), said(table.get(key)), f"an empty {kind.__name__}")
        for key, child in self.inner:
            yield from child.differences(table.get(key), self.at(where, key))
        if self.count is not None and len(table) != self.count:
            yield Difference(where, f"{len(table)} elements", str(self.count))

    def at(self, where: str, key: Any) -> str:
        """Return the name of an element in errors."""
        return where + self.named.format(key if isinstance(key, str) and "[" not in self.named else repr(key))


@dataclass(frozen=True, eq=False)
class Container:
    """A mapping, a sequence, or an object with attributes: its class and its contents.

    - `ref`: a weak reference to it, if its class allows one.
    """

    kind: type
    children: Mapping[Any, Handle]
    count: int | None
    ref: Ref | None
    table: Table

    @property
    def is_empty(self) -> bool:
        """True if it had no elements and must have none."""
        return self.count == 0

    def holds(self, value: Any) -> bool:
        """Return whether `value` has the same class and contents."""
        return type(value) is self.kind and self.table.holds(contents(value))

    def differences(self, value: Any, where: str) -> Iterator[Difference]:
        """Yield what has changed in it."""
        if type(value) is self.kind:
            yield from self.table.differences(contents(value), where)
        else:
            yield Difference(where, said(value), self.kind.__name__)

    def select(self, keep: Keep, met: set[int]) -> Handle:
        """Return its relevant part; just its identity, if it has been selected elsewhere already."""
        if id(self) in met and self.ref is not None:
            return Same(self.ref, self.kind.__name__)
        met.add(id(self))
        kept = {k: one for k, one in self.children.items() if not isinstance(k, str) or keep(k, self.is_object)}
        if not self.is_object and not kept:  # its keys must be computed
            kept = dict(self.children)
        found = selected(kept, keep, met)
        whole = len(found) == len(self.children)
        return container(self.kind, found, self.count if whole else None, self.ref)

    @property
    def is_object(self) -> bool:
        """True if it has attributes rather than elements."""
        return self.kind not in MAPPINGS and self.kind not in SEQUENCES


def container(kind: type, children: Mapping[Any, Handle], count: int | None, ref: Ref | None) -> Container:
    """Return a container of these children."""
    named = "[{}]" if kind in MAPPINGS or kind in SEQUENCES else ".{}"
    return Container(kind, children, count, ref, Table.of(children, count, named))


def selected(children: Mapping[Any, Handle], keep: Keep, met: set[int]) -> dict[Any, Handle]:
    """Return the children, each reduced to its relevant part."""
    return {key: child.select(keep, met) if isinstance(child, Container) else child for key, child in children.items()}


class Handles:
    """Makes handles; an object that occurs twice gets one."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Any, Handle | None]] = {}

    def of(self, value: Any, depth: int = DEPTH) -> Handle | None:
        """Return the handle of a value; `None` if it can't be compared."""
        if isinstance(value, PLAIN):
            return Plain(value)
        if isinstance(value, Tensor):
            return Held(weakref.ref(value), version(value), said(value))
        if id(value) in self.known:
            return self.known[id(value)][1]
        if isinstance(value, MethodType) or not depth:
            return None
        if not has_contents(value) or isinstance(value, nn.Module):
            return _same(value)
        self.known[id(value)] = value, _same(value)  # for references from inside it to itself
        inside = contents(value)
        made = {key: self.of(one, depth - 1) for key, one in inside.items()} if len(inside) <= SIZE else {}
        kind = type(value)
        counted = len(inside) if kind in MAPPINGS or kind in SEQUENCES else None
        children = {key: child for key, child in made.items() if child is not None}
        handle = container(kind, children, counted, _weak(value))
        self.known[id(value)] = value, handle
        return handle


def has_contents(value: Any) -> bool:
    """Return whether a value is a container, or an object of the user's with attributes."""
    kind = type(value)
    if kind in MAPPINGS or kind in SEQUENCES:
        return True
    if isinstance(value, type | ModuleType | FunctionType) or kind.__module__.partition(".")[0] in CLOSED:
        return False
    return hasattr(value, "__dict__") or bool(_slots(kind))


def contents(value: Any) -> Mapping[Any, Any]:
    """Return the elements or attributes of a value that has any."""
    kind = type(value)
    if kind in MAPPINGS:
        found: Mapping[Any, Any] = value
        return found
    if kind in SEQUENCES:
        return dict(enumerate(value))
    inside: dict[str, Any] = getattr(value, "__dict__", {})
    slots = _slots(kind)
    return {**inside, **{name: getattr(value, name, None) for name in slots}} if slots else inside


def _slots(kind: type) -> Sequence[str]:
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for slots in found for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if not name.startswith("__")]


def version(tensor: Tensor) -> int | None:
    """Return a tensor's version counter; `None` for inference tensors, which have none."""
    return None if tensor.is_inference() else tensor._version


def said(value: Any) -> str:
    """Return the text of a value in an error."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return f"a tensor {Spec.of(value)}" if value.layout is torch.strided else "a tensor"
    return getattr(value, "__qualname__", type(value).__name__)


def _same(value: Any) -> Handle | None:
    ref = _weak(value)
    return None if ref is None else Same(ref, said(value))


def _weak(value: Any) -> Ref | None:
    try:
        return weakref.ref(value)
    except TypeError:
        return None
