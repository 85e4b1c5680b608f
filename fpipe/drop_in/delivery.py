# SPDX-License-Identifier: Apache-2.0
"""Deliver gradients that a forward has computed to `.grad` when `loss.backward()` is called.

Problem. The forward of a drop-in module runs the whole schedule, backward included, so gradients exist before the
script calls `loss.backward()`. By then it is too late to learn two things. The first is the cotangent: `(loss / 3)`
rounds other numbers than `loss` does. The second is what to add to: a sum of two steps' gradients differs in its last
bits from what a plain loop over the microbatches of both adds up.

Idea. The loss has a node in autograd's graph. Its inputs are the parameters, and its backward returns the gradients. A
cotangent that is a power of two multiplies them, which rounds nothing short of overflow and underflow. Any other must
be known to the forward, as its `scale`. The forward adds to what is in `.grad` in place, unless that was delivered
before and the parameters have been written to since: then an optimizer has used it, and the script will clear it before
the backward.

While a forward has borrowed `.grad`, a placeholder full of nan is there, without memory of its own: an optimizer that
steps before the backward shows at once.

Invariant: an error leaves the gradients where they are. They can be taken once.

Runs in every training step of a drop-in module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef

from fpipe.errors import InputError
from fpipe.pipelines.inputs import State
from fpipe.tensors.placed import expand_like, local_part

Leaves = Mapping[str, Tensor]


class Delivery:
    """The gradients of one forward, on their way to the `.grad` of `params`.

    - `scale`: the cotangent of the loss that they were computed for.
    - `borrowed`: the placeholders that are in `.grad` while the gradients go on from earlier sums.
    - `used`: what was in `.grad` at the forward although an optimizer had used it. `delivered`: what was put there.
    - `factor`: what the gradients are multiplied by on delivery; borrowed sums have been divided by it.
    - `is_half`: whether float16 is used somewhere, so that small numbers may have been lost.
    - `is_late`: whether another forward came before the backward.
    """

    def __init__(self, grads: Leaves, params: Leaves, scale: float, factor: float, is_half: bool) -> None:
        self.grads: Leaves | None = grads
        self.params, self.scale, self.factor, self.is_half = params, scale, factor, is_half
        self.writes = count_writes(params)
        self.borrowed, self.is_late = dict[str, Tensor](), False
        self.used, self.delivered = dict[str, StorageWeakRef](), dict[str, StorageWeakRef]()

    def __deepcopy__(self, memo: object) -> None:
        """Return nothing: the copy of a module has no gradients."""

    def borrow(self, names: Leaves) -> None:
        """Put placeholders into the `.grad` of parameters whose sums the forward has gone on from."""
        for name in names:
            p = self.params[name]
            p.grad = self.borrowed[name] = expand_like(p, torch.full((), math.nan, dtype=p.dtype, device=p.device))

    def remember(self, old: Leaves) -> None:
        """Remember what is in `.grad`, which the script must clear before the backward."""
        self.used = find_storages(old)

    def drop(self) -> None:
        """Drop the gradients, since another forward came before the backward, and did not add to them."""
        self.is_late, self.grads = self.grads is not None, None

    @property
    def is_done(self) -> bool:
        """True if `backward` has been called."""
        return self.grads is None

    @property
    def is_overdue(self) -> bool:
        """True if sums were borrowed and not given back."""
        return self.grads is not None and bool(self.borrowed)

    @property
    def is_used(self) -> bool:
        """True if what was delivered is still in `.grad`, and the parameters have been written to since."""
        kept = any(is_stored_in(self.params[name].grad, storage) for name, storage in self.delivered.items())
        return kept and count_writes(self.params) != self.writes

    def take(self, cotangent: Tensor) -> Leaves:
        """Return the gradients for a cotangent of the loss, and clear the placeholders."""
        if self.is_late:
            raise InputError(
                "loss.backward(): got the loss of an earlier forward, perhaps as a part of a sum, expected that of the "
                "last one: its gradients would be summed separately, and adding them to others rounds differently. "
                "Call loss.backward() before the next forward, which adds to what is in .grad."
            )
        if self.grads is None:
            raise InputError(
                "loss.backward(): got a second call for the same loss, expected one: its gradients have been added to "
                ".grad. Call the model again."
            )
        self._require_as_left()
        factor = self._find_factor(float(cotangent))
        if self.borrowed and factor != self.factor:
            raise InputError(
                f"loss.backward(): got a cotangent of {float(cotangent):g}, expected {self.factor * self.scale:g}, as "
                "in the previous backward: the forward has added to what is in .grad. Scale all losses whose gradients "
                "are accumulated by the same number, or pass scale= to the model."
            )
        for name in self.borrowed:
            self.params[name].grad = None
        grads, self.grads, self.factor = self.grads, None, factor
        for grad in grads.values() if factor != 1 else ():
            grad.mul_(factor)
        self.delivered = find_storages(grads)
        return grads

    def _require_as_left(self) -> None:
        """Raise `InputError` if parameters or `.grad` have changed in a way that the forward did not expect."""
        if count_writes(self.params) != self.writes:
            raise InputError(
                "loss.backward(): got parameters that were written to after the forward, expected those that it used. "
                "Call optimizer.step() after loss.backward()."
            )
        for name, p in self.params.items():
            if name in self.borrowed and p.grad is not self.borrowed[name]:
                raise InputError(
                    f"{name}: got a .grad that was cleared or replaced after the forward, which has added to it, "
                    "expected it untouched. Call zero_grad() before the forward."
                )
        grads = ((name, self.params[name].grad) for name in self.used)
        left = {name: grad for name, grad in grads if grad is not None and is_stored_in(grad, self.used[name])}
        if left and torch.stack([grad.any() for grad in left.values()]).any():  # one wait for a device, not many
            name = next(name for name, grad in left.items() if grad.any())
            raise InputError(
                f"{name}: got a .grad that an optimizer has used but that was not cleared, expected none. Call "
                "zero_grad() before loss.backward()."
            )

    def _find_factor(self, cotangent: float) -> float:
        """Return what to multiply the gradients by; raise `InputError` if that would round."""
        factor = cotangent / self.scale if self.scale else math.nan
        if factor == 1 or (not self.is_half and math.isfinite(factor) and abs(math.frexp(factor)[0]) == 0.5):
            return factor
        why = "in float16, small numbers are lost" if self.is_half else "only a power of two does not round"
        raise InputError(
            f"loss.backward(): got a cotangent of {cotangent:g}, expected {self.scale:g}: the forward has already "
            f"computed the gradients, and {why}. Pass it to the forward: model(..., scale={cotangent:g}), or "
            "model(..., steps=3) for the mean over 3 accumulated steps."
        )


def count_writes(leaves: Leaves) -> tuple[int, ...]:
    """Return how often each tensor has been written to."""
    return tuple([leaf._version for leaf in leaves.values()])


def find_storages(grads: Leaves) -> dict[str, StorageWeakRef]:
    """Return weak references to the memory of dense gradients; autograd puts another tensor with it into `.grad`."""
    dense = {name: local_part(grad) for name, grad in grads.items() if grad.layout is torch.strided}
    return {name: StorageWeakRef(grad.untyped_storage()) for name, grad in dense.items()}  # type: ignore[no-untyped-call]


def is_stored_in(grad: Tensor | None, storage: StorageWeakRef) -> bool:
    """Return whether a gradient is in this memory."""
    return grad is not None and find_storages({"": grad}).get("") == storage


class Deliver(torch.autograd.Function):
    """The identity on a loss; its backward returns the gradients of a delivery as those of the leaves."""

    @staticmethod
    def forward(ctx: Any, delivery: Delivery, names: tuple[str, ...], loss: Tensor, *leaves: Tensor) -> Tensor:
        """Return the loss, attached to the leaves; the first one only makes it require a gradient."""
        ctx.delivery, ctx.names = delivery, names
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        """Return nothing for the first four arguments, and the gradients of the leaves."""
        grads = ctx.delivery.take(cotangent)
        return (None, None, None, None, *[grads[name] for name in ctx.names])


def attach_delivery(loss: Tensor, delivery: Delivery) -> Tensor:
    """Return the loss with a backward that makes the delivery."""
    names = tuple(delivery.grads or ())
    anchor = torch.zeros((), requires_grad=True)  # for a process without gradients
    attached: Tensor = Deliver.apply(  # type: ignore[no-untyped-call]
        delivery, names, loss, anchor, *[delivery.params[name] for name in names]
    )
    return attached


@contextmanager
def divided(grads: State, factor: float) -> Iterator[State]:
    """Divide gradients by a power of two in place; undo it if what is inside fails."""
    for grad in grads.values() if factor != 1 else ():
        grad.div_(factor)
    try:
        yield grads
    except BaseException:
        for grad in grads.values() if factor != 1 else ():
            grad.mul_(factor)
        raise
