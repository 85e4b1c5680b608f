# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients over microbatches.

Problem. Adding in place saves memory and time. But a gradient may share its memory with another one, with a cotangent,
or with anything else that a backward returns unchanged; adding to it in place would change those, too.

Idea. A sum owns its memory from the start. The first gradient is copied, unless it is *fresh*: newly computed by an
operation that returns new memory, and not returned anywhere else. That is known of a recorded stage
(`fpipe.stages.graph.simplification`); autograd's gradients are always copied. All later gradients are added in place,
ideally as soon as each is computed and still in the processor's caches.

Invariant: only sums are written, and each is the only reference to its memory.

A gradient is `None` where nothing was computed. Zeros would not do, since adding 0 turns -0 into 0.

Runs in every step.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from fpipe.tensors.effects import storage_id
from fpipe.tensors.torch_private import foreach_add_

Grads: TypeAlias = tuple[Tensor | None, ...]


def add(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Return the sum in the memory of `total`; if there is none yet, a copy of the gradient."""
    if grad is None:
        return total
    return grad.clone() if total is None else total.add_(grad)


def add_all(totals: Grads, grads: Grads) -> Grads:
    """Return the sums, in the memory of `totals`."""
    a, b = _tensors(totals), _tensors(grads)
    if len(a) < len(totals) or len(b) < len(grads):
        return tuple([add(total, grad) for total, grad in zip(totals, grads, strict=True)])
    if a:
        foreach_add_(a, b)
    return totals


def own_all(grads: list[Tensor | None], fresh: Container[int], weights: Sequence[Tensor] = ()) -> Grads:
    """Return the gradients, none in shared memory: copies replace all but the `fresh` ones, in `grads`, too.

    Copies are laid out like the `.grad` of these `weights`, if given.
    Replacing them one by one frees each before the next is copied. Of fresh ones that share memory, all but the first
    are copied, too: a compiled backward may return one tensor for two weights, if both gradients are the same product.

    >>> import torch
    >>> one, other = torch.ones(2), torch.ones(2)
    >>> owned = own_all([one, other.expand(3, 2), None], fresh={0})
    >>> owned[0] is one, owned[1].stride(), owned[2]
    (True, (2, 1), None)
    >>> own_all([one, one], fresh={0, 1})[1] is one
    False
    """
    owned = set[int]()
    for k, grad in enumerate(grads):
        if grad is not None and (k not in fresh or storage_id(grad) in owned):
            grads[k] = grad = _copy_for(weights[k], grad) if weights else grad.clone()
        owned.update(() if grad is None else (storage_id(grad),))
    return tuple(grads)


def _copy_for(weight: Tensor, grad: Tensor) -> Tensor:
    """Return a copy in the layout in which autograd keeps the first gradient of a weight: the weight's, if dense."""
    if grad.layout is not torch.strided or grad.shape != weight.shape:
        return grad.clone()
    return torch.empty_like(weight, dtype=grad.dtype, requires_grad=False).copy_(grad)


def sum_of(a: Grads, b: Grads) -> Grads:
    """Return the sums in new memory; where one is `None`, a copy of the other."""
    return tuple([_sum_of(one, other) for one, other in zip(a, b, strict=True)])


def _sum_of(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a + b if a is not None and b is not None else add(None, b if a is None else a)


def _tensors(gradients: Grads) -> list[Tensor]:
    return [tensor for tensor in gradients if tensor is not None]
