# SPDX-License-Identifier: Apache-2.0
"""The model and its loss as one function of flat tensors, so that the loss belongs to the last stage.

A microbatch's loss is divided by the number of microbatches in all, or multiplied by its share of the total weight,
inside the captured program and before anything else uses it. So the sum over microbatches is the loss of the step, and
the executor needs no special case for the last stage. The share is one more leaf of the batch.

Runs when a plan is made, when `verify` runs the model eagerly, and in every step if a unit of a front end calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from fpipe.errors import CaptureError, InputError
from fpipe.record.numbers import to_python
from fpipe.record.questions import Ask, refuse_questions
from fpipe.record.slicing import Slicing
from fpipe.record.variant import Casts
from fpipe.tensors.tree import Structure, flatten

Loss: TypeAlias = Callable[..., Tensor | tuple[Tensor, Any]]
"""A function of outputs and targets that returns a scalar, maybe with a tree of values to return beside it."""


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Call `model` with a tuple of positional arguments or a dict of keyword arguments."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    raise InputError(
        f"inputs: got {type(inputs).__name__}, expected a tuple of positional arguments or a dict of keyword "
        "arguments. Write (x,) for one argument."
    )


def scale_loss(loss: Loss, outputs: Any, targets: Any, scale: Tensor | None, divisor: float) -> tuple[Tensor, Any]:
    """Return the microbatch's share of the step's loss, a scalar, and what else the loss returns, or `None`.

    Call `loss(outputs, targets)`, or `loss(outputs)` if targets are `None`. A share of 0 gives 0, even if the loss is
    nan, as the mean over no tokens is. Raise `CaptureError` if it does not return a floating-point scalar, or a pair of
    one and anything else.
    """
    returned = loss(outputs) if targets is None else loss(outputs, targets)
    value, aux = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
        got = f"a tensor of shape {list(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else repr(value)
        raise CaptureError(
            f"loss: got {got}, expected a floating-point scalar tensor, or a pair of one and a tree of values to "
            "return beside it. Reduce it, for example by .mean(), and return loss, or (loss, aux)."
        )
    share = value / divisor if scale is None else (value * scale.to(value.dtype)).masked_fill(scale == 0, 0.0)
    return share, aux


class Computed(NamedTuple):
    """The results for one microbatch: its share of the loss, the model's outputs, and the loss's `aux`.

    The loss is `None` if there is none; `aux` is, if the loss returns nothing else.
    """

    loss: Tensor | None
    outputs: Any
    aux: Any = None


def require_no_parameters(loss: Loss | None) -> None:
    """Raise `CaptureError` if the loss has trainable parameters: no stage would hold them."""
    names = [name for name, p in loss.named_parameters() if p.requires_grad] if isinstance(loss, nn.Module) else []
    if names:
        raise CaptureError(
            f"loss: got the trainable parameters {names}, expected none. Put them into the model, and let it return "
            "what the loss needs."
        )


class Way(NamedTuple):
    """A way to record a model.

    - `sampled`: whether code that may branch on data is run on made-up values, rather than with assumed answers.
    - `plain`: whether numbers are questions about the batch, rather than values of the record.
    """

    sampled: bool = False
    plain: bool = False


USUAL: Final = Way()


class WayError(CaptureError):
    """Raised if a model cannot be recorded in one way, but maybe in the `others`. The cause says why."""

    def __init__(self, others: Sequence[Way]) -> None:
        super().__init__("got a model that can't be recorded in this way")
        self.others = others


@dataclass(frozen=True)
class Objective:
    """The computation for one microbatch: the model, then the microbatch's share of the step's loss.

    `batch` is the tree (inputs, targets, scale). The loss is multiplied by the scale or, if that is `None`, divided by
    the `divisor`: the number of microbatches in all. `ask` answers the model's questions about the microbatch's values
    during a capture. Model and loss run under the autocast `casts`. The numbers in `batch` are replaced by those in the
    tensors that follow its tensor leaves; if they are plain, there are none. `way`: how to record it. `ranks_of`: as in
    `Captured`. `slicing`: for a model with a carry, how the microbatch is cut into slices. With several, outputs and
    aux are tuples of those of each.
    """

    loss: Loss | None
    batch: Structure
    divisor: float
    ask: Ask = field(default=refuse_questions, compare=False)
    casts: Casts = ()
    way: Way = USUAL
    ranks_of: Mapping[int, int] = field(default_factory=dict, compare=False)
    slicing: Slicing | None = None

    @property
    def unsliced(self) -> Objective:
        """The same computation, on sequences that are not cut."""
        return self if self.slicing is None else replace(self, slicing=replace(self.slicing, count=1))

    def __call__(self, model: Callable[..., Any], leaves: Sequence[Tensor]) -> Computed:
        """Return the results for the leaves of `batch`."""
        count = len(self.batch.names)
        batch = self.batch if self.way.plain else self.batch.with_numbers(map(to_python, leaves[count:]))
        return self.of(model, batch.unflatten(list(leaves[:count])))

    def of(self, model: Callable[..., Any], batch: Any) -> Computed:
        """Return the same for `batch` as a tree (inputs, targets, scale)."""
        inputs, targets, scale = batch
        if self.slicing is not None:
            return self._slice_by_slice(model, inputs, targets, scale, self.slicing)
        with self._autocast():
            outputs = call_model(model, inputs)
            if self.loss is None:
                return Computed(None, outputs)
            loss, aux = scale_loss(self.loss, outputs, targets, scale, self.divisor)
            return Computed(loss, outputs, aux)

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        """Run under the autocast of the objective, which casts each weight once."""
        with ExitStack() as stack:
            for kind, dtype in self.casts:
                stack.enter_context(torch.autocast(kind, dtype))
            yield

    def _slice_by_slice(
        self, model: Callable[..., Any], inputs: Any, targets: Any, scale: Tensor | None, slicing: Slicing
    ) -> Computed:
        """Call the model for one slice after the other, each under an autocast of its own; add up their losses.

        A slice of the targets is cut off where its loss is computed, so that it is in the same stage.
        """
        (first, of_inputs), (rest, of_targets) = flatten(inputs), flatten(targets)
        carry: Any = None
        total: Tensor | None = None
        parts = list[tuple[Any, Any]]()
        for k in range(slicing.count):
            with self._autocast():
                given = of_inputs.unflatten(slicing.cut(k, first))
                outputs, carry = slicing.call(model, given, inputs, carry)
                if self.loss is None:
                    parts.append((outputs, None))
                    continue
                wanted = of_targets.unflatten(slicing.cut(k, rest, len(first)))
                divisor = self.divisor / slicing.share(k, [*first, *rest])
                own = scale if scale is None or slicing.count == 1 else scale[k]
                value, aux = scale_loss(self.loss, outputs, wanted, own, divisor)
            total = value if total is None else total + value
            parts.append((outputs, aux))
        if slicing.count == 1:
            return Computed(total, *parts[0])
        every, beside = zip(*parts, strict=True)
        return Computed(total, every, None if all(aux is None for aux in beside) else beside)
