# SPDX-License-Identifier: Apache-2.0
"""The pipeline ranks that a process runs, and the turns of its threads.

One thread at a time is inside fpipe. All threads of a process share torch's default generator of each device, which a
step seeds; and both steps and captures put tensors into the pipeline's only skeleton. So while one thread is inside,
all others wait. A call that communicates with other processes must not wait, since the thread inside might itself be
waiting for it through another process; it raises instead.

Runs when a pipeline is built and in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import RLock, current_thread
from typing import Final, TypeAlias

import torch
from torch import Tensor

from fpipe.errors import InputError, TransportError
from fpipe.network.agreement import Field
from fpipe.network.waiting import Waitable
from fpipe.runtime.executor import Execution, Outcome
from fpipe.runtime.local import LocalTransport, drive_stepwise
from fpipe.runtime.transport import Route, Transport, exhaust
from fpipe.tensors.spec import Spec

Fields: TypeAlias = Callable[[], Sequence[Field]]
"""Returns the fields that must be the same on every rank; called only if there are other processes."""


class Ranks:
    """The pipeline ranks that this process runs, and its communication with the others.

    This class runs all `count` ranks of a schedule, so that there are no others. `fpipe.network.distributed` has one
    rank for each process, and overrides every method that calls no other of these.

    - `ranks`: the ranks of this process.
    - `processes`: the numbers in the job of the processes that are the ranks; none if this process is all of them.
    - `places`: the numbers of the ranks' processes among all that agree, which may be those of a mesh around them.
    - `ranks_of`: the rank that each process of the job is, by its number there; empty if this process is all ranks.
    - `stream`: what is in flight between two calls; `None` if nothing is.
    - `idle`: for how many seconds this process waited for others when it first agreed with them after `watch_idle`.
    """

    idle: float = 0.0

    def __init__(self, count: int) -> None:
        self.ranks: tuple[int, ...] = tuple(range(count))
        self.processes: tuple[int, ...] = ()
        self.places: tuple[int, ...] = (0,)
        self.ranks_of: Mapping[int, int] = {}
        self.stream: str | None = None
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._is_closed

    def close(self) -> None:
        """Release the channels, and refuse later calls; no other rank is waited for."""
        self._is_closed = True

    def enter_call(self, call: str) -> AbstractContextManager[None]:
        """Return the context for a function, named `call`, that all ranks call.

        An error on one rank before all have agreed is raised on all of them. After that, the other ranks raise
        `RankError`, and later calls raise: their messages would not match those of other ranks. Only one thread is
        inside at a time.
        """
        require_unclosed(self, call)
        require_at_rest(self, call)
        return wait_for_turn()

    def conclude(self) -> None:
        """Declare that no other rank waits for this one any more in this call, so that its errors are its own."""

    def agree(self, fields: Fields = tuple, about: str = "", note: int = 0) -> list[int]:
        """Raise `TransportError` on all ranks unless they make the same call and their `fields()` are equal.

        `about` distinguishes several agreements within one call. Return the note of each process.
        """
        return [note]

    def post_agreement(self, fields: Fields, then: Callable[[], object]) -> None:
        """Do what `agree` does, but wait for the answer only in `settle`, or later; once it is in, call `then`.

        A program that is run next may begin meanwhile. Nothing else may be sent before, and nothing changed.
        """
        then()

    def settle(self) -> None:
        """Wait for the answer of an agreement that was posted, if one was; raise what `agree` raises."""

    def watch_idle(self) -> None:
        """Measure `idle` when this process next agrees with the others."""

    def connect(self, channels: Iterable[Route]) -> None:
        """Set up these channels."""

    def forget_layouts(self) -> None:
        """Drop what is cached about the messages of plans; those that still run make it again."""

    def run(self, copies: Sequence[Callable[[int, Transport], Execution]]) -> list[dict[int, Outcome]]:
        """Drive `copy(rank, transport)` of each of this process's ranks to completion; return the outcomes per copy.

        The copies of the pipeline run together: they wait for each other's collectives.
        """
        return exhaust(self.follow(copies))

    def follow(
        self, copies: Sequence[Callable[[int, Transport], Execution]]
    ) -> Generator[None, None, list[dict[int, Outcome]]]:
        """Do what `run` does, and yield whenever an execution of this process reaches a milestone."""
        transports = [LocalTransport() for _ in copies]
        executions = [
            execution(rank, transport)
            for execution, transport in zip(copies, transports, strict=True)
            for rank in self.ranks
        ]
        outcomes, each = (yield from drive_stepwise(executions)), len(self.ranks)
        return [{r: outcomes[first + r] for r in self.ranks} for first in range(0, len(executions), each)]

    def broadcast(self, tensor: Tensor | None, spec: Spec, source: int) -> Tensor:
        """Return rank `source`'s tensor on every rank; the others pass `None`."""
        assert tensor is not None, "the source rank is in this process"
        return tensor

    def tell(self, data: Tensor | None, size: int, source: int) -> Callable[[], Tensor]:
        """Send bytes from rank `source` to each other rank; return the function that waits for them and returns them.

        The bytes are on the CPU. Unlike in a broadcast, no rank waits for a third.
        """
        assert data is not None, "the source rank is in this process"
        return lambda: data

    def wait(self, posted: Waitable) -> None:
        """Wait for what other processes do; raise `BrokenWaitError` if one of them fails, dies or falls silent."""
        posted.wait()

    def spread(self, tensor: Tensor | None, spec: Spec, member: int) -> Tensor:
        """Return on every process of the mesh the tensor that number `member` of them passes."""
        return self.broadcast(tensor, spec, member)

    def agree_if_any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return any(self.agree(about="a question to all ranks", note=int(flag)))

    def exchange_text(self, text: str, about: str = "") -> list[str]:
        """Send a text to all ranks; return every process's text, in rank order. `about` names it in errors."""
        return [text]

    def measure_clock_offset(self) -> float:
        """Return how many seconds the clock of this process is ahead of the first rank's."""
        return 0.0

    def measure_transfers(self, sizes: Sequence[int]) -> Tensor:
        """Return the seconds to send messages of these sizes in bytes: a row for each of them and each pair of ranks.

        The columns are sender, receiver, bytes and seconds. If all ranks are in this process, there are no rows.
        """
        return torch.empty(0, 4, dtype=torch.float64)

    def measure_posting(self) -> float:
        """Return the seconds that this process takes to post a send and a receive; 0 if nothing waits for that."""
        return 0.0

    def gather_rows(self, rows: Tensor) -> list[Tensor]:
        """Return the rows that each process that agrees passes, in order: CPU tensors of as many columns."""
        return [rows]

    def gather_vectors(self, vector: Tensor) -> Tensor:
        """Return the vectors of all processes, in rank order, as rows of a matrix on this process's device.

        All have the same length and dtype, on which the ranks must have agreed. The host does not wait for the device.
        """
        return vector[None]


def require_unclosed(ranks: Ranks, call: str) -> None:
    """Raise `InputError` if the pipeline of these ranks is closed."""
    if ranks.is_closed:
        raise InputError(
            f"{call}: got a closed pipeline, expected an open one. Call close() after the last step, on every rank; to "
            "go on, build the pipeline again: parameters and optimizer state carry over."
        )


TURN: Final = RLock()  # one per process, like the state that it guards


def require_at_rest(ranks: Ranks, call: str) -> None:
    """Raise `InputError` if the pipeline of these ranks has microbatches in flight."""
    if ranks.stream is not None:
        raise InputError(
            f"{call}: got a pipeline with {ranks.stream} in flight, expected one at rest. Finish it first: take all "
            "its losses, or call finish()."
        )


@contextmanager
def wait_for_turn() -> Iterator[None]:
    """Wait until no other thread is inside."""
    with TURN:
        yield


@contextmanager
def claim_turn(what: str) -> Iterator[None]:
    """Raise `TransportError` if another thread is inside; `what` names this thread's call in the error."""
    if not TURN.acquire(blocking=False):
        raise TransportError(
            f"{what}, in thread {current_thread().name!r}: got another thread that is inside fpipe, expected one "
            "thread at a time: ranks are processes, and the messages of two threads would mix. Call all functions of a "
            "pipeline from one thread, or take turns in the same order on every rank."
        )
    try:
        yield
    finally:
        TURN.release()
