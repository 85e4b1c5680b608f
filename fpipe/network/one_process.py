# SPDX-License-Identifier: Apache-2.0
"""All ranks of a pipeline in this process: there is nobody to agree with.

Runs when a pipeline is built and in every step, if all ranks are in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from fpipe.network.ranks import Fields, require_unclosed, wait_for_turn
from fpipe.network.waiting import Waitable
from fpipe.runtime.executor import Execution, Outcome
from fpipe.runtime.local import LocalTransport, drive
from fpipe.runtime.transport import Route, Transport
from fpipe.tensors.spec import Spec


class LocalRanks:
    """All ranks of a schedule, in this process."""

    def __init__(self, ranks: int) -> None:
        self.ranks: tuple[int, ...] = tuple(range(ranks))
        self.processes: tuple[int, ...] = ()
        self.places: tuple[int, ...] = (0,)
        self.is_closed = False

    def close(self) -> None:
        """Refuse later calls."""
        self.is_closed = True

    def enter_call(self, call: str) -> AbstractContextManager[None]:
        """Wait until no other thread is inside."""
        require_unclosed(self, call)
        return wait_for_turn()

    def conclude(self) -> None:
        """Do nothing: no other process waits."""

    def agree(self, fields: Fields = tuple, about: str = "", note: int = 0) -> list[int]:
        """Return the note: every rank is here."""
        return [note]

    def connect(self, channels: Iterable[Route]) -> None:
        """Do nothing: each run creates its own channels."""

    def forget_layouts(self) -> None:
        """Do nothing: messages are passed by reference."""

    def run(self, copies: Sequence[Callable[[int, Transport], Execution]]) -> list[dict[int, Outcome]]:
        """Step all ranks of all copies until all have finished; raise `DeadlockError` if none can proceed."""
        transports = [LocalTransport() for _ in copies]
        executions = [
            execution(rank, transport)
            for execution, transport in zip(copies, transports, strict=True)
            for rank in self.ranks
        ]
        outcomes, each = drive(executions), len(self.ranks)
        return [{r: outcomes[first + r] for r in self.ranks} for first in range(0, len(executions), each)]

    def broadcast(self, tensor: Tensor | None, spec: Spec, source: int) -> Tensor:
        """Return the tensor: every rank is here."""
        assert tensor is not None, "the source rank is in this process"
        return tensor

    def wait(self, posted: Waitable) -> None:
        """Wait for it."""
        posted.wait()

    def spread(self, tensor: Tensor | None, spec: Spec, member: int) -> Tensor:
        """Return the tensor: every process is this one."""
        return self.broadcast(tensor, spec, member)

    def agree_if_any(self, flag: bool) -> bool:
        """Return the flag: every rank is here."""
        return flag

    def exchange_text(self, text: str, about: str = "") -> list[str]:
        """Return the text: every rank is here."""
        return [text]

    def measure_clock_offset(self) -> float:
        """Return 0: there is one clock."""
        return 0.0

    def measure_transfers(self, sizes: Sequence[int]) -> Tensor:
        """Return no rows: values are passed by reference."""
        return torch.empty(0, 4, dtype=torch.float64)

    def measure_posting(self) -> float:
        """Return 0: posting is part of an action here."""
        return 0.0

    def gather_rows(self, rows: Tensor) -> list[Tensor]:
        """Return the rows: every rank is here."""
        return [rows]

    def gather_vectors(self, vector: Tensor) -> Tensor:
        """Return the vector as the only row: every rank is here."""
        return vector[None]
