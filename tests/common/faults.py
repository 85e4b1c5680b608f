# SPDX-License-Identifier: Apache-2.0
"""Flipped bits, and stages that are wrong once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip(tensor: Tensor, place: int = 0, bit: int = 0) -> Tensor:
    """Return a copy in which one bit of one element is flipped."""
    flipped = tensor.detach().clone(memory_format=torch.contiguous_format)
    flip_in_place(flipped, place, bit)
    return flipped


def flip_in_place(tensor: Tensor, place: int = 0, bit: int = 0) -> None:
    """Flip one bit of one element of a contiguous tensor, as memory does: no version of it tells."""
    size = tensor.element_size()
    words = tensor.detach().view(-1).view(INTEGERS[size])
    word = torch.tensor(1, dtype=words.dtype) << bit % (8 * size)
    at = place % words.numel()
    words.data[at] = words[at] ^ word


def flip_some(value: Any, which: int = 0, place: int = 0, bit: int = 0) -> Any:
    """Return nested tuples and lists in which one bit of one of their tensors is flipped; lists change in place."""
    count = len(found := list(_tensors(value)))
    assert count, "there is a tensor to flip a bit of"
    return _replace(value, found[which % count], place, bit)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.numel() else []
    return [one for part in value for one in _tensors(part)] if isinstance(value, tuple | list) else []


def _replace(value: Any, chosen: Tensor, place: int, bit: int) -> Any:
    if value is chosen:
        return flip(chosen, place, bit)
    if isinstance(value, list):
        value[:] = [_replace(one, chosen, place, bit) for one in value]
        return value
    if isinstance(value, tuple):
        parts = [_replace(one, chosen, place, bit) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def plant(stage: Any, function: str, call: int, change: Callable[[Any], Any]) -> None:
    """Let call number `call` of a function of a stage return something else; `change` gets what it should return."""
    right, calls = getattr(stage, function), iter(range(10**9))

    def wrong(*arguments: Any) -> Any:
        made = right(*arguments)
        return change(made) if next(calls) == call else made

    vars(stage)[function] = wrong
