# SPDX-License-Identifier: Apache-2.0
"""Estimate what units cost to run: the bytes of memory that they read and write.

All that counts is which of two ways is cheaper by a wide margin, on any machine. So the estimate follows from shapes
and dtypes alone, and every rank makes the same. Views cost nothing. A multiplication and addition counts as a fraction
of a byte: kernels that are bound by arithmetic, such as matrix products, do many of them in the time of one byte.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fpipe.record.captured import Captured, Value
from fpipe.tensors.torch_private import OpOverload, TorchDispatchMode

OPERATIONS_PER_BYTE = 10
"""Floating-point operations in the time of a byte: 20 in float32 on an H100, without tensor cores; 10 on CPUs."""


def stored_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; those along a broadcast dimension count once.

    >>> stored_bytes(torch.zeros(2, 1).expand(2, 1000))
    8
    """
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.itemsize
    sizes = [size if stride else min(1, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return prod(sizes) * tensor.itemsize


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that counts the bytes that operators read and write.

    >>> with Traffic() as traffic:
    ...     _ = (torch.ones(4) + 1).view(2, 2)
    >>> traffic.count  # `ones` writes 16, `add` reads 16 and writes 16
    48
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not _is_view(func):
            self.count += sum(map(stored_bytes, _tensors((args, kwargs, out))))
            operations = flop_registry.get(getattr(func, "_overloadpacket", None))
            self.count += operations(*args, **kwargs, out_val=out) // OPERATIONS_PER_BYTE if operations else 0
        return out


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor))


def _is_view(func: Any) -> bool:
    """Return whether an operator returns views of its arguments."""
    returned = func._schema.returns if isinstance(func, OpOverload) else ()
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returned)


def measure(captured: Captured, positions: Iterable[int]) -> tuple[dict[int, int], dict[Value, Tensor]]:
    """Run pure units, in order, on fake tensors; return the traffic of each, and the fake tensors of all values."""
    values, counts = dict(captured.fakes), dict[int, int]()
    with captured.mode, torch.no_grad():
        for k in positions:
            unit = captured.units[k]
            run = captured.fuse((unit,), {}, unit.reads, unit.makes)
            with Traffic() as traffic:
                made = run(0, *[values[value] for value in unit.reads])
            counts[k] = traffic.count
            values.update(zip(unit.makes, made, strict=True))
    return counts, values
