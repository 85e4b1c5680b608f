# SPDX-License-Identifier: Apache-2.0
"""Put a stage's tensors where its modules look them up.

The modules of a segment belong to a skeleton of the model, which holds no tensors. While a segment runs, the tensors
passed to it are in the tables in which modules keep parameters and buffers; afterwards the tables are restored.

Runs when a pipeline is built; the function that `seat_inputs` returns runs in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from torch import Tensor

from fpipe.record.captured import Function, Tensors, Value
from fpipe.record.model.snapshot import ContainerState, restore_containers

Seat: TypeAlias = tuple[dict[str, Any], str]
"""A place where a module keeps a tensor: one of its tables, and the name there."""
Seats: TypeAlias = Mapping[Value, Sequence[Seat]]


class Seating:
    """A context in which tensors are in their seats; on exit, the previous contents are restored.

    Each of `seats` is a table, a name, and the position in `tensors` of the tensor that belongs there.
    """

    def __init__(self, seats: Sequence[tuple[dict[str, Any], str, int]], tensors: Sequence[Tensor]) -> None:
        self.seats, self.tensors = seats, tensors

    def __enter__(self) -> None:
        seats, tensors = self.seats, self.tensors
        self.before = [table[name] for table, name, _ in seats]
        for table, name, k in seats:
            table[name] = tensors[k]

    def __exit__(self, *error: object) -> None:
        for (table, name, _), old in zip(self.seats, self.before, strict=True):
            table[name] = old


def seat_inputs(
    run: Callable[..., Tensors],
    seats: Sequence[tuple[dict[str, Any], str, int]],
    written: Sequence[ContainerState],
) -> Function:
    """Return `run(key, *inputs)` as a function that puts its inputs in their seats first.

    `seats` are as in `Seating`. `written` are the containers that a run changes; they are restored after it. A
    backward runs with the inputs in their seats, too: hooks and custom functions look weights up, checkpoints rerun.
    """

    def seat(tensors: Tensors) -> AbstractContextManager[None]:
        seating = Seating(seats, tensors)
        return restore_containers(written, tensors, seating) if written else seating

    def run_seated(key: int, *tensors: Tensor) -> Tensors:
        with seat(tensors):
            return run(key, *tensors)

    return Function(run_seated, seat)
