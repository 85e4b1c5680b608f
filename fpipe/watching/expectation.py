# SPDX-License-Identifier: Apache-2.0
"""Expectations: what a value was when the pipeline was built, in a form that is cheap to compare with what it is now.

Problem. Before every step we must know, within microseconds, whether any of thousands of values has changed. And what
the pipeline was built from may be freed, with all its tensors.

Idea. Keep and compare numbers, flags and strings. Identify a tensor by a weak reference and its version, and a function
or a module by a weak reference. Containers and plain objects are trees of these: see `fpipe.watching.containers`.

Runs: made when a pipeline is built, compared in every step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from numbers import Number
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from fpipe.tensors.spec import Spec

COMPARABLE = (bool, Number, str, bytes, Enum, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types whose instances are compared by value."""

Ref: TypeAlias = Callable[[], Any]


class Difference(NamedTuple):
    """Where a value is, what it is now, and what it was."""

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
    """Expect the same number, flag or string, or `None`."""

    value: Any

    def holds(self, value: Any) -> bool:
        """Return whether the value has the same type and repr, so nan equals nan, and 0 differs from -0."""
        return value is self.value or (type(value) is type(self.value) and repr(value) == repr(self.value))

    def differences(self, value: Any, where: str) -> Iterator[Difference]:
        """Yield the value if it has changed."""
        if not self.holds(value):
            yield Difference(where, value_text(value), value_text(self.value))


class ExpectedObject(NamedTuple):
    """Expect the same object, identified by a weak reference; `text` is its name in errors."""

    ref: Ref
    text: str

    def holds(self, value: Any) -> bool:
        """Return whether `value` is that object."""
        return value is self.ref()

    def differences(self, value: Any, where: str) -> Iterator[Difference]:
        """Yield the object if it is another one."""
        if not self.holds(value):
            got = value_text(value)
            yield Difference(where, f"another {got}" if got == self.text else got, self.text)


class ExpectedTensor(NamedTuple):
    """Expect the same tensor, at the same version."""

    ref: Ref
    version: int | None
    text: str

    def holds(self, value: Any) -> bool:
        """Return whether `value` is that tensor, unmodified."""
        return value is self.ref() and version(value) == self.version

    def differences(self, value: Any, where: str) -> Iterator[Difference]:
        """Yield the tensor if it is another one or has been modified."""
        if value is not self.ref():
            yield Difference(where, f"another value, {value_text(value)}", self.text)
        elif version(value) != self.version:
            yield Difference(where, f"{self.text} with other values", self.text)


def version(tensor: Tensor) -> int | None:
    """Return a tensor's version counter; `None` for inference tensors, which have none."""
    return None if tensor.is_inference() else tensor._version


def value_text(value: Any) -> str:
    """Return how an error shows a value."""
    if isinstance(value, COMPARABLE):
        return repr(value)
    if isinstance(value, Tensor):
        return f"a tensor {Spec.of(value)}" if value.layout is torch.strided else "a tensor"
    return getattr(value, "__qualname__", type(value).__name__)


def expect_object(value: Any) -> Expectation | None:
    """Expect the same object; return `None` if its class allows no weak reference."""
    ref = weak_reference(value)
    return None if ref is None else ExpectedObject(ref, value_text(value))


def weak_reference(value: Any) -> Ref | None:
    """Return a weak reference to an object; `None` if its class allows none."""
    try:
        return weakref.ref(value)
    except TypeError:
        return None
