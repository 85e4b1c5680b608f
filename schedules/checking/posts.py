# SPDX-License-Identifier: Apache-2.0
"""The rule on when a program posts its transfers, so that it finishes on any device.

Problem. A network between CPUs takes a receive that is posted early and goes on. On an accelerator, a receive occupies
the device from its start until its message is sent. Where streams share a queue, launches block, or something
synchronizes the device, nothing that is posted after it starts before. If the message depends on that, nothing ever
ends.

Idea. Let every transfer block its rank until the other end is there. If all ranks reach their end even so, there is one
common order of actions and messages that every rank follows. In this order, the first one that has not happened can
always happen, whatever the device, since all that its rank posted before it is done.

Invariant: a program that this rule accepts finishes on every `schedules.proof.devices.Device`; one that it refuses does
not on a device where launches block and sends wait for their receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from schedules.checking.channels import LoweredProgram, streams_of
from schedules.errors import ScheduleError
from schedules.language.actions import KINDS, Action, Message, message_of
from schedules.lowering.turns import target_of


class _Poster:
    """One rank: its current action, and the rank at the other end if that is a send or a receive."""

    def __init__(self, rank: int, stream: Iterator[Action]) -> None:
        self.rank, self.stream, self.position = rank, stream, -1
        self.action: Action | None = None
        self.message: Message | None = None

    def advance(self) -> None:
        """Move on to the next action that another rank takes part in; to `None` at the end."""
        for action in self.stream:
            self.position += 1
            if action.peer is not None and KINDS[action.kind].does != "WAIT":
                self.action, self.message = action, message_of(action)
                return
        self.action = self.message = None


def check_posts(program: LoweredProgram) -> None:
    """Raise `ScheduleError` unless the program finishes if every send and receive blocks until its other end is there.

    The program must pass `check_transfers`. Makes one pass over all actions.
    """
    placement = program.schedule.placement
    ranks = [_Poster(rank, stream) for rank, stream in enumerate(streams_of(program))]

    def other(one: _Poster) -> _Poster:
        message = one.message
        assert message is not None, "only a rank at a transfer has another end"
        ends = placement.home(message.stage, message.microbatch), target_of(message, placement)
        return ranks[ends[one.rank == ends[0]]]

    for rank in ranks:
        rank.advance()
    ready = [*ranks]
    while ready:
        rank = ready.pop()
        while rank.action is not None and (peer := other(rank)).message == rank.message:
            rank.advance()
            peer.advance()
            ready.append(peer)
    for rank in ranks:
        if rank.action is not None:
            raise _explain_deadlock(rank, other)


def _explain_deadlock(rank: _Poster, other: Callable[[_Poster], _Poster]) -> ScheduleError:
    """Return the error for ranks that block each other: at a receive, if one of them is."""
    seen = list[_Poster]()
    while rank not in seen:
        seen.append(rank)
        rank = other(rank)
    cycle = seen[seen.index(rank) :]
    at = next((k for k, one in enumerate(cycle) if one.action != one.message), 0)
    rank, waits = cycle[at], [f"rank {one.rank} at {one.action}" for one in [*cycle[at:], *cycle[:at]]]
    problem = f"would never end on a device that does one thing at a time: {', '.join(waits)} wait for each other"
    repair = (
        "Post it after the actions that its message depends on, and the transfers of all ranks in one order, as "
        "lower() does."
    )
    return ScheduleError("posts", rank.rank, rank.position, rank.action, problem, repair)
