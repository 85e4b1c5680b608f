# SPDX-License-Identifier: Apache-2.0
"""Count the collectives of a process, and the bytes that it sends in them.

Counted are the operators of torch.distributed that this thread calls, whichever function of Python leads to them. Bytes
are those of an algorithm that sends no more than it must (a ring, or pairs), with `n` processes in the group:

| collective | bytes sent by each process |
|---|---|
| all-gather | (n - 1) / n of the result |
| reduce-scatter | (n - 1) / n of the input |
| all-to-all | the pieces of the other processes |
| all-reduce | 2 (n - 1) / n of the tensor |

A backend may send more: Gloo's reduce-scatter sends as much as its all-reduce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(NamedTuple):
    """What a process did in a step: how many collectives of each kind, and the bytes that it sent in them.

    The kinds are "gather", "reduce", "small" for those of a few bytes, "send" and "receive" for messages.
    """

    calls: dict[str, int]
    sent: dict[str, int]


def measure_traffic(step: Callable[[], object], copies: dist.ProcessGroup | None = None) -> Traffic:
    """Return the traffic of a step of this process; messages within the group of `copies` count as reductions.

    Raise `KeyError` for a collective that is not in the table.
    """
    with _Counting(copies) as found:
        step()
    return Traffic(dict(found.calls), dict(found.sent))


def most(found: Sequence[Traffic]) -> Traffic:
    """Return the maximum of each figure over processes."""
    calls, sent = Counter[str](), Counter[str]()
    for one in found:
        calls |= Counter(one.calls)
        sent |= Counter(one.sent)
    return Traffic(calls, sent)


class _Counting(TorchDispatchMode):
    """Count the operators of torch.distributed."""

    def __init__(self, copies: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.copies = copies
        self.calls, self.sent = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operator and run it."""
        if func.namespace == "c10d":
            kind, sent = KINDS[func._opname]
            kind = "reduce" if kind == "send" and dist.ProcessGroup.unbox(args[1]) == self.copies else kind
            self.calls[kind] += 1
            self.sent[kind] += sent(*args)
        return func(*args, **kwargs or {})


def _of_gather(result: Tensor, part: Tensor, *_: Any) -> int:
    return result.nbytes - part.nbytes


def _of_scatter(result: Tensor, whole: Tensor, *_: Any) -> int:
    return whole.nbytes - result.nbytes


def _of_exchange(result: Tensor, whole: Tensor, group: Any, arriving: list[int], leaving: list[int], *_: Any) -> int:
    found = dist.ProcessGroup.unbox(group)
    own = leaving[found.rank()] if leaving else len(whole) // found.size()
    return whole.nbytes - own * whole[:1].nbytes


def _of_sum(tensors: list[Tensor], group: Any, *_: Any) -> int:
    count = dist.ProcessGroup.unbox(group).size()
    return 2 * (count - 1) * _of_tensors(tensors) // count


def _of_lists(results: list[list[Tensor]], parts: list[Tensor], *_: Any) -> int:
    return sum((len(result) - 1) * part.nbytes for result, part in zip(results, parts, strict=True))


def _of_tensors(tensors: list[Tensor], *_: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _of_nothing(*_: Any) -> int:
    return 0


KINDS: Final[dict[str, tuple[str, Callable[..., int]]]] = {
    "_allgather_base_": ("gather", _of_gather),
    "_reduce_scatter_base_": ("reduce", _of_scatter),
    "alltoall_base_": ("reduce", _of_exchange),
    "allreduce_": ("reduce", _of_sum),
    "allgather_": ("small", _of_lists),
    "broadcast_": ("small", _of_tensors),
    "send": ("send", _of_tensors),
    "recv_": ("receive", _of_nothing),
}
