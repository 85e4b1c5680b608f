# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients over microbatches.

A gradient is `None` where nothing was computed: adding zeros is not the same, since it makes zeros of negative ones.

Later gradients are added to the first ones in place, best as soon as each is there, when it is in the processor's
caches still. But gradients may share memory with each other, with cotangents, with whatever a backward returns as it
is. So the first are copied, unless nobody else can have their memory: new memory costs more than adding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Gradients: TypeAlias = tuple[Tensor | None, ...]
Put: TypeAlias = Callable[[Tensor | None, Tensor | None], Tensor | None]
"""A total, given the total before and a gradient: `added`, or `alone`."""


def summed(total: Gradients, grads: Gradients, count: int) -> Gradients:
    """The sum of `total`, of `count` terms, and one more; `total` may be used up."""
    if not count:
        return owned(grads)
    a, b = _tensors(total), _tensors(grads)
    if len(a) < len(total) or len(b) < len(grads):
        return tuple([added(one, other) for one, other in zip(total, grads, strict=True)])
    if a:
        torch._foreach_add_(a, b)
    return total


def owned(grads: Gradients) -> Gradients:
    """The gradients, in memory that nobody else has.

    >>> alone, shared = torch.ones(2), torch.ones(2)
    >>> first = owned((torch.ones(2), shared, shared.view(2), alone.expand(3, 2)))
    >>> first[1] is shared, first[3].stride()
    (False, (2, 1))
    """
    with torch.no_grad():
        own = [torch.empty(1, 1), torch.empty(1, 1).t()]  # nobody has these, or what the second is a view of
    alone = [_holders(one) for one in own]
    holders = [_holders(one) for one in grads]
    return tuple([one if found in alone else copied(one) for one, found in zip(grads, holders, strict=True)])


def _holders(tensor: Tensor | None) -> tuple[int, ...]:
    """How many have the tensor, in Python and besides; how many its memory, and what it is a view of.

    And how many bytes of that memory it does not use.
    """
    if tensor is None or tensor.layout is not torch.strided:
        return ()
    storage, base = tensor.untyped_storage(), tensor._base
    unused = storage.nbytes() - tensor.numel() * tensor.element_size()
    return (*_references(tensor), *_references(base), torch._C._storage_Use_Count(storage._cdata), unused)


def _references(tensor: Any) -> tuple[int, int]:
    return (0, 0) if tensor is None else (sys.getrefcount(tensor), tensor._use_count())


def copied(tensor: Tensor | None) -> Tensor | None:
    """The same in memory of its own; a sparse tensor has no layout to choose."""
    if tensor is None or tensor.layout is not torch.strided:
        return None if tensor is None else tensor.clone()
    return tensor.clone(memory_format=torch.contiguous_format)


def _tensors(gradients: Gradients) -> list[Tensor]:
    return [tensor for tensor in gradients if tensor is not None]


def added(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """The sum, in the memory of `total` or in new memory."""
    if grad is None or total is None:
        return total if grad is None else grad.clone()
    return total.add_(grad)


def alone(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """The gradient itself, where there is no sum yet."""
    return grad
