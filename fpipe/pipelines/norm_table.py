# SPDX-License-Identifier: Apache-2.0
"""The table in which ranks exchange one number per gradient, and the order of these numbers on one device.

Problem. Which gradients there are may depend on data, and their dtypes on how they were summed. The norm of the norms
depends, in its last bit, on how many there are and in which order they come: a zero for a gradient that does not exist
changes it.

Idea. Each process sends the norms of the gradients that it owns, in its own order, as one row of a table. Which
gradients these are rarely changes, so it is exchanged as text, once, and the `NormTable` made of it is kept.

If gradients are sharded, or if the model's modules have split them into parts, a process sends the norms of its shards
and parts. The norm of a gradient is made of those, as torch makes it for DTensors: the root of the sum of powers, first
over shards, then over parts.

Invariant: the order does not depend on ranks, cuts or schedules: first by dtype, as torch goes through tensors of
several dtypes, then as in `model.named_parameters()`.

Runs in a step whose gradients exist, or are of dtypes, as in none before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from fpipe.tensors.torch_private import order_dtypes


class NormTable(NamedTuple):
    """The places of the norms of a model's gradients in a table with a row for each process, and each shard there.

    - `columns`: the length of a row; `dtype`: of its numbers, which every norm's dtype converts to without rounding.
    - `places`: for each part and shard, where the norms are in the flattened table, in the order of one device; at the
      end of it, where a 0 is appended, for a gradient that has no such shard.
    """

    columns: int
    dtype: torch.dtype
    places: Tensor

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, str]], names: Iterable[str], device: torch.device) -> NormTable:
        """Return the table of these gradients: the numbers of a part and of a shard, and a text of `list_gradients`.

        There is one of these for each row. `names` are those of all the model's parameters, in its order.
        """
        lists = [[line.rsplit(" ", 1) for line in row.splitlines()] for _, _, row in rows]
        columns, order = max([1, *map(len, lists)]), tuple(names)
        counts = 1 + max(part for part, _, _ in rows), 1 + max(shard for _, shard, _ in rows)
        found: list[dict[str, tuple[int, str]]] = [{} for _ in range(counts[0] * counts[1])]
        for r, (part, shard, _) in enumerate(rows):
            own = {name: (r * columns + k, kind) for k, (name, kind) in enumerate(lists[r])}
            found[part * counts[1] + shard].update(own)
        of = {name: kind for one in found for name, (_, kind) in one.items()}
        present = [name for name in order if name in of]
        kinds = order_dtypes([getattr(torch, kind) for kind in dict.fromkeys(of[name] for name in present)], device)
        dtype = reduce(torch.promote_types, [kind.to_real() for kind in kinds] or [torch.get_default_dtype()])
        ordered = [name for kind in kinds for name in present if getattr(torch, of[name]) == kind]
        nothing = (len(rows) * columns, "")
        places = torch.tensor([[one.get(name, nothing)[0] for name in ordered] for one in found], dtype=torch.int64)
        return cls(columns, dtype, places.reshape(*counts, -1).to(device))

    def row(self, norms: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return this process's row."""
        row = torch.zeros(self.columns, dtype=self.dtype, device=device)
        if norms:
            row[: len(norms)] = torch.stack([norm.to(self.dtype) for norm in norms])
        return row

    def combine(self, rows: Tensor, order: float) -> Tensor:
        """Return the norm of all norms; 0 if there is none, as `torch.nn.utils.get_total_norm` returns."""
        if not self.places.numel():
            return torch.tensor(0.0, device=rows.device)
        norms = torch.cat([rows.flatten(), rows.new_zeros(1)])[self.places]
        norms = _join_norms(torch.stack([_join_norms(shards, order) for shards in norms]), order)
        total: Tensor = torch.linalg.vector_norm(norms, order)
        return total


def _join_norms(norms: Tensor, order: float) -> Tensor:
    """Return the norm of each gradient, given a row with the norms of each of its shards or parts.

    >>> _join_norms(torch.tensor([[3.0, 1.0], [4.0, 0.0]]), 2.0)
    tensor([5., 1.])
    """
    if len(norms) == 1:
        return norms[0]
    if order == torch.inf:
        return norms.amax(0)
    return reduce(add, (norms**order).unbind()) ** (1 / order)


def list_gradients(grads: Iterable[tuple[str, Tensor]]) -> str:
    """Return a line for each gradient: its name and dtype.

    >>> list_gradients([("bias", torch.ones(2)), ("weight", torch.ones(2, 2).half())])
    'bias float32\\nweight float16'
    """
    return "\n".join([f"{name} {str(grad.dtype).removeprefix('torch.')}" for name, grad in grads])
