# SPDX-License-Identifier: Apache-2.0
"""The messages that a rank has received on a device, and how far its host is ahead of that device.

Problem. On an accelerator, waiting for a message makes the device wait, not the host. So the host can neither look at
what arrived, unless it waits for the device, nor know when the memory of messages is free: it could be a step ahead,
and hold the messages of all microbatches.

Idea. Every few messages, their headers are copied into pinned memory behind all that was posted, with an event after
them. The host reads them once the event is reached. It waits for an event only if there are two later ones: so it is
ahead of the device by a few messages, whatever the number of microbatches, and never so few that the device runs dry.

Invariant: each header is compared once. A wrong one is reported at the latest when the host waits for its event, else
in the next call after it arrived.

Runs in every step, on an accelerator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from fpipe.network.waiting import Awaited, break_group

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


PostCopy: TypeAlias = Callable[[Tensor], tuple[Tensor, Reached]]
"""Posts a copy of a tensor into the host's memory; returns it, and the event after which it is there."""


class Lap:
    """Some messages, in the order in which they were taken, their headers on the host, and the event after these."""

    def __init__(self, messages: Sequence[Arrived], headers: Tensor, event: Reached) -> None:
        self.messages, self.headers, self.event = messages, headers, event

    @property
    def awaited(self) -> Awaited:
        """The last message."""
        return self.messages[-1].awaited

    def wait(self) -> None:
        """Block until the device is done with these messages; raise `TransportError` if one is not the expected one."""
        self.event.synchronize()
        for message, header in zip(self.messages, self.headers, strict=True):
            message.require(header)

    def give_up(self) -> None:
        """Break the group of the last message."""
        break_group(self.awaited.group)


class Trail:
    """The messages of a rank whose headers the host has not compared: `open`, and those in `laps`, oldest first."""

    def __init__(self, copy: PostCopy) -> None:
        self.copy = copy
        self.open: list[Arrived] = []
        self.laps: deque[Lap] = deque()

    def add(self, message: Arrived) -> None:
        """Add a message that was taken."""
        self.open.append(message)
        if len(self.open) == PER_LAP:
            self.close_lap()

    def close_lap(self) -> None:
        """Post the copy of the headers since the last one."""
        if self.open:
            messages, self.open = self.open, []
            self.laps.append(Lap(messages, *self.copy(torch.stack([one.header for one in messages]))))

    def find_overdue(self) -> Lap | None:
        """Return what the host must wait for before it goes on, and drop it; `None` if it may go on."""
        return self.laps.popleft() if len(self.laps) > AHEAD else None

    def read(self) -> None:
        """Raise `TransportError` if a message that the device has passed is not the expected one; wait for nothing."""
        while self.laps and self.laps[0].event.query():
            self.laps.popleft().wait()

    def clear(self) -> None:
        """Drop what was not compared."""
        self.open.clear()
        self.laps.clear()


def make_trail(device: torch.device) -> Trail | None:
    """Return a new trail for a rank's device; `None` for a CPU, where headers are compared at once."""
    return None if device.type == "cpu" else Trail(post_copy)


def post_copy(tensor: Tensor) -> tuple[Tensor, Reached]:
    """Post a copy of a device's tensor into pinned memory; return it, and the event after which it is there."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.Event(tensor.device)
    event.record(torch.accelerator.current_stream(tensor.device))
    return host, event
