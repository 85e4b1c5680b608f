# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients over microbatches.

A gradient is `None` where nothing was computed; zeros would not do, since adding 0 turns -0 into 0.

Later gradients are added to the first in place, ideally as soon as each is computed and still in the processor's
caches. But gradients may share memory with each other, with cotangents, or with anything else that a backward returns
unchanged. So the first are copied, unless nothing else can refer to their memory: new memory costs more than adding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fpipe.torch_private import count_storages, foreach_add_

Gradients: TypeAlias = tuple[Tensor | None, ...]
Put: TypeAlias = Callable[[Tensor | None, Tensor | None], Tensor | None]
"""Returns the new total, given the old total and a gradient: `added`, or `alone`."""


def summed(total: Gradients, grads: Gradients, count: int) -> Gradients:
    """Return `total`, the sum of `count` terms, plus one more; `total` may be consumed."""
    if not count:
        return owned(grads)
    a, b = _tensors(total), _tensors(grads)
    if len(a) < len(total) or len(b) < len(grads):
        return tuple([added(one, other) for one, other in zip(total, grads, strict=True)])
    if a:
        foreach_add_(a, b)
    return total


def owned(grads: Gradients) -> Gradients:
    """Return the gradients in memory that nothing else refers to.

    >>> alone, shared = torch.ones(2), torch.ones(2)
    >>> first = owned((torch.ones(2), shared, shared.view(2), alone.expand(3, 2)))
    >>> first[1] is shared, first[3].stride()
    (False, (2, 1))
    """
    with torch.no_grad():
        own = [torch.empty(1, 1), torch.empty(1, 1).t()]  # nothing else refers to these, or to the second's base
    alone = [_holders(one) for one in own]
    holders = [_holders(one) for one in grads]
    return tuple([one if found in alone else copied(one) for one, found in zip(grads, holders, strict=True)])


def _holders(tensor: Tensor | None) -> tuple[int, ...]:
    """Return the reference counts of the tensor, of its base and of its memory.

    The last entry is the number of bytes of that memory that the tensor doesn't use.
    """
    if tensor is None or tensor.layout is not torch.strided:
        return ()
    storage, base = tensor.untyped_storage(), tensor._base
    unused = storage.nbytes() - tensor.numel() * tensor.element_size()
    return (*_references(tensor), *_references(base), count_storages(storage._cdata), unused)


def _references(tensor: Any) -> tuple[int, int]:
    return (0, 0) if tensor is None else (sys.getrefcount(tensor), tensor._use_count())


def copied(tensor: Tensor | None) -> Tensor | None:
    """Return a contiguous copy; a sparse tensor is just cloned, since it has no layout to choose."""
    if tensor is None or tensor.layout is not torch.strided:
        return None if tensor is None else tensor.clone()
    return tensor.clone(memory_format=torch.contiguous_format)


def _tensors(gradients: Gradients) -> list[Tensor]:
    return [tensor for tensor in gradients if tensor is not None]


def added(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Return the sum, in the memory of `total` or in new memory."""
    if grad is None or total is None:
        return total if grad is None else grad.clone()
    return total.add_(grad)


def alone(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Return the gradient itself, when there is no sum yet."""
    return grad
