# SPDX-License-Identifier: Apache-2.0
"""Estimate what units cost to run: the bytes of memory that they read and write.

All that counts is which of two ways is cheaper by a wide margin, on any machine. So the estimate follows from shapes
and dtypes alone, and every rank makes the same. Views cost nothing. A multiplication and addition counts as a fraction
of a byte: kernels that are bound by arithmetic, such as matrix products, do many of them in the time of one byte.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import prod
from typing import Any, Final, TypeVar

import optree
import torch
from torch import Tensor

from fpipe.record.captured import Captured, Value
from fpipe.tensors.torch_private import TorchDispatchMode

OPERATIONS_PER_BYTE: Final = 10
"""Floating-point operations in the time of a byte: 20 in float32 on an H100, without tensor cores; 10 on CPUs."""
COSTLESS: Final = ("aten::empty", "aten::new_empty", "prim::")
"""Operators that neither compute nor move anything."""
ALIASES: Final = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
}
"""Operators that `flop_registry` lacks, and those that do the same arithmetic."""
_Result = TypeVar("_Result")


def stored_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; those along a broadcast dimension count once.

    >>> stored_bytes(torch.zeros(2, 1).expand(2, 1000))
    8
    """
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.itemsize
    sizes = [size if stride else min(1, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return prod(sizes) * tensor.itemsize


class OperatorCosts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that adds up what operators cost: a function of their FLOPs, and of the bytes of their tensors.

    Views cost nothing.

    >>> traffic, _ = OperatorCosts(lambda flops, traffic: traffic).measure(lambda: (torch.ones(4) + 1).view(2, 2))
    >>> traffic  # `ones` writes 16, `add` reads 16 and writes 16
    48
    """

    def __init__(self, cost: Callable[[float, int], float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cost, self.total = cost, 0.0

    def measure(self, work: Callable[[], _Result]) -> tuple[float, _Result]:
        """Return the cost of a call, and its result."""
        self.total = 0
        with self:
            found = work()
        return self.total, found

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not (getattr(func, "is_view", False) or func.name().startswith(COSTLESS)):
            leaves: Any = optree.tree_leaves((args, kwargs, out))  # type: ignore[arg-type]
            traffic = sum(stored_bytes(one) for one in leaves if isinstance(one, Tensor))
            self.total += self.cost(_count_flops(func, args, kwargs, out), traffic)
        return out


def _count_flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Return the FLOPs of an operator; 0 if nobody counts them."""
    from torch.utils.flop_counter import flop_registry  # slow to import

    packet = getattr(func, "overloadpacket", None)
    packet = getattr(torch.ops.aten, ALIASES.get(getattr(packet, "__name__", ""), ""), packet)
    return float(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else 0.0


def measure(captured: Captured, positions: Iterable[int]) -> tuple[dict[int, float], dict[Value, Tensor]]:
    """Run pure units, in order, on fake tensors; return the traffic of each, and the fake tensors of all values."""
    values, counts = dict(captured.fakes), dict[int, float]()
    counting = OperatorCosts(lambda flops, traffic: traffic + flops // OPERATIONS_PER_BYTE)
    with captured.mode, torch.no_grad():
        for k in positions:
            unit = captured.units[k]
            run = captured.fuse((unit,), {}, unit.reads, unit.makes)
            counts[k], made = counting.measure(partial(run, 0, *[values[value] for value in unit.reads]))
            values.update(zip(unit.makes, made, strict=True))
    return counts, values
