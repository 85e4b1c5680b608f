# SPDX-License-Identifier: Apache-2.0
"""Select elements by a mask; only the mask decides how many there are.

So `logits[labels > 0]` asks about the labels alone, though the logits depend on parameters. On fake tensors, the mask
is replaced by as many indices as it has true elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fpipe.ir.questions import Answer

Counts = Sequence[int]


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def counts(masks: Sequence[Tensor]) -> list[int]:
    """Return how many elements each mask selects."""
    return [int(mask.count_nonzero()) for mask in masks]


def deciding(function: Any, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return the masks that decide the shape of a call's result; none if something else does."""
    return DECIDING[function](*args) if function in DECIDING and len(args) == 2 else ()


def _masks(tensor: Tensor, index: Any) -> tuple[Tensor, ...]:
    return tuple(filter(_is_mask, index if isinstance(index, tuple) else (index,)))


def _mask(tensor: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    return (mask,)


DECIDING: Mapping[Any, Callable[..., tuple[Tensor, ...]]] = MappingProxyType(
    {Tensor.__getitem__: _masks, torch.masked_select: _mask, Tensor.masked_select: _mask}
)


def given(function: Any, args: Sequence[Any], answer: Answer) -> Any:
    """Return a call's result on fake tensors, once its question has been answered."""
    found = answer.result()
    if not deciding(function, args):
        return found
    tensor, index = args
    return _picked(tensor, index, found) if function is Tensor.__getitem__ else _spread(tensor, index, found[0])


def _picked(tensor: Tensor, index: Any, found: Counts) -> Tensor:
    numbers = iter(found)
    parts = index if isinstance(index, tuple) else (index,)
    return tensor[tuple(part for one in parts for part in _replaced(tensor, one, numbers))]


def _spread(tensor: Tensor, mask: Tensor, count: int) -> Tensor:
    """Select by a mask after broadcasting it and the tensor to one shape."""
    whole = tensor * torch.ones_like(mask, dtype=tensor.dtype)
    times = whole.numel() // max(1, mask.numel())
    return whole.reshape(-1)[_indices(tensor, count * times)]


def _replaced(tensor: Tensor, index: Any, numbers: Iterator[int]) -> list[Any]:
    return [_indices(tensor, next(numbers))] * index.dim() if _is_mask(index) else [index]


def _indices(tensor: Tensor, count: int) -> Tensor:
    return torch.empty(count, dtype=torch.int64, device=tensor.device)
