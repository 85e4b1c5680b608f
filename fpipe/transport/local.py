# SPDX-License-Identifier: Apache-2.0
"""All ranks in one process: values pass by reference, and the driver steps the ranks in turn.

A channel is a queue of zero capacity: the oldest send meets the oldest receive, and both are done. So a program that
runs here has its sends and receives in the same order, as any transport needs it.

A rank runs until it must wait; it is stepped again when its handle is done. If nobody can be stepped and somebody is
unfinished, that is a deadlock, known at once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from fpipe.errors import DeadlockError, TransportError
from fpipe.executor import Execution, Outcome
from fpipe.spec import Spec
from fpipe.transport.contract import Message, Payload, Transport
from fpipe.transport.contract import posted as text


class Posted:
    """A posted send or receive (`end`) of this process; `waiter` is the rank that is stepped again when it is done."""

    done = False
    waiter: int | None = None

    def __init__(self, end: str, message: Message, payload: Payload) -> None:
        self.end, self.message, self.payload = end, message, payload

    def take(self) -> Payload:
        """The payload, which is then no longer held here."""
        payload, self.payload = self.payload, ()
        return payload


class LocalTransport:
    """Channels inside one process, for ranks with these `homes` (stage -> rank).

    Invariant: what a channel holds are all sends or all receives, since opposite ends meet at once.
    """

    def __init__(self, homes: tuple[int, ...]) -> None:
        self.homes = homes
        self.channels = defaultdict[tuple[int, int], deque[Posted]](deque)
        self.woken: deque[int] = deque()

    def send(self, message: Message, payload: Payload, specs: tuple[Any, ...]) -> Posted:
        """Post a send."""
        return self._post(Posted("SEND", message, payload))

    def receive(self, message: Message, specs: tuple[Any, ...]) -> Posted:
        """Post a receive; what arrives is what was sent."""
        return self._post(Posted("RECV", message, ()))

    def _post(self, posted: Posted) -> Posted:
        _, source, _, target = posted.message
        waiting = self.channels[self.homes[source], self.homes[target]]
        if not waiting or waiting[0].end == posted.end:
            waiting.append(posted)
            return posted
        other = waiting.popleft()
        if other.message != posted.message:
            raise _disorder(*(posted, other) if posted.end == "SEND" else (other, posted))
        posted.payload, other.payload = other.payload, posted.payload
        posted.done = other.done = True
        if other.waiter is not None:
            self.woken.append(other.waiter)
        return posted


def _disorder(send: Posted, receive: Posted) -> TransportError:
    return TransportError(
        f"a channel: got {text('SEND', send.message)} first, expected the message of {text('RECV', receive.message)}. "
        "Post both ends in the same order: run programs as lower() makes them."
    )


class LocalRanks:
    """All ranks of a schedule with these `homes`, in this process."""

    def __init__(self, ranks: int, homes: tuple[int, ...]) -> None:
        self.ranks, self.homes = tuple(range(ranks)), homes

    def prepare(self, description: str, channels: Iterable[tuple[int, int]]) -> None:
        """Nothing to agree on, and channels are made by each run."""

    def run(self, execution: Callable[[int, Transport], Execution]) -> dict[int, Outcome]:
        """Step all ranks until all are finished; raises `DeadlockError` when none can go on."""
        transport = LocalTransport(self.homes)
        executions = [execution(rank, transport) for rank in self.ranks]
        return drive(transport, executions)

    def guarded(self) -> AbstractContextManager[None]:
        """Nothing is left over of a step that broke off."""
        return nullcontext()

    def share(self, tensor: Tensor | None, spec: Spec, source: int) -> Tensor:
        """The tensor: every rank is here."""
        assert tensor is not None, "the source rank is in this process"
        return tensor

    def any(self, flag: bool) -> bool:
        """The flag: every rank is here."""
        return flag


def drive(transport: LocalTransport, executions: Sequence[Execution]) -> dict[int, Outcome]:
    """Step these executions in turn, each as far as it goes; raises `DeadlockError` when none can go on."""
    runs = [execution.run() for execution in executions]
    waiting: dict[int, Posted] = {}
    outcomes: dict[int, Outcome] = {}
    ready = transport.woken
    ready.extend(range(len(runs)))
    while ready:
        rank = ready.popleft()
        waiting.pop(rank, None)
        try:
            handle: Any = next(runs[rank])
        except StopIteration as stop:
            outcomes[rank] = stop.value
        else:
            handle.waiter, waiting[rank] = rank, handle
    if waiting:
        raise DeadlockError(_report(executions, waiting))
    return outcomes


def _report(executions: Sequence[Execution], waiting: dict[int, Posted]) -> str:
    lines = [f"got {len(waiting)} ranks waiting for messages that nobody will post, expected all to finish:"]
    for rank, handle in sorted(waiting.items()):
        position = executions[rank].position
        action = executions[rank].program[position].action
        lines.append(f"rank {rank}, position {position}, {action}: waits for {text(handle.end, handle.message)}")
    return "\n".join([*lines, "Pass the schedule to schedules.check, and run programs as lower() makes them."])
