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


PostCopy: TypeAlias = Callable[[Sequence[Tensor]], tuple[Sequence[Tensor], Reached]]
"""Posts copies of tensors into the host's memory; returns them, and the event after which they are there."""


class Lap:
    """Some messages, in the order in which they were taken, their headers on the host, and the event after these.

    `awaited`: what the device waits for last.
    """

    def __init__(
        self, messages: Sequence[Arrived], headers: Sequence[Tensor], event: Reached, awaited: Awaited
    ) -> None:
        self.messages, self.headers, self.event, self.awaited = messages, headers, event, awaited

    def wait(self) -> None:
        """Block until the device is done with these messages, or until their group is broken."""
        self.event.synchronize()

    def compare(self) -> None:
        """Raise `TransportError` if one of the messages, which must have arrived, is not the expected one."""
        for message, header in zip(self.messages, self.headers, strict=True):
            message.require(header)

    def give_up(self) -> None:
        """Break the group of what the device waits for last."""
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
            self.close_lap(message.awaited)

    def close_lap(self, awaited: Awaited) -> None:
        """Post the copy of the headers since the last one, and the event after what the device waits for last."""
        messages, self.open = self.open, []
        self.laps.append(Lap(messages, *self.copy([one.header for one in messages]), awaited))

    def find_unfinished(self) -> Lap | None:
        """Return the first lap that the device has not passed; any thread may ask."""
        return next((lap for lap in [*self.laps] if not lap.event.query()), None)

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


def make_trail(device: torch.device) -> Trail | None:
    """Return a new trail for a rank's device; `None` for a CPU, where headers are compared at once."""
    return None if device.type == "cpu" else Trail(partial(post_copy, device))


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
