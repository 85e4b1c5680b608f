# SPDX-License-Identifier: Apache-2.0
"""Assumed answers to reads of values, which fake tensors lack: false, zero or 1.0, no indices; but all are finite.

So `if not torch.isfinite(x).all()` takes the usual path, whose gradients have the memory layout of most batches.

Only modules that always run as Python get these answers, and guards inside torch's own functions. The path that they
take on fake tensors determines only the shapes of their outputs; in a step, they branch on the real values. torch's own
checks of all elements are assumed to pass; they are recorded, and check the real values in every step.

Runs when a pipeline is built, and when a new kind of batch first comes; recorded checks run in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from fpipe.record.fakes.eager_types import hide_fakes, tolist
from fpipe.record.fakes.fast_paths import allow_fast_paths
from fpipe.record.fakes.recurrent import call_function
from fpipe.record.trace.branching import report_read
from fpipe.tensors.fake import Fakes
from fpipe.tensors.patching import replace
from fpipe.tensors.torch_private import (
    ARGUMENT_CHECK,
    TENSOR_CHECK,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)


FINITE = "_fpipe_finite"
"""The attribute that marks fake results of tests for finite values."""


FINITE_TESTS = frozenset({torch.isfinite, Tensor.isfinite})


def _no_indices(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return empty indices, as if no element were nonzero."""
    return tensor.new_empty((0, tensor.dim()), dtype=torch.int64)


def _nowhere(condition: Tensor) -> tuple[Tensor, ...]:
    return tuple(_no_indices(condition).unbind(1))


def _index(tensor: Tensor, index: Any) -> Tensor:
    """Return the result of indexing with masks, as if they selected nothing, and with bounds, as if they were zero."""
    items = index if isinstance(index, tuple) else (index,)
    return tensor[tuple(one for item in items for one in _index_items(item))]


def _index_items(item: Any) -> list[Any]:
    """Return an index item with bounds of zero, or for a mask an empty index for each of its dimensions."""
    if isinstance(item, slice):
        start, stop = (0 if isinstance(end, Tensor) else end for end in (item.start, item.stop))
        return [slice(start, stop, item.step)]
    if not isinstance(item, Tensor) or item.dtype not in (torch.bool, torch.uint8):
        return [item]
    return [item.new_empty((0,), dtype=torch.int64)] * item.dim()


def _select_masked(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return the result of `masked_select`, as if the mask selected nothing."""
    return tensor.new_empty((0,))


def _zero_list(shape: Sequence[int]) -> Any:
    return [_zero_list(shape[1:]) for _ in range(shape[0])] if shape else 0


ASSUMPTIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        Tensor.__bool__: lambda tensor: hasattr(tensor, FINITE),
        Tensor.item: lambda tensor: 1.0 if tensor.is_floating_point() else 0,
        Tensor.__int__: lambda _: 0,
        Tensor.__float__: lambda _: 1.0,  # it is often divided by
        tolist: lambda tensor: _zero_list(tensor.shape),
        Tensor.nonzero: _no_indices,
        torch.nonzero: _no_indices,
        Tensor.argwhere: _no_indices,
        torch.argwhere: _no_indices,
        torch.where: _nowhere,
        Tensor.__getitem__: _index,
        torch.masked_select: _select_masked,
        Tensor.masked_select: _select_masked,
    }
)


def call_or_raise(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a torch call; conversion of a fake tensor to numpy raises the error of all value reads."""
    if function in (Tensor.numpy, Tensor.__array__) and isinstance(args[0], FakeTensor):
        raise DataDependentOutputException(function)
    return mark_finite(function, args, call_function(function, args, kwargs))


def mark_finite(function: Any, args: Any, out: Any) -> Any:
    """Return the result of a torch call, marked with `FINITE` if it tests each value, or all, for being finite."""
    finite = function in FINITE_TESTS or (function in (Tensor.all, torch.all) and hasattr(args[0], FINITE))
    if finite and isinstance(out, FakeTensor):
        setattr(out, FINITE, True)
    return out


VALUE_READS = frozenset(
    {report_read, tolist}
    | {Tensor.__bool__, Tensor.item, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.tolist}
    | {Tensor.nonzero, torch.nonzero, Tensor.numpy, Tensor.__array__, Tensor.__contains__}
    | {torch.equal, Tensor.equal, torch.allclose, Tensor.allclose, torch.is_nonzero, Tensor.is_nonzero}
)
"""Functions after which execution may depend on tensor values, even if a fake tensor knows its value."""


torch_check_all: Any = TENSOR_CHECK.value


def check_all(error_type: Any, cond: Tensor, message: Any = None) -> None:
    """Run torch's check that all elements are true; a fake tensor passes, and function modes are notified."""
    if not isinstance(cond, FakeTensor):
        torch_check_all(error_type, cond, message)
    elif has_torch_function_unary(cond):
        handle_torch_function(check_all, (cond,), error_type, cond, message)


torch_is_all_true: Any = ARGUMENT_CHECK.value


def check_valid(valid: Tensor) -> bool:
    """Return true if a distribution's arguments are valid, otherwise raise `ValueError`.

    A fake tensor passes, and is reported as a read of its values; real ones are checked in every step.
    """
    if isinstance(valid, FakeTensor):
        report_read(valid)
    elif not torch_is_all_true(valid):
        raise ValueError(
            "got arguments or samples that violate the constraints of a distribution, expected valid ones. Run the "
            "module eagerly to see which, or pass validate_args=False."
        )
    return True


def answer_guard(func: Any, *tensors: Tensor) -> bool:
    """Return the answer to a guard inside a function of torch's: no; raise for any other read of values."""
    if func is torch.ops.aten.equal.default or tensors[0].dtype is torch.bool:
        return False
    raise DataDependentOutputException(func)


def is_torch_function(function: Any) -> bool:
    """Return whether a function is torch's own."""
    module = getattr(function, "__module__", None) or getattr(getattr(function, "__self__", None), "__module__", None)
    return str(module).partition(".")[0] == "torch" and not isinstance(function, type)


@contextmanager
def assume_values(mode: FakeTensorMode) -> Iterator[AssumedValues]:
    """Answer reads of values from fake tensors of `mode` with assumptions, inside this context; yield their record."""
    answers = AssumedValues()
    with (
        replace(*TENSOR_CHECK, check_all),
        replace(*ARGUMENT_CHECK, check_valid),
        hide_fakes(),
        allow_fast_paths(answers.note_nested),
        _answer_reads(mode, answers),
        answers,
    ):
        yield answers


class AssumedValues(TorchFunctionMode):
    """A torch function mode that answers reads of values from `ASSUMPTIONS`.

    - `given`: whether it has answered any: real values may lead to another branch.
    - `nested`: whether torch would make nested tensors here, which fake tensors do not support.
    - `is_reading`: whether a function of `ASSUMPTIONS` runs, which is answered here rather than by `answer_read`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given = self.nested = self.is_reading = False

    def note_nested(self) -> None:
        """Record that torch would make nested tensors here."""
        self.nested = True

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        before, self.is_reading = self.is_reading, func in ASSUMPTIONS
        try:
            return mark_finite(func, args, call_function(func, args, kwargs or {}))
        except UNKNOWN:
            if func not in ASSUMPTIONS:
                raise
            self.given = True
            return ASSUMPTIONS[func](*args, **(kwargs or {}))
        finally:
            self.is_reading = before

    def answer_read(self, func: Any, tensor: Tensor, *_: Tensor) -> Any:
        """Return the answer to a read that no torch function mode sees, in a backward or in a function of torch's."""
        if self.is_reading and func is not torch.ops.aten.nonzero.default:
            raise DataDependentOutputException(func)
        self.given = True
        if func is torch.ops.aten.nonzero.default:
            return _no_indices(tensor)
        if func is torch.ops.aten.equal.default:
            return False
        return 1.0 if tensor.is_floating_point() else torch.zeros((), dtype=tensor.dtype).tolist()


@contextmanager
def _answer_reads(mode: FakeTensorMode, answers: AssumedValues) -> Iterator[None]:
    """Let the fake mode itself answer reads inside this context; no-op unless it is a `Fakes`."""
    if not isinstance(mode, Fakes):
        yield
        return
    before, mode.answer_read = mode.answer_read, answers.answer_read
    try:
        yield
    finally:
        mode.answer_read = before
