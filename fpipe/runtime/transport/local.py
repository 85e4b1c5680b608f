# SPDX-License-Identifier: Apache-2.0
"""All ranks in one process: values are passed by reference, and the driver steps the ranks in turn.

A channel is a queue of zero capacity: the oldest send meets the oldest receive, and both are done. So a program that
runs here posts its sends and receives in the same order, as every transport requires.

A rank runs until it must wait, and is stepped again when its handle is done. If no rank can be stepped and some are
unfinished, that is a deadlock, detected at once.

Runs when a pipeline is built and in every step, if all ranks are in this process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fpipe.errors import DeadlockError, TransportError
from fpipe.runtime.executor import Execution, Outcome
from fpipe.runtime.ranks import Fields, require_unclosed, wait_for_turn
from fpipe.runtime.transport.interface import Payload, Route, Transport, posted_action
from fpipe.runtime.transport.waiting import Waitable
from fpipe.tensors.spec import Spec
from schedules.language.actions import Message, receive_of


class LocalHandle:
    """A message within this process; both of its ends hold the same object.

    `end` is the end that was posted first; once the other is posted, the handle `is_done`, and `wake` is called if
    somebody waits.
    """

    __slots__ = ("end", "is_done", "message", "payload", "wake")

    def __init__(self, end: str, message: Message) -> None:
        self.end, self.message = end, message
        self.payload: Payload = ()
        self.is_done = False
        self.wake: Callable[[], None] | None = None

    def finish(self, payload: Payload) -> None:
        """Store what arrived, and wake who waits for it."""
        self.payload, self.is_done = payload, True
        if self.wake is not None:
            self.wake()

    def take(self) -> Payload:
        """Return the payload, and drop it from the handle."""
        payload, self.payload = self.payload, ()
        return payload


class LocalChannel:
    """A channel within one process.

    Invariant: the waiting handles are all sends or all receives, since opposite ends meet at once.
    """

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: deque[LocalHandle] = deque()

    def send(self, message: Message, payload: Payload, specs: tuple[Any, ...]) -> LocalHandle:
        """Post a send."""
        waiting = self.waiting
        if waiting and waiting[0].end == "RECV":
            posted = self._oldest(message)
            posted.finish(payload)
        else:
            posted = LocalHandle("SEND", message)
            posted.payload = payload
            waiting.append(posted)
        return posted

    def receive(self, message: Message, specs: tuple[Any, ...]) -> LocalHandle:
        """Post a receive; what arrives is the very object that was sent."""
        waiting = self.waiting
        if waiting and waiting[0].end == "SEND":
            posted = self._oldest(message)
            posted.finish(posted.payload)
            return posted
        posted = LocalHandle("RECV", message)
        waiting.append(posted)
        return posted

    def _oldest(self, message: Message) -> LocalHandle:
        """Return the oldest waiting handle; raise `TransportError` unless it is for `message`."""
        posted = self.waiting.popleft()
        if posted.message != message:
            raise _disorder_error(posted, message)
        return posted


def _disorder_error(posted: LocalHandle, other: Message) -> TransportError:
    send, receive = (posted.message, other) if posted.end == "SEND" else (other, posted.message)
    return TransportError(
        f"a channel: got {send} first, expected the message of {receive_of(receive)}. Post both ends "
        "of a channel in the same order: run programs as lower() returns them."
    )


class LocalTransport:
    """Channels within one process, created at their first use."""

    def __init__(self) -> None:
        self.channels: dict[Route, LocalChannel] = {}

    def channel(self, source: int, target: int) -> LocalChannel:
        """Return the channel; both ends share it."""
        return self.channels.setdefault((source, target), LocalChannel())


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


def drive(executions: Sequence[Execution]) -> list[Outcome]:
    """Step these executions in turn, each as far as it can go; raise `DeadlockError` if none can proceed."""
    runs = [execution.run() for execution in executions]
    waiting: dict[int, LocalHandle] = {}
    outcomes: dict[int, Outcome] = {}
    ready = deque(range(len(runs)))
    while ready:
        k = ready.popleft()
        waiting.pop(k, None)
        try:
            handle: Any = next(runs[k])
        except StopIteration as stop:
            outcomes[k] = stop.value
        except BaseException as error:
            error.add_note(_place(executions[k]))
            raise
        else:
            # The execution yields only handles that are not done, so whoever finishes this one calls `wake`.
            handle.wake, waiting[k] = partial(ready.append, k), handle
    if waiting:
        raise DeadlockError(_report(executions, waiting))
    return [outcomes[k] for k in range(len(runs))]


def _report(executions: Sequence[Execution], waiting: dict[int, LocalHandle]) -> str:
    lines = [f"got {len(waiting)} ranks waiting for messages that no rank will post, expected all to finish:"]
    for k, handle in sorted(waiting.items()):
        lines.append(f"{_place(executions[k])}: waits for {posted_action(handle.end, handle.message)}")
    return "\n".join([*lines, "Pass the schedule to schedules.check, and run programs as lower() returns them."])


def _place(execution: Execution) -> str:
    at = execution.at
    return f"rank {execution.rank}" + ("" if at is None else f", position {at.position}, {at.action}")
