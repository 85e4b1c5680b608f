# SPDX-License-Identifier: Apache-2.0
"""Expectations: the state of values when a pipeline was built, in a form that is cheap to compare with the current one.

Problem. Thousands of values must be checked for changes before every step, within microseconds. And a pipeline must not
keep the model that it was built from alive, nor its tensors.

Idea. Keep and compare numbers, flags and strings. Identify a tensor by a weak reference and its version, and a function
or a module by a weak reference. Containers and plain objects are trees of these. Most of their entries are numbers,
flags, strings and empty containers: `ExpectedEntries` keeps these in flat mappings that C code compares; only the rest
is compared entry by entry in Python.

Runs when a pipeline is built or a plan is made, to record expectations, and in every step, to compare them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from operator import is_
from types import MethodType
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from fpipe.record.model.walk import MAX_SIZE, NOT_SET, PLAIN_VALUES, entries, has_entries, is_container
from fpipe.record.reads.accesses import Accesses
from fpipe.tensors.spec import Spec

Ref: TypeAlias = Callable[[], Any]

MAX_DEPTH: Final = 4
"""The nesting depth up to which containers and objects are compared."""


class Difference(NamedTuple):
    """A change: the place of a value, what it is now, and what was expected, as text."""

    where: str
    got: str
    expected: str


class Expectation(Protocol):
    """The expected state of a value."""

    def holds(self, value: Any) -> bool:
        """Return whether `value` is as expected."""

    def differences(self, value: Any, where: str) -> Iterator[Difference]:
        """Yield how `value` differs from what was expected."""


class ExpectedValue(NamedTuple):
    """An expected number, flag or string, or `None`."""

    value: Any

    def holds(self, value: Any) -> bool:
        """Return whether the value has the same type and repr, so nan equals nan, and 0 differs from -0."""
        return value is self.value or (type(value) is type(self.value) and repr(value) == repr(self.value))

    def differences(self, value: Any, where: str) -> Iterator[Difference]:
        """Yield a difference if the value has changed."""
        if not self.holds(value):
            yield Difference(where, value_text(value), value_text(self.value))


class ExpectedObject(NamedTuple):
    """An expected object, identified by a weak reference; `text` is its name in errors."""

    ref: Ref
    text: str

    def holds(self, value: Any) -> bool:
        """Return whether `value` is that object."""
        return value is self.ref()

    def differences(self, value: Any, where: str) -> Iterator[Difference]:
        """Yield a difference if it is another object."""
        if not self.holds(value):
            got = value_text(value)
            yield Difference(where, f"another {got}" if got == self.text else got, self.text)


class ExpectedTensor(NamedTuple):
    """An expected tensor, identified by a weak reference, at its version."""

    ref: Ref
    version: int | None
    text: str

    def holds(self, value: Any) -> bool:
        """Return whether `value` is that tensor, unmodified."""
        return value is self.ref() and version(value) == self.version

    def differences(self, value: Any, where: str) -> Iterator[Difference]:
        """Yield a difference if it is another tensor or has been modified."""
        if value is not self.ref():
            yield Difference(where, f"another value, {value_text(value)}", self.text)
        elif version(value) != self.version:
            yield Difference(where, f"{self.text} with other values", self.text)


@dataclass(frozen=True)
class ExpectedEntries:
    """The expected values of some keys of a mapping.

    - `plain`: plain values; `NOT_SET` for keys that must not exist. `empty`: the classes of empty containers. `inner`:
      the expectations of all others.
    - `count`: the number of entries; `None` if others may come and go.
    - `label`: how errors show a key.
    """

    plain: Mapping[Any, Any]
    empty: Mapping[Any, type]
    inner: Mapping[Any, Expectation]
    label: str
    count: int | None = None

    @classmethod
    def of(cls, children: Mapping[Any, Expectation], label: str, count: int | None = None) -> ExpectedEntries:
        """Return the children, sorted into plain values, empty containers, and others."""
        plain = {key: child.value for key, child in children.items() if isinstance(child, ExpectedValue)}
        empty = {
            k: child.kind for k, child in children.items() if isinstance(child, ExpectedContainer) and child.is_empty
        }
        inner = {key: child for key, child in children.items() if key not in plain and key not in empty}
        return cls(plain, empty, inner, label, count)

    def holds(self, mapping: Mapping[Any, Any]) -> bool:
        """Return whether the mapping is as expected."""
        get, plain, empty = mapping.get, self.plain, self.empty
        return (
            (self.count is None or len(mapping) == self.count)
            and (all(map(is_, map(get, plain, repeat(NOT_SET)), plain.values())) or self._has_equal_values(mapping))
            and [*map(type, map(get, empty))] == [*empty.values()]
            and not any(map(get, empty))
            and (not self.inner or all(child.holds(get(key, NOT_SET)) for key, child in self.inner.items()))
        )

    def _has_equal_values(self, mapping: Mapping[Any, Any]) -> bool:
        return all(ExpectedValue(value).holds(mapping.get(key, NOT_SET)) for key, value in self.plain.items())

    def differences(self, mapping: Mapping[Any, Any], where: str) -> Iterator[Difference]:
        """Yield what has changed."""
        for key, value in self.plain.items():
            now, place = mapping.get(key, NOT_SET), where + self.label.format(key)
            if value is NOT_SET and now is not NOT_SET:
                yield Difference(place, f"{value_text(now)} of its own", "that of its class")
            else:
                yield from ExpectedValue(value).differences(now, place)
        for key, kind in self.empty.items():
            now = mapping.get(key, NOT_SET)
            if type(now) is not kind or now:
                yield Difference(where + self.label.format(key), value_text(now), f"an empty {kind.__name__}")
        for key, child in self.inner.items():
            yield from child.differences(mapping.get(key, NOT_SET), where + self.label.format(key))
        if self.count is not None and len(mapping) != self.count:
            yield Difference(where, f"{len(mapping)} elements", str(self.count))


@dataclass(frozen=True, eq=False)
class ExpectedContainer:
    """The expected class and entries of a mapping, a sequence, or an object with attributes.

    - `children`: the expectations of its entries. `count`: its number of elements; `None` if others may come and go.
    - `ref`: a weak reference to it, if its class allows one. `identity`: its id.
    """

    kind: type
    children: Mapping[Any, Expectation]
    count: int | None
    ref: Ref | None
    identity: int

    @cached_property
    def table(self) -> ExpectedEntries:
        """The expected entries."""
        return ExpectedEntries.of(self.children, "[{!r}]" if is_container(self.kind) else ".{}", self.count)

    @property
    def is_empty(self) -> bool:
        """True if it had no elements and must have none."""
        return self.count == 0

    def holds(self, value: Any) -> bool:
        """Return whether `value` has the same class and entries."""
        return type(value) is self.kind and self.table.holds(entries(value))

    def differences(self, value: Any, where: str) -> Iterator[Difference]:
        """Yield what has changed in it."""
        if type(value) is self.kind:
            yield from self.table.differences(entries(value), where)
        else:
            yield Difference(where, value_text(value), self.kind.__name__)

    def select(self, accesses: Accesses, seen: set[int]) -> Expectation:
        """Return the relevant part of it, or only its identity if it is in `seen`; add it to `seen`."""
        if id(self) in seen and self.ref is not None:
            return ExpectedObject(self.ref, self.kind.__name__)
        seen.add(id(self))
        has_attributes, owner = not is_container(self.kind), self.ref and self.ref()
        relevant = {
            key: child
            for key, child in self.children.items()
            if not isinstance(key, str) or accesses.is_relevant(owner, key, has_attributes)
        }
        if not has_attributes and not relevant:  # code must compute its keys
            relevant = dict(self.children)
        selected = select_relevant(relevant, accesses, seen)
        is_whole = len(selected) == len(self.children) and self.identity not in accesses.growing
        count = self.count if is_whole else None
        return ExpectedContainer(self.kind, selected, count, self.ref, self.identity)


def select_relevant(children: Mapping[Any, Expectation], accesses: Accesses, seen: set[int]) -> dict[Any, Expectation]:
    """Return the children, each reduced to its relevant part."""
    return {
        key: child.select(accesses, seen) if isinstance(child, ExpectedContainer) else child
        for key, child in children.items()
    }


class Expectations:
    """A factory of expectations; an object that is met twice gets the same one."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Any, Expectation | None]] = {}

    def expect(self, value: Any, depth: int = MAX_DEPTH) -> Expectation | None:
        """Return the expectation that a value stays as it is; `None` if it can't be compared."""
        if isinstance(value, PLAIN_VALUES):
            return ExpectedValue(value)
        if isinstance(value, Tensor):
            return ExpectedTensor(weakref.ref(value), version(value), value_text(value))
        if id(value) in self.known:
            return self.known[id(value)][1]
        if isinstance(value, MethodType) or not depth:
            return None
        if not has_entries(value) or isinstance(value, nn.Module):
            return expect_object(value)
        self.known[id(value)] = value, expect_object(value)  # for references from inside it to itself
        expectation = self._expect_container(value, depth)
        self.known[id(value)] = value, expectation
        return expectation

    def _expect_container(self, value: Any, depth: int) -> ExpectedContainer:
        inside = entries(value)
        expected = {key: self.expect(one, depth - 1) for key, one in inside.items()} if len(inside) <= MAX_SIZE else {}
        children = {key: child for key, child in expected.items() if child is not None}
        count = len(inside) if is_container(type(value)) else None
        return ExpectedContainer(type(value), children, count, _weak_reference(value), id(value))


def version(tensor: Tensor) -> int | None:
    """Return a tensor's version counter; `None` for inference tensors, which have none."""
    return None if tensor.is_inference() else tensor._version


def value_text(value: Any) -> str:
    """Return the text that errors show for a value."""
    if value is NOT_SET:
        return "nothing"
    if isinstance(value, PLAIN_VALUES):
        return repr(value)
    if isinstance(value, Tensor):
        return f"a tensor {Spec.of(value)}" if value.layout is torch.strided else "a tensor"
    return getattr(value, "__qualname__", type(value).__name__)


def expect_object(value: Any) -> Expectation | None:
    """Return the expectation of the same object; `None` if its class allows no weak reference."""
    ref = _weak_reference(value)
    return None if ref is None else ExpectedObject(ref, value_text(value))


def _weak_reference(value: Any) -> Ref | None:
    try:
        return weakref.ref(value)
    except TypeError:
        return None
