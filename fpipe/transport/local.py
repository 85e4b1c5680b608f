# SPDX-License-Identifier: Apache-2.0
"""All ranks in one process: values pass by reference, and the driver steps the ranks in turn.

A channel is a queue of zero capacity: the oldest send meets the oldest receive, and both are done. So a program that runs
here has its sends and receives in the same order, as any transport needs it.

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
from fpipe.transport.contract import Payload, Transport, ends
from schedules import Action


class Posted:
    """A posted send or receive of this process."""

    __slots__ = ("done", "message", "payload", "waiter")

    def __init__(self, message: Action, payload: Payload) -> None:
        self.message, self.payload = message, payload
        self.done = False
        self.waiter: int | None = None


class LocalTransport:
    """Channels inside one process, for ranks with these `homes` (stage -> rank)."""

    def __init__(self, homes: tuple[int, ...]) -> None:
        self.homes = homes
        self.channels = defaultdict[tuple[int, int], tuple[deque[Posted], deque[Posted]]](lambda: (deque(), deque()))
        self.woken: deque[int] = deque()

    def send(self, message: Action, payload: Payload, specs: tuple[Any, ...]) -> Posted:
        """Post a send."""
        return self._post(0, Posted(message, payload))

    def receive(self, message: Action, specs: tuple[Any, ...]) -> Posted:
        """Post a receive; what arrives is what was sent."""
        return self._post(1, Posted(message, ()))

    def _post(self, end: int, posted: Posted) -> Posted:
        source, target = ends(posted.message, self.homes)
        queues = self.channels[source, target]
        if not queues[1 - end]:
            queues[end].append(posted)
            return posted
        other = queues[1 - end].popleft()
        send, receive = (posted, other) if end == 0 else (other, posted)
        self._require_same(send.message, receive.message, source, target)
        receive.payload, send.payload = send.payload, ()
        for one in (send, receive):
            one.done = True
            if one.waiter is not None:
                self.woken.append(one.waiter)
        return posted

    @staticmethod
    def _require_same(send: Action, receive: Action, source: int, target: int) -> None:
        same = send.kind[5:] == receive.kind[5:] and send[1:] == (receive.peer, receive.microbatch, receive.stage)
        if not same:
            raise TransportError(
                f"channel from rank {source} to rank {target}: got {send}, expected the message of {receive}. Post both "
                "ends in the same order: run programs as lower() makes them."
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
    waiting: dict[int, Any] = {}
    outcomes: dict[int, Outcome] = {}
    ready = transport.woken
    ready.extend(range(len(runs)))
    while ready:
        rank = ready.popleft()
        handle, run = waiting.pop(rank, None), runs[rank]
        try:
            handle = next(run) if handle is None else run.send(handle.payload)
            while handle.done:
                handle = run.send(handle.payload)
        except StopIteration as stop:
            outcomes[rank] = stop.value
        else:
            handle.waiter, waiting[rank] = rank, handle
    if waiting:
        raise DeadlockError(_report(executions, waiting))
    return outcomes


def _report(executions: Sequence[Execution], waiting: dict[int, Any]) -> str:
    lines = [
        f"rank {rank}, position {executions[rank].position}, {executions[rank].action}: waits for {handle.message}"
        for rank, handle in sorted(waiting.items())
    ]
    return "\n".join(
        [
            f"got {len(waiting)} of {len(executions)} ranks waiting for messages that nobody will send, expected all to finish:",
            *lines,
            "Pass the schedule to schedules.check, and run programs as lower() makes them.",
        ]
    )
