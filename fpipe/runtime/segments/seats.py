# SPDX-License-Identifier: Apache-2.0
"""Put a stage's tensors where modules look for them.

The modules of a segment are those of a skeleton, which holds no tensors. While a segment runs, the tensors passed to it
are in the tables in which modules keep parameters and buffers; afterwards the tables are as before.

`Seating` is built with the segment, and entered in every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from fpipe.ir.captured import Value

Seat: TypeAlias = tuple[dict[str, Any], str]
"""Where a module keeps a tensor: one of its tables, and the name there."""
Seats: TypeAlias = Mapping[Value, Sequence[Seat]]


class Seating:
    """A context in which tensors are in their seats; on exit, what was there before is back.

    `seats` are tables, names, and the key in `tensors` of what belongs there.
    """

    def __init__(
        self, seats: Sequence[tuple[dict[str, Any], str, int]], tensors: Sequence[Tensor] | Mapping[Value, Tensor]
    ) -> None:
        self.seats, self.tensors = seats, tensors

    def __enter__(self) -> None:
        seats, tensors = self.seats, self.tensors
        self.before = [table[name] for table, name, _ in seats]
        for table, name, k in seats:
            table[name] = tensors[k]

    def __exit__(self, *error: object) -> None:
        for (table, name, _), old in zip(self.seats, self.before, strict=True):
            table[name] = old
