# SPDX-License-Identifier: Apache-2.0
"""Refuse questions about tensors that a step would answer differently than one device.

In a step, modules hold the step's parameters instead of those that an optimizer holds. They are leaves and instances of
`nn.Parameter`, and values received from other stages are neither, as on one device. But their `.grad` differs: on one
device, it holds the sum over earlier microbatches. Also, some calls raise on fake tensors that would not on real ones:
a forward that catches the error takes another branch in the capture than in a step.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import dropwhile
from traceback import walk_stack
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fpipe.errors import CaptureError, PipelineError
from fpipe.record.fakes.assumed_values import UNKNOWN
from fpipe.record.model.places import current_line
from fpipe.tensors.torch_private import FAKE_ERRORS, TENSOR_METHODS, FakeTensor

GRAD: Any = TENSOR_METHODS["grad"]
UNANSWERABLE: Mapping[Any, str] = MappingProxyType({GRAD.__get__: "is asked for", GRAD.__set__: "is assigned to"})
"""The functions that torch calls when a tensor's `.grad` is used."""
ASKING: tuple[Any, ...] = tuple(TENSOR_METHODS[name].__get__ for name in ("grad_fn", "is_leaf"))
"""The functions that torch calls when a tensor is asked whether it was computed."""
ELSEWHERE = (Tensor.numpy, Tensor.__array__)
"""Functions that raise various errors on fake tensors."""
GATHERING = frozenset({torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor})
"""Functions that copy the values of tensors in lists without calling an operator."""


def require_answerable(function: Any, args: Sequence[Any], name: Callable[[Any], str], here: Callable[[], str]) -> None:
    """Raise `CaptureError` for a tensor's address, values gathered from a list, or a parameter's gradient.

    `name` maps a tensor to its parameter's name; `here` returns the running module. torch's own modules may ask, in
    `nn.Module.to` say, because they only move the tensor.
    """
    if function is Tensor.data_ptr and not _is_called_by_torch():
        raise CaptureError(
            f"{here()}: got a forward that asks for the address of a tensor, expected one that does not depend on "
            "it. In every step, other tensors are at other addresses. Compare tensors with `is`, or drop the call."
        )
    if function in GATHERING and any(isinstance(arg, list | tuple) and _contains_fakes(arg) for arg in args):
        raise CaptureError(
            f"{here()}: got {function.__name__}() of a list with tensors in it{current_line()}, expected a list "
            "of numbers, because it copies values where fpipe cannot see it. Write torch.stack() or torch.cat(), or do "
            "it before the step and pass the result."
        )
    if function not in UNANSWERABLE or not name(args[0]) or _is_called_by_torch():
        return
    raise CaptureError(
        f"{here()}: got a forward in which the .grad of parameter {name(args[0])} {UNANSWERABLE[function]}, expected "
        "one that does not use gradients. A step returns them, and does not keep them. Use those that it returns."
    )


def _contains_fakes(items: Sequence[Any]) -> bool:
    """Return whether nested lists hold nonempty fake tensors."""
    return any(
        _contains_fakes(one) if isinstance(one, list | tuple) else isinstance(one, FakeTensor) and one.numel() > 0
        for one in items
    )


def _is_called_by_torch() -> bool:
    """Return whether the innermost caller outside of fpipe is torch."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in walk_stack(sys._getframe(1)))
    caller = next(dropwhile("fpipe".__eq__, (module.partition(".")[0] for module in modules)))
    return bool(caller == "torch")


def find_fake_error(function: Any, error: Exception, here: Callable[[], str]) -> PipelineError | None:
    """Return the error to raise even if the forward catches `error`; `None` if real tensors would raise it, too."""
    if isinstance(error, PipelineError):
        return error
    if not (isinstance(error, UNKNOWN) or function in ELSEWHERE or type(error).__module__ == FAKE_ERRORS):
        return None
    return CaptureError(
        f"{here()}: got {type(error).__name__}: {error}, which the forward caught, expected a forward that needs no "
        "values. In a step, this call would not raise. Take it out of the try block, or, if shapes do not depend on "
        "it, name the module in unsplittable."
    )
