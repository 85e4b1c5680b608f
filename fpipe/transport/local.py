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
from typing import Any

from torch import Tensor

from fpipe.errors import DeadlockError, TransportError
from fpipe.executor import Execution, Outcome
from fpipe.spec import Spec
from fpipe.transport.contract import Message, Payload, Transport
from fpipe.transport.contract import posted as text


class Posted:
    """A posted send or receive of this process."""

    __slots__ = ("done", "end", "message", "payload", "waiter")

    def __init__(self, end: str, message: Message, payload: Payload) -> None:
        self.end, self.message, self.payload = end, message, payload
        self.done = False
        self.waiter: int | None = None


class LocalTransport:
    """Channels inside one process, for ranks with these `homes` (stage -> rank)."""

    def __init__(self, homes: tuple[int, ...]) -> None:
        self.homes = homes
        self.channels = defaultdict[tuple[int, int], tuple[deque[Posted], deque[Posted]]](lambda: (deque(), deque()))
        self.woken: deque[int] = deque()

    def send(self, message: Message, payload: Payload, specs: tuple[Any, ...]) -> Posted:
        """Post a send."""
        return self._post(0, Posted("SEND", message, payload))

    def receive(self, message: Message, specs: tuple[Any, ...]) -> Posted:
        """Post a receive; what arrives is what was sent."""
        return self._post(1, Posted("RECV", message, ()))

    def _post(self, end: int, posted: Posted) -> Posted:
        source, target = self.homes[posted.message[1]], self.homes[posted.message[3]]
        queues = self.channels[source, target]
        if not queues[1 - end]:
            queues[end].append(posted)
            return posted
        other = queues[1 - end].popleft()
        send, receive = (posted, other) if end == 0 else (other, posted)
        if send.message != receive.message:
            raise TransportError(
                f"channel from rank {source} to rank {target}: got {text('SEND', send.message)}, expected the message "
                f"of {text('RECV', receive.message)}. Post both ends in the same order: run programs as lower() makes "
                "them."
            )
        receive.payload, send.payload = send.payload, ()
        for one in (send, receive):
            one.done = True
            if one.waiter is not None:
                self.woken.append(one.waiter)
        return posted


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
        handle, run = waiting.pop(rank, None), runs[rank]
        try:
            posted: Any = next(run) if handle is None else run.send(handle.payload)
            while posted.done:
                posted = run.send(posted.payload)
        except StopIteration as stop:
            outcomes[rank] = stop.value
        else:
            posted.waiter, waiting[rank] = rank, posted
    if waiting:
        raise DeadlockError(_report(executions, waiting))
    return outcomes


def _report(executions: Sequence[Execution], waiting: dict[int, Posted]) -> str:
    lines = [
        f"got {len(waiting)} of {len(executions)} ranks waiting for messages that nobody will post, expected none:"
    ]
    for rank, handle in sorted(waiting.items()):
        where = f"rank {rank}, position {executions[rank].position}, {executions[rank].action}"
        lines.append(f"{where}: waits for {text(handle.end, handle.message)}")
    return "\n".join([*lines, "Pass the schedule to schedules.check, and run programs as lower() makes them."])
