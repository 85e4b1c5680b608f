# SPDX-License-Identifier: Apache-2.0
"""The rules a correct program's transfers obey.

Problem. A lowering may be correct on a network that buffers or matches tags, and hang or mix up values on another. And
other people write programs, too.

Idea. Play all ranks of the program on the least helpful network: sends and receives are posted without waiting, the two
ends of a channel match in order, and a message passes once both are posted. The compute actions determine which
messages there must be (`schedules.lowering.program`). Since both ends post in the same order, tags make no difference:
a program that passes here finishes under tag-matched rendezvous and under one zero-buffer FIFO per channel alike.

Invariant: a message is made, sent, received and used once each, in this order; `WAIT` may be left out.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from functools import cached_property
from typing import Protocol

from schedules.errors import ScheduleError
from schedules.language.actions import KINDS, Action, Message, message_of, receive_of
from schedules.language.graph import Graph
from schedules.language.schedule import Schedule
from schedules.lowering.program import Program
from schedules.lowering.turns import Turn, Turns, target_of


class LoweredProgram(Protocol):
    """The protocol of a lowered program, ours or someone else's."""

    @property
    def schedule(self) -> Schedule:
        """Its compute actions."""

    @property
    def graph(self) -> Graph:
        """The stage graph it is lowered for."""

    def actions(self, rank: int) -> Iterator[Action]:
        """Return an iterator over one rank's compute actions and transfers."""


class _RankState:
    """The state of one rank: messages made but not sent, sent but not waited for, arrived but not used.

    - `turn`: the next compute action or pair and its messages, until it has run; `rest`: how many of its actions have
      still to run, once the first has.
    - `needed`: the message the rank waits for.
    """

    def __init__(self, program: LoweredProgram, rank: int, stream: Iterator[Action]) -> None:
        self.rank, self.stream = rank, stream
        self.turns = iter(Turns(program.schedule, program.graph, rank))
        self.turn, self.rest = next(self.turns), 0
        self.position, self.action = 0, next(self.stream, None)
        self.made, self.sent, self.arrived = set[Message](), set[Message](), set[Message]()
        self.needed: Message | None = None

    def advance(self) -> None:
        """Move on to the next action."""
        self.position, self.action = self.position + 1, next(self.stream, None)

    @cached_property
    def remaining(self) -> list[Action]:
        """The actions this rank has not reached; read once, when a rank is stuck."""
        return [*self.stream]

    def violation(self, rule: str, problem: str, repair: str) -> ScheduleError:
        """Return the error for a violation at the rank's current action."""
        return ScheduleError(rule, self.rank, self.position, self.action, problem, repair)


class _Channels:
    """All ranks of a program, played together on one network."""

    def __init__(self, program: LoweredProgram) -> None:
        self.placement = program.schedule.placement
        self.ranks = [_RankState(program, rank, stream) for rank, stream in enumerate(streams_of(program))]
        self.sends = defaultdict[tuple[int, int], deque[Message]](deque)
        self.receives = defaultdict[tuple[int, int], deque[Message]](deque)
        self.ready = deque(self.ranks)

    def play(self) -> None:
        """Raise `ScheduleError` unless all ranks reach their end with nothing left over."""
        while self.ready:
            rank = self.ready.popleft()
            rank.needed = None
            while self._run_action(rank):
                rank.advance()
        for rank in self.ranks:
            if rank.needed is not None:
                raise self._explain_deadlock(rank)
        for rank in self.ranks:
            self._require_nothing_left(rank)

    def _run_action(self, rank: _RankState) -> bool:
        """Run the rank's current action. Return false if it must wait, or the rank is at its end."""
        action = rank.action
        does = KINDS[action.kind].does if action is not None and action.kind in KINDS else ""
        if action is None or action.peer is None or not does:
            return self._compute(rank) and action is not None
        if rank.rest:
            raise rank.violation("fused", "splits a fused pair", "Move it before or after the pair.")
        if not (0 <= action.stage < self.placement.stages and 0 <= action.peer < self.placement.stages):
            raise rank.violation("known_ends", "names a stage that does not exist", "Use the two stages of an edge.")
        message = message_of(action)
        if does == "RECV":
            return self._receive(rank, message)
        return self._send(rank, message) if does == "SEND" else self._wait(rank, message)

    def _compute(self, rank: _RankState) -> bool:
        """Run a compute action on arrived messages; it makes those to send, the second of a fused pair for both.

        Return false if a message it needs has not arrived.
        """
        turn = rank.turn
        self._require_expected(rank, turn.actions[-rank.rest] if rank.rest else next(iter(turn.actions), None))
        if not rank.rest:
            rank.needed = next((message for message in turn.waits if message not in rank.arrived), None)
            if rank.needed is not None:
                return False
            rank.arrived.difference_update(turn.waits)
            rank.rest = len(turn.actions)
        if rank.rest <= 1:
            rank.made.update(turn.sends)
            rank.turn = next(rank.turns, END)
        rank.rest = max(0, rank.rest - 1)
        return True

    def _require_expected(self, rank: _RankState, expected: Action | None) -> None:
        """Raise `ScheduleError` if the current action is not the schedule's next one."""
        if rank.action != expected:
            problem = f"runs where the schedule has {expected}" if expected else "is not in the schedule"
            raise rank.violation(
                "same_actions", problem, "Run the compute actions of the program's schedule, in its order."
            )

    def _send(self, rank: _RankState, message: Message) -> bool:
        if message not in rank.made:
            raise rank.violation(
                "sent_once", "is sent before it is made, or twice, or to a stage that does not use it", _SENDS
            )
        rank.made.remove(message)
        rank.sent.add(message)
        channel = rank.rank, target_of(message, self.placement)
        self.sends[channel].append(message)
        self._pass(channel)
        return True

    def _receive(self, rank: _RankState, message: Message) -> bool:
        _, s, i, _, _ = message
        source = self.placement.home(s, i)
        if source == rank.rank or target_of(message, self.placement) != rank.rank:
            raise rank.violation(
                "received_once", f"is not a message for rank {rank.rank}", "Receive it on the rank that uses it."
            )
        self.receives[source, rank.rank].append(message)
        self._pass((source, rank.rank))
        return True

    def _wait(self, rank: _RankState, message: Message) -> bool:
        """Wait for a posted send. Return whether it has completed: it is no longer queued."""
        if message not in rank.sent:
            raise rank.violation(
                "waited_once", "waits for no earlier send, or waits twice", "Wait once, after the send."
            )
        if message in self.sends[rank.rank, target_of(message, self.placement)]:
            rank.needed = message
            return False
        rank.sent.remove(message)
        return True

    def _pass(self, channel: tuple[int, int]) -> None:
        """Let messages at the heads of both queues pass. Raise `ScheduleError` if they are not the same."""
        sends, receives = self.sends[channel], self.receives[channel]
        while sends and receives:
            if sends[0] != receives[0]:
                raise self._explain_disorder(channel)
            message = sends.popleft()
            receives.popleft()
            source, target = (self.ranks[rank] for rank in channel)
            target.arrived.add(message)
            self.ready.extend(rank for rank in (source, target) if rank.needed == message)

    def _explain_disorder(self, channel: tuple[int, int]) -> ScheduleError:
        send, receive = self.sends[channel][0], self.receives[channel][0]
        problem = f"{receive_of(receive)} is posted, but {send} is next on the channel"
        rank = self.ranks[channel[1]]
        return rank.violation("channel_order", problem, "Post both ends of a channel in the same order.")

    def _explain_deadlock(self, rank: _RankState) -> ScheduleError:
        """Return the error for ranks that are stuck: follow the waits to one that never ends, or to a cycle."""
        seen = list[int]()
        while True:
            message = rank.needed
            assert message is not None, "a rank that is followed waits"
            seen.append(rank.rank)
            channel = self.placement.home(message.stage, message.microbatch), target_of(message, self.placement)
            if message in self.sends[channel]:
                problem, repair = (
                    f"waits for {message}, for which no receive is posted",
                    f"Post {receive_of(message)} earlier.",
                )
                break
            source = self.ranks[channel[0]]
            if message not in source.remaining:
                repair = f"Add it to rank {source.rank}."
                problem = f"waits for {message}, which rank {source.rank} never runs"
                break
            if source.rank in seen:
                cycle = seen[seen.index(source.rank) :]
                waits = (f"rank {one} at {self.ranks[one].action}" for one in cycle)
                problem = f"waits for {message}, and the ranks wait for each other: {', '.join(waits)}"
                repair = "Reorder the actions or the transfers of one of these ranks."
                break
            rank = source
        return rank.violation("flows", problem, repair)

    def _require_nothing_left(self, rank: _RankState) -> None:
        left = [f"{message} is never sent" for message in sorted(rank.made, key=repr)]
        left += [f"{receive_of(message)} is never used" for message in sorted(rank.arrived, key=repr)]
        unmet = [message for (_, target), queue in self.receives.items() if target == rank.rank for message in queue]
        left += [f"{receive_of(message)} is posted, but never sent" for message in unmet]
        unmet = [message for (source, _), queue in self.sends.items() if source == rank.rank for message in queue]
        left += [f"{message} is posted, but never received" for message in unmet]
        if left:
            raise rank.violation("nothing_left", left[0], "Make, send, receive and use every message once.")


_SENDS = "Send each value once, after the action that makes it, to a stage on another rank that uses it."
END = Turn(0, (), [], [])


def streams_of(program: LoweredProgram) -> list[Iterator[Action]]:
    """Return iterators over the actions of all ranks, in order; `lower` makes its own in one pass."""
    ranks = range(program.schedule.ranks)
    return program.streams(ranks) if type(program) is Program else [program.actions(rank) for rank in ranks]


def check_transfers(program: LoweredProgram) -> None:
    """Raise `ScheduleError` unless the program's transfers deliver every value to its consumers on any network.

    The compute actions must pass `check`. Makes one pass over all actions and keeps only what is in flight.
    """
    _Channels(program).play()
