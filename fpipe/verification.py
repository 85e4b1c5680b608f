# SPDX-License-Identifier: Apache-2.0
"""Is the pipeline what it claims to be? Compare it, bit for bit, with one device.

Two comparisons, because a reference that shares the capture cannot see what the capture lost: with `fpipe.reference`,
and with the user's own module run eagerly, forward and `.backward()`, in a plain loop that uses nothing of fpipe's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fpipe.batch import BatchSpec, join
from fpipe.capture.losses import Loss, call_model, scaled_loss
from fpipe.errors import MismatchError
from fpipe.tree import flatten, same_bits


class Computed(NamedTuple):
    """What two computations are compared by; what a side does not have is `None`."""

    loss: Tensor | None
    outputs: Any
    grads: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


def eagerly(model: nn.Module, loss: Loss, spec: BatchSpec, inputs: Any, targets: Any) -> Computed:
    """The user's module in a plain microbatch loop on one device; a copy of it, which keeps hooks, state and mode."""
    model = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)
    parts = spec.take(inputs, targets, range(len(spec.specs)))
    total: Any = 0
    columns = []
    for i in range(spec.microbatches):
        tree, wanted = spec.structure.unflatten([parts[leaf][i] for leaf in range(len(parts))])
        outputs = call_model(model, tree)
        value = scaled_loss(loss, outputs, wanted, spec.microbatches)
        if value.requires_grad:
            torch.autograd.backward(value)
        total = total + value.detach()
        leaves, structure = flatten(outputs)
        columns.append([leaf.detach() for leaf in leaves])
    joined = structure.unflatten([join(column) for column in zip(*columns, strict=True)])
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Computed(total, joined, grads, dict(model.named_buffers()))


def require_equal(got: Computed, expected: Computed, against: str) -> int:
    """Raise `MismatchError` at the first leaf that differs in any bit; return how many were compared."""
    count = 0
    for name, mine, theirs in _pairs(got, expected):
        count += 1
        if mine is None or theirs is None:
            which = "nothing" if mine is None else "a tensor"
            raise MismatchError(
                f"{name}: got {which}, expected {'a tensor' if mine is None else 'nothing'} as {against} has."
            )
        if not same_bits(mine, theirs):
            far = (mine.double() - theirs.double()).abs().max().item() if mine.shape == theirs.shape else float("nan")
            raise MismatchError(
                f"{name}: got other bits than {against}, expected the same; the largest difference is {far:.3g}. "
                "Compare the number of intra-op threads (torch.get_num_threads()) and deterministic kernels on both "
                "sides first."
            )
    return count


def _pairs(got: Computed, expected: Computed) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Leaves by name; gradients both ways, but only of what this process holds."""
    yield "loss", got.loss, expected.loss
    if got.outputs is not None and expected.outputs is not None:
        mine, structure = flatten(got.outputs)
        theirs, _ = flatten(expected.outputs)
        yield from zip([f"outputs{path}" for path in structure.names], mine, theirs, strict=True)
    for name, tensor in got.buffers.items():
        yield f"buffer {name}", tensor, expected.buffers.get(name)
    for name, grad in got.grads.items():
        yield f"gradient {name}", grad, expected.grads.get(name)
