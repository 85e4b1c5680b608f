# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients over microbatches.

A gradient is `None` where nothing was computed: adding zeros is not the same, since it makes zeros of negative ones.

The first sum is the first gradients as they are, and the second is new memory, since gradients may share memory with
each other and with cotangents. From then on the sum is the stage's own, and later gradients are added in it, best as
soon as each is there, when it is in the processor's caches still.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from fpipe.executor import OWN
from fpipe.spec import Spec

Gradients: TypeAlias = tuple[Tensor | None, ...]


def summed(total: Gradients, grads: Gradients, count: int) -> Gradients:
    """The sum of `total`, of `count` terms, and one more; `total` may be used up."""
    if not count or not grads:
        return grads
    a, b = _tensors(total), _tensors(grads)
    if len(a) < len(total) or len(b) < len(grads):
        return tuple([_sum(one, other, count) for one, other in zip(total, grads, strict=True)])
    if count < OWN:
        return tuple(torch._foreach_add(a, b))
    torch._foreach_add_(a, b)
    return total


def _sum(total: Tensor | None, grad: Tensor | None, count: int) -> Tensor | None:
    if total is None or grad is None or count >= OWN:
        return added(total, grad) if count >= OWN else _copy(grad if total is None else total)
    return total + grad


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _tensors(gradients: Gradients) -> list[Tensor]:
    return [tensor for tensor in gradients if tensor is not None]


def added(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """The sum, in the memory of `total` or in new memory."""
    if grad is None or total is None:
        return total if grad is None else grad.clone()
    return total.add_(grad)


def own(total: Tensor | None, reached: Tensor | None) -> Tensor | None:
    """What autograd has added `total` to: that, or new memory where there was none and it may have taken another's."""
    return _copy(reached) if total is None else total


def whole(total: Gradients, specs: Sequence[Spec]) -> tuple[Tensor, ...]:
    """The finished sum, with zeros for what no microbatch has made a gradient of."""
    return tuple([spec.strided().zero_() if one is None else one for one, spec in zip(total, specs, strict=True)])
