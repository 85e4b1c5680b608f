# SPDX-License-Identifier: Apache-2.0
"""The model and its loss as one module of flat tensors, so that the loss belongs to the last stage.

The loss of a microbatch is divided by their number before anything else happens to it, inside the captured program;
so the sum over microbatches is the loss of the step, and no stage is special to the executor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from fpipe.capture.guards import plain_state, require_unchanged, watched
from fpipe.errors import CaptureError, InputError
from fpipe.tree import Structure, flatten

Loss: TypeAlias = Callable[..., Tensor]


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Call `model` with a tuple of positional or a dict of keyword arguments."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    raise InputError(
        f"inputs: got {type(inputs).__name__}, expected a tuple of positional arguments or a dict of keyword "
        "arguments. Write (x,) for one argument."
    )


def scaled_loss(loss: Loss, outputs: Any, targets: Any, microbatches: int) -> Tensor:
    """`loss(outputs, targets) / microbatches`, or of outputs alone where targets are `None`; must be a scalar."""
    value = loss(outputs) if targets is None else loss(outputs, targets)
    if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
        got = f"a tensor of shape {list(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else repr(value)
        raise CaptureError(
            f"loss: got {got}, expected a floating-point scalar tensor. Reduce it, for example by .mean(), and return "
            "nothing else."
        )
    return value / microbatches


def without_parameters(loss: Loss | None) -> None:
    """Raise `CaptureError` if the loss trains something of its own: nobody would hold it."""
    names = [name for name, p in loss.named_parameters() if p.requires_grad] if isinstance(loss, nn.Module) else []
    if names:
        raise CaptureError(
            f"loss: got the trainable parameters {names}, expected none. Put them into the model, and let it return "
            "what the loss needs."
        )


class _Settings(NamedTuple):
    """What is no part of the model's state, a loss that is a module included."""

    loss: Loss | None
    batch: Structure
    microbatches: int
    report: Callable[[Structure], None]


class Objective(nn.Module):
    """`(tensor leaves of (inputs, targets)) -> (loss, output tensors...)`; without a loss, the outputs alone.

    `report` is called with the tree of the outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        batch: Structure,
        microbatches: int,
        report: Callable[[Structure], None],
    ) -> None:
        super().__init__()
        self.model = model
        self.settings = _Settings(loss, batch, microbatches, report)

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Call the model and the loss."""
        loss, batch, microbatches, report = self.settings
        inputs, targets = batch.unflatten(leaves)
        with watched(self.model):
            before = plain_state(self.model)
            outputs = call_model(self.model, inputs)
            require_unchanged(before, plain_state(self.model), "the new value would be lost")
            scaled = () if loss is None else (scaled_loss(loss, outputs, targets, microbatches),)
        tensors, structure = flatten(outputs)
        report(structure)
        return *scaled, *tensors
