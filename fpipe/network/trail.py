# SPDX-License-Identifier: Apache-2.0
"""The messages that a rank has received on a device, and how far its host is ahead of that device.

Problem. On an accelerator, waiting for a message makes the device wait, not the host. So the host can neither look at
what arrived, unless it waits for the device, nor know when the memory of messages is free: it could be a step ahead,
and hold the messages of all microbatches.

Idea. Every few messages, their headers are copied into pinned memory behind all that was posted, with an event after
them. The host reads them once the event is reached. It waits for an event only if there are two later ones: so it is
ahead of the device by a few messages, whatever the number of microbatches, and never so few that the device runs dry.
Each call ends with an event, too: until it is reached, the device may wait for other ranks, and the lookout with it.

Invariant: each header is compared once. A wrong one is reported at the latest when the host waits for its event, else
in the next call after it arrived.

Runs in every step, on an accelerator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.network.waiting import Awaited, Waitable, break_group, has_streams, is_on_host

PER_LAP: Final = 8
"""How many messages go together."""
AHEAD: Final = 2
"""How many events the host may leave behind before it waits for the oldest."""


class Reached(Protocol):
    """An event on the stream of a device: `torch.Event`."""

    def query(self) -> bool:
        """Return whether the device has reached it."""

    def synchronize(self) -> None:
        """Block until the device has reached it."""


class Arrived(NamedTuple):
    """The header of a message, still on the device; `require` raises unless it is what was expected."""

    header: Tensor
    require: Callable[[Tensor], None]
    awaited: Awaited


PostCopy: TypeAlias = Callable[[Sequence[Tensor]], tuple[Sequence[Tensor], Reached]]
"""Posts copies of tensors into the host's memory; returns them, and the event after which they are there."""


class StreamPoint:
    """A point of a device's stream: an event, and what the device waits for last before it."""

    def __init__(self, event: Reached, awaited: Awaited) -> None:
        self.event, self.awaited = event, awaited

    def wait(self) -> None:
        """Block until the device has come to it, or until the group is broken."""
        self.event.synchronize()

    def give_up(self) -> None:
        """Break the group of what the device waits for last."""
        break_group(self.awaited.group)


class Lap(StreamPoint):
    """Some messages, in the order in which they were taken, their headers on the host, and the event after these."""

    def __init__(
        self, messages: Sequence[Arrived], headers: Sequence[Tensor], event: Reached, awaited: Awaited
    ) -> None:
        super().__init__(event, awaited)
        self.messages, self.headers = messages, headers

    def compare(self) -> None:
        """Raise `TransportError` if one of the messages, which must have arrived, is not the expected one."""
        for message, header in zip(self.messages, self.headers, strict=True):
            message.require(header)


class Trail:
    """The messages of a rank whose headers the host has not compared: `open`, and those in `laps`, oldest first.

    - `points`: where the device waits for other processes, oldest first, as long as it may not have come there.
    - `groups`: all groups on which it was made to wait.
    """

    def __init__(self, copy: PostCopy) -> None:
        self.copy = copy
        self.open: list[Arrived] = []
        self.laps: deque[Lap] = deque()
        self.points: deque[StreamPoint] = deque()
        self.groups = set[dist.ProcessGroup]()

    def follow(self, posted: Waitable) -> None:
        """Note that the device waits for something from here on, unless it is the host that has waited for it."""
        awaited = posted.awaited
        if isinstance(posted, StreamPoint) or is_on_host(awaited.group):
            return
        while self.points and self.points[0].event.query():
            self.points.popleft()
        self.points.append(StreamPoint(self.copy(())[1], awaited))
        self.groups.add(awaited.group)

    def add(self, message: Arrived) -> None:
        """Add a message that was taken."""
        self.open.append(message)
        if len(self.open) == PER_LAP:
            self.close_lap(message.awaited)

    def close_lap(self, awaited: Awaited) -> None:
        """Post the copy of the headers since the last one, and the event after what the device waits for last."""
        messages, self.open = self.open, []
        self.laps.append(Lap(messages, *self.copy([one.header for one in messages]), awaited))

    def find_unfinished(self) -> StreamPoint | None:
        """Return the first point that the device has not come to; any thread may ask."""
        return next((point for point in [*self.points, *self.laps] if not point.event.query()), None)

    def find_overdue(self) -> Lap | None:
        """Return what the host must wait for before it goes on, and drop it; `None` if it may go on."""
        return self.laps.popleft() if len(self.laps) > AHEAD else None

    def read(self) -> None:
        """Raise `TransportError` if a message that the device has passed is not the expected one; wait for nothing."""
        while self.laps and self.laps[0].event.query():
            self.laps.popleft().compare()

    def clear(self) -> None:
        """Drop what was not compared."""
        self.open.clear()
        self.laps.clear()
        self.points.clear()


def make_trail(device: torch.device) -> Trail | None:
    """Return a new trail for a rank's device; `None` for a CPU, where headers are compared at once."""
    return Trail(partial(post_copy, device)) if has_streams(device) else None


def post_copy(device: torch.device, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Reached]:
    """Post copies of a device's equal-sized tensors into pinned memory; return them, and the event after these."""
    host: Sequence[Tensor] = ()
    if tensors:
        stacked = torch.stack([*tensors])
        pinned = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
        host = pinned.copy_(stacked, non_blocking=True).unbind()
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return host, event
