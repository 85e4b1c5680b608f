# SPDX-License-Identifier: Apache-2.0
"""Refuse side effects of operators that would be lost in a pipeline, or that stages cannot repeat.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fpipe.errors import CaptureError
from fpipe.record.captured import Parameter
from fpipe.record.refusals import own_generator_error, unregistered_write_error
from fpipe.record.trace.values import Values
from fpipe.tensors.effects import Effects
from fpipe.tensors.torch_private import DisableTorchFunction

ATTACHING = (
    *(Tensor.register_hook, Tensor.retain_grad, Tensor.requires_grad_),
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
)
"""Torch functions that change a tensor's place in autograd, and return no new tensor."""


def require_allowed(effects: Effects, here: Callable[[], str]) -> None:
    """Raise `CaptureError` for an in-place change of an unregistered tensor, or a draw from a non-default generator."""
    if effects.unregistered:
        raise unregistered_write_error(here())
    if effects.foreign:
        raise own_generator_error(here())


def require_no_barrier(collective: str, here: Callable[[], str]) -> None:
    """Raise `CaptureError` if a collective is a barrier."""
    if collective == "barrier":
        raise CaptureError(
            f"{here()}: got a barrier of torch.distributed, expected none, because each stage runs on some of the "
            "processes only. Call it outside of the model."
        )


def require_kept(is_lost: bool, collective: str, here: Callable[[], str]) -> None:
    """Raise `CaptureError` if what a collective writes would be lost."""
    if is_lost:
        raise CaptureError(
            f"{here()}: got a collective ({collective}) that writes to a parameter, a buffer or a tensor from outside "
            "of the module, expected one that writes to a tensor created in the module. The change would be lost. Pass "
            "it a clone, and use the clone, or copy it back with copy_()."
        )


def require_own_gradients(values: Values, here: Callable[[], str]) -> None:
    """Raise `CaptureError` if a backward inside a forward has accumulated gradients of the model's parameters."""
    with DisableTorchFunction():  # not a call of the model
        parameters = ((v, one.name) for v, one in values.sources.items() if isinstance(one, Parameter))
        name = next((name for value, name in parameters if values.tensors[value].grad is not None), "")
    if name:
        raise CaptureError(
            f"{here()}: got a backward inside the forward or the loss that accumulates the gradient of {name}, "
            "expected none: a step returns gradients and keeps none, so this one would be lost. Return the loss, and "
            "let the schedule split the batch, or call torch.autograd.grad() on tensors of your own."
        )
