# SPDX-License-Identifier: Apache-2.0
"""The interface of a transport.

Posting never blocks and returns a handle. Only waiting for the handle blocks, and the driver does that, not the
executor. Both ends name a message by the action that sends it. On each channel, which is a directed pair of
ranks, both ends post the same messages in the same order.

Runs in every step, in the transports that implement it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol, TypeAlias, TypeVar, cast

from schedules.language.actions import Action, Message, receive_of

Payload: TypeAlias = tuple[Any, ...]
Returned = TypeVar("Returned")
Route: TypeAlias = tuple[int, int]
"""A channel's name: the sending rank and the receiving rank."""


class Handle(Protocol):
    """A posted send, receive or collective; the driver of its transport waits for it.

    - `end`: the end that was posted, `SEND` or `RECV`, or `GROUP` for a collective.
    - `message`: the action that sends the message, or the collective itself.
    """

    end: str
    message: Message

    @property
    def is_done(self) -> bool:
        """True if the transfer is known to be done, so that there is nothing to wait for."""

    def take(self) -> Payload:
        """Return the payload that arrived, and drop it from the handle. Call it once, for a receive that is done."""


class Channel(Protocol):
    """One rank's end of a channel, which carries payloads from one rank to another."""

    def send(self, message: Message, payload: Payload, specs: tuple[Any, ...]) -> Handle:
        """Post a send of values with these specs. The values must not change until the handle is done."""

    def receive(self, message: Message, specs: tuple[Any, ...]) -> Handle:
        """Post a receive of values with these specs."""


class Transport(Protocol):
    """The channels of one rank."""

    def channel(self, source: int, target: int) -> Channel:
        """Return the channel from rank `source` to rank `target`."""


def posted_action(end: str, message: Message) -> Action:
    """Return the action that posts one end, `SEND` or `RECV`, of a message; a collective is its own action."""
    return receive_of(message) if end == "RECV" else message


def exhaust(run: Generator[object, None, Returned]) -> Returned:
    """Step a generator to its end; return what it returns."""
    while True:
        try:
            next(run)
        except StopIteration as stop:
            return cast(Returned, stop.value)
