# SPDX-License-Identifier: Apache-2.0
"""Select elements of fake tensors by a mask.

Only the mask decides how many elements are selected. So `logits[labels > 0]` asks about the labels alone, though the
logits depend on parameters. On fake tensors, the mask is replaced by as many indices as it has true elements.

Runs when a pipeline is built, on fake tensors; `count_selected` runs on real masks, also at the start of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fpipe.record.questions import Answer

Counts = Sequence[int]


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def count_selected(masks: Sequence[Tensor]) -> list[int]:
    """Return how many elements each mask selects."""
    return [int(mask.count_nonzero()) for mask in masks]


def deciding_masks(function: Any, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return the masks that decide the shape of a call's result; none if something else does."""
    return MASKS[function](*args) if function in MASKS and len(args) == 2 else ()


def _masks_in_index(tensor: Tensor, index: Any) -> tuple[Tensor, ...]:
    return tuple(filter(_is_mask, index if isinstance(index, tuple) else (index,)))


def _the_mask(tensor: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    return (mask,)


MASKS: Mapping[Any, Callable[..., tuple[Tensor, ...]]] = MappingProxyType(
    {Tensor.__getitem__: _masks_in_index, torch.masked_select: _the_mask, Tensor.masked_select: _the_mask}
)
"""Torch functions that select by masks, and which of their two arguments' tensors are the masks."""


def result_on_fakes(function: Any, args: Sequence[Any], answer: Answer) -> Any:
    """Return a call's result on fake tensors, once its question has been answered."""
    result = answer.result()
    if not deciding_masks(function, args):
        return result
    tensor, index = args
    return (
        _get_items(tensor, index, result)
        if function is Tensor.__getitem__
        else _select_by_mask(tensor, index, result[0])
    )


def _get_items(tensor: Tensor, index: Any, counts: Counts) -> Tensor:
    remaining = iter(counts)
    parts = index if isinstance(index, tuple) else (index,)
    return tensor[tuple(part for one in parts for part in _without_mask(tensor, one, remaining))]


def _select_by_mask(tensor: Tensor, mask: Tensor, count: int) -> Tensor:
    """Select by a mask after broadcasting it and the tensor to one shape."""
    whole = tensor * torch.ones_like(mask, dtype=tensor.dtype)
    times = whole.numel() // max(1, mask.numel())
    return whole.reshape(-1)[_empty_indices(tensor, count * times)]


def _without_mask(tensor: Tensor, index: Any, counts: Iterator[int]) -> list[Any]:
    """Return a mask as index tensors, one for each of its dimensions; any other index unchanged."""
    return [_empty_indices(tensor, next(counts))] * index.dim() if _is_mask(index) else [index]


def _empty_indices(tensor: Tensor, count: int) -> Tensor:
    return torch.empty(count, dtype=torch.int64, device=tensor.device)
