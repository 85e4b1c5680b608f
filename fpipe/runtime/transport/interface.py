# SPDX-License-Identifier: Apache-2.0
"""The interface of a transport.

Posting never blocks and returns a handle. Only waiting for the handle blocks, and the driver does that, not the
executor. Both ends of a transfer identify it by the same `MessageKey`. On each channel, which is a directed pair of
ranks, both ends post the same messages in the same order.

Runs in every step, in the transports that implement it; `message_of` runs when a program is linked.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from schedules import Action

Payload: TypeAlias = tuple[Any, ...]
MessageKey: TypeAlias = tuple[str, int, int, int]
"""The kind of payload (`F` values, `B` cotangents, `G` gradients), source stage, microbatch, target stage.

Of a collective: its kind, its stage, its microbatch, and the phase.
"""
Route: TypeAlias = tuple[int, int]
"""A channel's name: the sending rank and the receiving rank."""


class Handle(Protocol):
    """A posted send, receive or collective; the driver of its transport waits for it.

    - `end`: the end that was posted, `SEND` or `RECV`, or `GROUP` for a collective; `message`: the key.
    """

    end: str
    message: MessageKey

    @property
    def is_done(self) -> bool:
        """True if the transfer is known to be done, so that there is nothing to wait for."""

    def take(self) -> Payload:
        """Return the payload that arrived, and drop it from the handle. Call it once, for a receive that is done."""


class Channel(Protocol):
    """One rank's end of a channel, which carries payloads from one rank to another."""

    def send(self, message: MessageKey, payload: Payload, specs: tuple[Any, ...]) -> Handle:
        """Post a send of values with these specs. The values must not change until the handle is done."""

    def receive(self, message: MessageKey, specs: tuple[Any, ...]) -> Handle:
        """Post a receive of values with these specs."""


class Transport(Protocol):
    """The channels of one rank."""

    def channel(self, source: int, target: int) -> Channel:
        """Return the channel from rank `source` to rank `target`."""


def message_of(action: Action) -> MessageKey:
    """Return the message that a transfer carries, the same at both ends.

    >>> from schedules import parse
    >>> message_of(parse("1SEND_B0>0")), message_of(parse("0RECV_B0<1"))
    (('B', 1, 0, 0), ('B', 1, 0, 0))
    """
    kind, stage, microbatch, peer, _ = action
    assert peer is not None, "a transfer has a peer stage"
    if kind.startswith("RECV"):
        return kind[5:], peer, microbatch, stage
    return kind[5:], stage, microbatch, peer


def wait_action(handle: Handle) -> Action:
    """Return the action that waits for the handle: a receive, or the wait that frees a send's buffers."""
    what, source, microbatch, target = handle.message
    if handle.end == "GROUP":
        return Action(what, source, microbatch)
    if handle.end == "RECV":
        return Action(f"RECV_{what}", target, microbatch, source)
    return Action(f"WAIT_{what}", source, microbatch, target)


def transfer_text(end: str, carried: MessageKey) -> str:
    """Return the text of the action at one end, `SEND` or `RECV`, of a message; of a collective, that of its action."""
    what, source, microbatch, target = carried
    if end == "GROUP":
        return str(Action(what, source, microbatch))
    stage, peer = (source, target) if end == "SEND" else (target, source)
    return str(Action(f"{end}_{what}", stage, microbatch, peer))
