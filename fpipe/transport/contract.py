# SPDX-License-Identifier: Apache-2.0
"""What a transport is.

Posting never blocks and returns a handle; waiting for the handle is the only call that blocks, and it is the driver's,
not the executor's. Both ends of a transfer know it by the same `Message`. Per channel, that is per directed pair of
ranks, both ends post the same messages in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from schedules import Action

if TYPE_CHECKING:
    from torch import Tensor

    from fpipe.executor import Execution, Outcome
    from fpipe.spec import Spec
    from fpipe.transport.agreement import Field

Payload: TypeAlias = tuple[Any, ...]
Message: TypeAlias = tuple[str, int, int, int]
"""What is carried (`F` a value, `B` a cotangent, `G` a gradient), from which stage, microbatch, for which stage."""
Fields: TypeAlias = "Callable[[], Sequence[Field]]"
"""Makes what must be the same on every rank; called only where there are others."""
Route: TypeAlias = tuple[int, int]
"""A channel's name: the rank that sends, and the rank that receives."""


class Handle(Protocol):
    """A posted send or receive, to be waited for by the driver that knows its transport.

    - `end`, `message`: which end of which transfer was posted: `SEND` or `RECV`.
    """

    end: str
    message: Message

    @property
    def done(self) -> bool:
        """Whether it is known to need no waiting."""

    def take(self) -> Payload:
        """What arrived, handed over once and no longer held. Only for a receive, when done."""


class Channel(Protocol):
    """Carries payloads from one rank to another; each end has it as its own."""

    def send(self, message: Message, payload: Payload, specs: tuple[Any, ...]) -> Handle:
        """Post a send of values of these specs. They must stay unchanged until the handle has been waited for."""

    def receive(self, message: Message, specs: tuple[Any, ...]) -> Handle:
        """Post a receive of values of these specs."""


class Transport(Protocol):
    """The channels of one rank."""

    def channel(self, source: int, target: int) -> Channel:
        """The channel from rank `source` to rank `target`."""


class Ranks(Protocol):
    """The pipeline ranks that this process runs, and how it reaches the others."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this process."""

    def guarded(self, call: str) -> AbstractContextManager[None]:
        """What a function that all ranks call runs in, named `call`.

        What one rank raises before all have agreed is raised on all of them. After one that broke off in the middle
        none may follow: its messages would not fit the others'. One thread is inside at a time.
        """

    def agree(self, fields: Fields = tuple, about: str = "", note: int = 0) -> list[int]:
        """Raise `TransportError` on all ranks unless they have made the same call and `fields()` are the same.

        `about` tells apart several agreements of one call. Returns the note of each process.
        """

    def connect(self, channels: Iterable[Route]) -> None:
        """Make these channels ready."""

    def run(self, execution: Callable[[int, Transport], Execution]) -> dict[int, Outcome]:
        """Drive `execution(rank, transport)` of every rank of this process to its end."""

    def share(self, tensor: Tensor | None, spec: Spec, source: int) -> Tensor:
        """The tensor that rank `source` has, on every rank; the others pass `None`."""

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""

    def tell(self, text: str) -> list[str]:
        """Tell all ranks a text; return what every process told, the first rank's first."""

    def ahead(self) -> float:
        """By how many seconds the clock of this process is ahead of that of the first rank's."""

    def collect(self, rows: Tensor) -> list[Tensor]:
        """The rows that every process passes, the first rank's first; as many columns everywhere, on the CPU."""


def message(action: Action) -> Message:
    """What a transfer carries, the same at both ends.

    >>> from schedules import parse
    >>> message(parse("1SEND_B0>0")), message(parse("0RECV_B0<1"))
    (('B', 1, 0, 0), ('B', 1, 0, 0))
    """
    kind, stage, microbatch, peer, _ = action
    assert peer is not None, "a transfer has a peer stage"
    if kind.startswith("RECV"):
        return kind[5:], peer, microbatch, stage
    return kind[5:], stage, microbatch, peer


def awaited(handle: Handle) -> Action:
    """The transfer that whoever waits for the handle waits for: a receive, or a send that is to be let go of."""
    what, source, microbatch, target = handle.message
    if handle.end == "RECV":
        return Action(f"RECV_{what}", target, microbatch, source)
    return Action(f"WAIT_{what}", source, microbatch, target)


def posted(end: str, carried: Message) -> str:
    """The text of the action at one end, `SEND` or `RECV`, of a message."""
    what, source, microbatch, target = carried
    stage, peer = (source, target) if end == "SEND" else (target, source)
    return str(Action(f"{end}_{what}", stage, microbatch, peer))
