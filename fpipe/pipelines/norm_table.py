# SPDX-License-Identifier: Apache-2.0
"""The table in which ranks exchange one number per gradient, and the order of these numbers on one device.

Problem. Which gradients there are may depend on data, and their dtypes on how they were summed. The norm of the norms
depends, in its last bit, on how many there are and in which order they come: a zero for a gradient that does not exist
changes it.

Idea. Each process sends the norms of the gradients that it owns, in its own order, as one row of a table. Which
gradients these are rarely changes, so it is exchanged as text, once, and the `NormTable` made of it is kept.

Invariant: the order does not depend on ranks, cuts or schedules: first by dtype, as torch goes through tensors of
several dtypes, then as in `model.named_parameters()`.

Runs in a step whose gradients exist, or are of dtypes, as in none before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from fpipe.torch_private import order_dtypes


class NormTable(NamedTuple):
    """The places of the norms of a model's gradients in a table with a row for each process.

    - `columns`: the length of a row; `dtype`: of its numbers, which every norm's dtype converts to without rounding.
    - `places`: where the norms are in the flattened table, in the order of one device.
    """

    columns: int
    dtype: torch.dtype
    places: Tensor

    @classmethod
    def of(cls, rows: Sequence[str], names: Iterable[str], device: torch.device) -> NormTable:
        """Return the table of these gradients: a text of `list_gradients` for each process.

        `names` are those of all the model's parameters, in its order.
        """
        parts = [[line.rsplit(" ", 1) for line in row.splitlines()] for row in rows]
        columns = max([1, *map(len, parts)])
        found = {name: (r * columns + k, kind) for r, row in enumerate(parts) for k, (name, kind) in enumerate(row)}
        by_dtype: dict[torch.dtype, list[int]] = {}
        for name in names:
            if name in found:
                place, kind = found[name]
                by_dtype.setdefault(getattr(torch, kind), []).append(place)
        kinds = order_dtypes(list(by_dtype), device)
        dtype = reduce(torch.promote_types, [kind.to_real() for kind in kinds] or [torch.get_default_dtype()])
        places = torch.tensor([place for kind in kinds for place in by_dtype[kind]], dtype=torch.int64, device=device)
        return cls(columns, dtype, places)

    def row(self, norms: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return this process's row."""
        row = torch.zeros(self.columns, dtype=self.dtype, device=device)
        if norms:
            row[: len(norms)] = torch.stack([norm.to(self.dtype) for norm in norms])
        return row

    def combine(self, rows: Tensor, order: float) -> Tensor:
        """Return the norm of all norms; 0 if there is none, as `torch.nn.utils.get_total_norm` returns."""
        if not len(self.places):
            return torch.tensor(0.0, device=rows.device)
        total: Tensor = torch.linalg.vector_norm(rows.flatten()[self.places], order)
        return total


def list_gradients(grads: Iterable[tuple[str, Tensor]]) -> str:
    """Return a line for each gradient: its name and dtype.

    >>> list_gradients([("bias", torch.ones(2)), ("weight", torch.ones(2, 2).half())])
    'bias float32\\nweight float16'
    """
    return "\n".join([f"{name} {str(grad.dtype).removeprefix('torch.')}" for name, grad in grads])
