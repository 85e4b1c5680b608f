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
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

from fpipe.errors import DeadlockError, TransportError
from fpipe.runtime.executor import Execution, Milestone, Outcome
from fpipe.runtime.transport import Payload, Route, exhaust, posted_action
from schedules.language.actions import Message, receive_of


class LocalHandle:
    """A message within this process; both of its ends hold the same object.

    `end` is the end that was posted first; once the other is posted, the handle `is_done`, and `wake` is called if
    somebody waits.
    """

    __slots__ = ("end", "is_done", "message", "payload", "wake")

    def __init__(self, end: str, message: Message, payload: Payload = ()) -> None:
        self.end, self.message, self.payload = end, message, payload
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
        return self._post("SEND", message, payload)

    def receive(self, message: Message, specs: tuple[Any, ...]) -> LocalHandle:
        """Post a receive; what arrives is the very object that was sent."""
        return self._post("RECV", message, ())

    def _post(self, end: str, message: Message, payload: Payload) -> LocalHandle:
        waiting = self.waiting
        if not waiting or waiting[0].end == end:
            posted = LocalHandle(end, message, payload)
            waiting.append(posted)
            return posted
        posted = waiting.popleft()
        if posted.message != message:
            sent, received = (posted.message, message) if end == "RECV" else (message, posted.message)
            raise TransportError(
                f"a channel: got {sent} first, expected the message of {receive_of(received)}. Post both ends of a "
                "channel in the same order: run programs as lower() returns them."
            )
        posted.finish(posted.payload + payload)  # one of them is empty
        return posted


class LocalTransport:
    """Channels within one process, created at their first use."""

    def __init__(self) -> None:
        self.channels: dict[Route, LocalChannel] = {}

    def channel(self, source: int, target: int) -> LocalChannel:
        """Return the channel; both ends share it."""
        return self.channels.setdefault((source, target), LocalChannel())


def drive(executions: Sequence[Execution]) -> list[Outcome]:
    """Step these executions in turn, each as far as it can go; raise `DeadlockError` if none can proceed."""
    return exhaust(drive_stepwise(executions))


def drive_stepwise(executions: Sequence[Execution]) -> Generator[None, None, list[Outcome]]:
    """Do what `drive` does, and yield whenever one of them reaches a milestone."""
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
            if isinstance(handle, Milestone):
                ready.append(k)
                yield
                continue
            # The execution yields only handles that are not done, so finishing this one calls `wake`.
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
