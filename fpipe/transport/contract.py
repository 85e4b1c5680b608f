# SPDX-License-Identifier: Apache-2.0
"""What a transport is.

Posting never blocks and returns a handle; waiting for the handle is the only call that blocks, and it is the driver's,
not the executor's. A message is named by its action: `2SEND_F1>5` at one end is `5RECV_F1<2` at the other. Per channel,
that is per directed pair of ranks, both ends post the same messages in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from schedules import Action

if TYPE_CHECKING:
    from torch import Tensor

    from fpipe.executor import Execution, Outcome
    from fpipe.spec import Spec

Payload: TypeAlias = tuple[Any, ...]


class Handle(Protocol):
    """A posted send or receive, to be waited for by the driver that knows its transport."""

    @property
    def message(self) -> Action:
        """The action that posted it."""


class Transport(Protocol):
    """Carries payloads between ranks."""

    def send(self, message: Action, payload: Payload, specs: tuple[Any, ...]) -> Handle:
        """Post a send of values of these specs. They must stay unchanged until the handle has been waited for."""

    def receive(self, message: Action, specs: tuple[Any, ...]) -> Handle:
        """Post a receive of values of these specs."""


class Ranks(Protocol):
    """The pipeline ranks that this process runs, and how it reaches the others."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this process."""

    def prepare(self, description: str, channels: Iterable[tuple[int, int]]) -> None:
        """Make sure that every rank runs what `description` describes, and make its channels ready."""

    def run(self, execution: Callable[[int, Transport], Execution]) -> dict[int, Outcome]:
        """Drive `execution(rank, transport)` of every rank of this process to its end."""

    def share(self, tensor: Tensor | None, spec: Spec, source: int) -> Tensor:
        """The tensor that rank `source` has, on every rank; the others pass `None`."""

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""


def ends(message: Action, homes: tuple[int, ...]) -> tuple[int, int]:
    """The channel of a message: source rank, target rank.

    >>> from schedules import parse
    >>> ends(parse("1RECV_F0<0"), homes=(2, 3)), ends(parse("1SEND_B0>0"), homes=(2, 3))
    ((2, 3), (3, 2))
    """
    assert message.peer is not None, "a message has a peer stage"
    here, there = homes[message.stage], homes[message.peer]
    return (there, here) if message.kind.startswith("RECV") else (here, there)
