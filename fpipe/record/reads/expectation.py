# SPDX-License-Identifier: Apache-2.0
"""Expectations: the state of values when a pipeline was built, in a form that is cheap to compare with the current one.

Problem. Thousands of values must be checked for changes before every step, within microseconds. And a pipeline must not
keep the model that it was built from alive, nor its tensors.

Idea. Keep and compare numbers, flags and strings. Identify a tensor by a weak reference and its version, and a function
or a module by a weak reference. Containers and plain objects are trees of these: see `fpipe.record.reads.containers`.

Runs when a pipeline is built or a plan is made, to record expectations, and in every step, to compare them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from fpipe.record.model.walk import PLAIN_VALUES
from fpipe.tensors.spec import Spec

Ref: TypeAlias = Callable[[], Any]


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


def version(tensor: Tensor) -> int | None:
    """Return a tensor's version counter; `None` for inference tensors, which have none."""
    return None if tensor.is_inference() else tensor._version


def value_text(value: Any) -> str:
    """Return the text that errors show for a value."""
    if isinstance(value, PLAIN_VALUES):
        return repr(value)
    if isinstance(value, Tensor):
        return f"a tensor {Spec.of(value)}" if value.layout is torch.strided else "a tensor"
    return getattr(value, "__qualname__", type(value).__name__)


def expect_object(value: Any) -> Expectation | None:
    """Return the expectation of the same object; `None` if its class allows no weak reference."""
    ref = weak_reference(value)
    return None if ref is None else ExpectedObject(ref, value_text(value))


def weak_reference(value: Any) -> Ref | None:
    """Return a weak reference to an object; `None` if its class allows none."""
    try:
        return weakref.ref(value)
    except TypeError:
        return None
