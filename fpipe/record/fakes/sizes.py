# SPDX-License-Identifier: Apache-2.0
"""Sizes that torch calls read from tensors without dimensions: `x.view(n, -1)`, `x[:n]`, where `n` is a tensor.

Torch reads them where no torch function mode sees it. So whoever answers questions about values reads them first, one
`int(n)` each, in the same order when the call is recorded and when it is answered again.

Runs when a pipeline is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

SIZED: Final[Mapping[Any, int]] = MappingProxyType(
    {
        **dict.fromkeys((Tensor.view, Tensor.reshape, Tensor.expand, Tensor.repeat, Tensor.unflatten), 1),
        **dict.fromkeys((Tensor.as_strided, Tensor.split, Tensor.unfold, torch.reshape, torch.split), 1),
        **dict.fromkeys((Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full), 1),
        **dict.fromkeys((Tensor.__getitem__, Tensor.__setitem__, nn.functional.interpolate), 1),
    }
)
"""Functions that read sizes beside another tensor, and where their sizes begin.

Those without another tensor, such as `torch.zeros`, are questions themselves: sizes decide all of their result.
"""
INDEXING: Final = frozenset({Tensor.__getitem__, Tensor.__setitem__})
"""Functions whose sizes are the bounds of slices."""
SIZE_TYPES: Final = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def read_sizes(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a function of `SIZED`, with numbers in the place of tensors that hold sizes."""
    first, read = SIZED[function], _read_bounds if function in INDEXING else _read
    return (*args[:first], *map(read, args[first:])), {name: read(one) for name, one in kwargs.items()}


def _read_bounds(index: Any) -> Any:
    """Return an index with numbers in the place of tensors that bound its slices; other tensors are indices."""
    if isinstance(index, tuple):
        return tuple(map(_read_bounds, index))
    return slice(*map(_read, (index.start, index.stop, index.step))) if isinstance(index, slice) else index


def _read(argument: Any) -> Any:
    if isinstance(argument, tuple | list):
        return type(argument)(map(_read, argument))
    is_size = isinstance(argument, Tensor) and not argument.dim() and argument.dtype in SIZE_TYPES
    return int(argument) if is_size else argument
