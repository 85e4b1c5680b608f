# SPDX-License-Identifier: Apache-2.0
"""Refuse batches whose leaves share memory that the model modifies in place.

Problem. A stage copies what it modifies, so that no argument is modified. On one device, everything that shares the
memory would see the change: a target that is the input itself, the next of two overlapping windows.

Idea. Sharing memory is fine as long as nothing writes to it. So leaves are compared only if the model writes to one,
and then byte by byte: columns of one matrix are interleaved, but share nothing.

Runs in every step; leaves are compared only if the model modifies one in place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from fpipe.errors import InputError
from fpipe.tensors.torch_private import FakeTensor


class Memory(NamedTuple):
    """The tensors whose memory a leaf's microbatches use on one device; empty if the process lacks the leaf."""

    name: str
    tensors: tuple[Tensor, ...]


def require_apart(memories: Sequence[Memory], written: Collection[int]) -> None:
    """Raise `InputError` if a leaf that the model modifies in place shares memory with another, or within itself.

    `written` has the numbers of the leaves that it modifies.
    """
    for name, tensors in (memories[k] for k in sorted(written) if k < len(memories)):
        if any(map(_has_inner_overlap, tensors)) or any(has_overlap(*pair) for pair in combinations(tensors, 2)):
            raise InputError(
                f"{name}: got microbatches that share memory, which the model modifies in place, expected separate "
                "memory for each: on one device, one would see the changes of another. Clone the leaf, or split it "
                "with a function in batch_dims that clones: lambda x, m: [x.clone() for _ in range(m)]."
            )
        for other, theirs in memories:
            if other != name and any(has_overlap(a, b) for a in tensors for b in theirs):
                raise InputError(
                    f"{name}: got memory that it shares with {other} and that the model modifies in place, expected "
                    f"separate memory: on one device, {other} would change with it. Pass a clone of one of them."
                )


def has_overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have a byte in common.

    >>> rows = torch.zeros(4, 6)
    >>> has_overlap(rows[:, :3], rows[:, 3:]), has_overlap(rows[:, :4], rows[:, 3:])
    (False, True)
    """
    (first, stop), (start, end) = _range(a), _range(b)
    if a.device != b.device or max(first, start) >= min(stop, end):
        return False
    low, high = min(first, start), max(stop, end)
    return bool((_byte_mask(a, low, high) & _byte_mask(b, low, high)).any())


def find_overlap(tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Return the names of two tensors that have a byte in common, or twice that of one in which elements have.

    >>> rows = torch.zeros(4, 6)
    >>> find_overlap({"left": rows[:, :3], "right": rows[:, 3:]}), find_overlap({"all": rows, "first": rows[0]})
    (None, ('all', 'first'))
    """
    strided = [(name, tensor) for name, tensor in tensors.items() if tensor.layout is torch.strided]
    inner = next((name for name, tensor in strided if _has_inner_overlap(tensor)), None)
    if inner is not None:
        return inner, inner
    ranges = sorted(((*_range(tensor), k) for k, (_, tensor) in enumerate(strided)))
    stop, last = 0, 0
    for start, end, k in ranges:
        if start < stop and has_overlap(strided[last][1], strided[k][1]):
            first, second = sorted((last, k))
            return strided[first][0], strided[second][0]
        if end > stop:
            stop, last = end, k
    return None


def _has_inner_overlap(tensor: Tensor) -> bool:
    if tensor.is_contiguous() or isinstance(tensor, FakeTensor):
        return False
    return int(_byte_mask(tensor, *_range(tensor)).sum()) < tensor.numel() * tensor.element_size()


def _range(tensor: Tensor) -> tuple[int, int]:
    """Return the address of the first byte, and the address after the last."""
    if tensor.device.type == "meta" or isinstance(tensor, FakeTensor) or not tensor.numel():
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


def _byte_mask(tensor: Tensor, low: int, high: int) -> Tensor:
    """Return a mask of the bytes between two addresses that belong to the tensor."""
    width, found = tensor.element_size(), torch.zeros(high - low, dtype=torch.bool)
    shape = [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    steps = [stride * width for stride in tensor.stride()]
    found.as_strided((*shape, width), (*steps, 1), tensor.data_ptr() - low).fill_(True)
    return found
