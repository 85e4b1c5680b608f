# SPDX-License-Identifier: Apache-2.0
"""Model networks to run programs on, as unhelpful as real ones.

Problem. A lowering may be correct on a network that buffers or reorders, and hang or mix up values on another.

Idea. A network is a function: given the sends and receives posted on one channel, oldest first, it returns the next
message to pass. It never buffers: a message passes only once both ends have posted it. Both ends identify it by the
action that sends it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from schedules.errors import ProgramError
from schedules.language.actions import Action, Message, receive_of
from schedules.language.graph import Edge
from schedules.proof.formulas import Formula

Network: TypeAlias = Callable[[Sequence[Message], Sequence[Message]], Message | None]


def rendezvous(sends: Sequence[Message], receives: Sequence[Message]) -> Message | None:
    """Match by tag (Gloo): any posted send meets the posted receive of the same message, in any order."""
    return next((message for message in receives if message in sends), None)


def fifo(sends: Sequence[Message], receives: Sequence[Message]) -> Message | None:
    """Match without tags (NCCL): only the heads of both queues meet.

    Raise `ProgramError` if they are not the same message: a real network would silently deliver the wrong one.

    >>> from schedules import parse
    >>> fifo([parse("0SEND_F1>1")], [parse("0SEND_F0>1")])
    Traceback (most recent call last):
    schedules.errors.ProgramError: got 0SEND_F1>1 at the head of its channel, where 1RECV_F0<0 is posted. Post \
receives in the sender's order.
    """
    if not sends or not receives:
        return None
    if sends[0] != receives[0]:
        raise ProgramError(
            f"got {sends[0]} at the head of its channel, where {receive_of(receives[0])} is posted. "
            "Post receives in the sender's order."
        )
    return sends[0]


class Links:
    """All channels of one run: what has been posted but has not passed yet."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._sends: dict[Edge, list[Message]] = defaultdict(list)
        self._receives: dict[Edge, list[Message]] = defaultdict(list)
        self._values: dict[Message, Formula] = {}  # invariant: one for each posted send

    def send(self, channel: Edge, message: Message, value: Formula) -> Iterator[tuple[Message, Formula]]:
        """Post a send, and yield every message that passes now, with its value."""
        if message in self._values:
            raise ProgramError(f"{message} is posted again before it was delivered. Send each value once.")
        self._sends[channel].append(message)
        self._values[message] = value
        yield from self._pass(channel)

    def receive(self, channel: Edge, message: Message) -> Iterator[tuple[Message, Formula]]:
        """Post a receive, and yield every message that passes now, with its value."""
        self._receives[channel].append(message)
        yield from self._pass(channel)

    def is_pending(self, message: Message) -> bool:
        """Return whether this send has been posted but has not passed."""
        return message in self._values

    def list_unmatched(self) -> list[Action]:
        """Return the sends and receives that have not been matched."""
        receives = [receive_of(message) for queue in self._receives.values() for message in queue]
        return [*self._values, *receives]

    def _pass(self, channel: Edge) -> Iterator[tuple[Message, Formula]]:
        sends, receives = self._sends[channel], self._receives[channel]
        while (message := self._network(sends, receives)) is not None:
            sends.remove(message)
            receives.remove(message)
            yield message, self._values.pop(message)
