# SPDX-License-Identifier: Apache-2.0
"""Lower a schedule for a stage graph: insert the transfers, so that the program is ready to run.

Problem. A schedule never mentions a transfer, but every rank must post its own sends and receives. Both ends of a
channel must post in the same order, and a transfer must be posted early, to overlap with compute, but not too early: a
device runs what is posted to it in order, in the worst case one thing at a time. There, a receive that is posted before
an action on which its message depends never ends, and nothing after it ever starts.

Idea. A channel is a directed pair (source rank, target rank). Play all ranks as if every send and every receive blocked
until the other end is there. Each rank posts its transfers in the order in which it gets through this play, so every
rank follows one common order of actions and messages, and whatever runs next in it can run: on any network, and on any
device (`schedules.proof.devices`).

In the play, a send follows the action that makes its value. A rank is ready to receive what its next action needs, and
what the compute action after that needs: so a receive is posted one compute action before its use. If ranks then wait
for each other, one of them goes on: it takes a message that another rank has ready for it, however late it is used; or
it posts a receive only after the action in between, because its message depends on that action. The consuming action
waits for its receives itself, so the vocabulary has no wait for them.

Where a schedule has ticks, these put the actions of all ranks into one order, and no ranks wait in a circle: a message
passes once its receiver is ready for it, but before its sender goes on. Its peers are all that a rank needs to know.

A send buffer must live until the transfer completes, and asking whether it has costs a wait. But once we consume a
message that the peer made after consuming one of our sends, that send has completed: its `WAIT` returns at once. Sends
that no message vouches for are waited for at the end. Without backwards, as in evaluation, that would be all of them.
So a rank with one stage waits for those of earlier microbatches as it goes on, and is a few ahead of its peers at most.

Invariants. On each channel, sends and receives are the same messages in the same order. Every receive has one consumer
on its rank. Every send is followed by exactly one `WAIT`. `W` never communicates. A fused pair stays together.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Set
from dataclasses import dataclass
from functools import cache, cached_property, singledispatch
from heapq import heappop, heappush
from itertools import pairwise
from math import inf

from schedules.arguments import require_types
from schedules.errors import ScheduleError
from schedules.language.actions import BESIDE, Action, Message, receive_of, wait_of
from schedules.language.graph import Graph
from schedules.language.membership import explain_misfits
from schedules.language.schedule import Schedule, graph_of, picture
from schedules.lowering.turns import Turn, Turns, place_of, target_of

IN_FLIGHT = 2
"""The number of microbatches whose values a rank without backwards sends before it waits for the first of them."""


@dataclass(frozen=True)
class Program:
    """A schedule lowered for one stage graph; `actions(rank)` generates one rank's compute actions and transfers.

    >>> from schedules import lower, one_f_one_b
    >>> program = lower(one_f_one_b(ranks=2, microbatches=1))
    >>> " ".join(map(str, program.actions(0)))
    '0F0 0SEND_F0>1 0RECV_B0<1 0B0 0WAIT_F0>1'
    >>> program.channels
    ((0, 1), (1, 0))
    """

    schedule: Schedule
    graph: Graph

    @cached_property
    def channels(self) -> tuple[tuple[int, int], ...]:
        """Every directed pair of ranks between which a message travels, in ascending order."""
        placement, graph, back = self.schedule.placement, self.graph, self.schedule.backward
        edges = graph.values | (graph.gradients | {(t, s) for s, t in graph.cotangents} if back else set())
        pairs = {(homes[s], homes[t]) for homes in placement.routes for s, t in edges}
        copies = map(placement.replicas, range(placement.stages * back))
        pairs |= {(a, b) for replicas in copies if len(replicas) > 1 for a in replicas for b in replicas}
        return tuple(sorted((a, b) for a, b in pairs if a != b))

    @cached_property
    def waits_early(self) -> bool:
        """True if ranks wait for sends of earlier microbatches before they run later ones.

        There are no backwards, and each rank runs all microbatches in order on its one stage. So whoever waits, waits
        for a peer to begin an earlier microbatch, and ranks never wait in a circle. A simulation does not count such
        waits: where a transfer takes longer than the forwards of `IN_FLIGHT` microbatches, a run is slower.
        """
        schedule, placement = self.schedule, self.schedule.placement
        if schedule.backward or any(len(placement.stages_on(rank)) > 1 for rank in range(schedule.ranks)):
            return False
        orders = ((a.microbatch for a in schedule.actions(rank) if a.kind == "F") for rank in range(schedule.ranks))
        return all(i <= j for order in orders for i, j in pairwise(order))

    def __str__(self) -> str:
        return picture(self)

    def actions(self, rank: int) -> Iterator[Action]:
        """Return an iterator over the lowered actions of `rank`, in order. Each call generates them anew."""
        return self.streams([rank])[0]

    def streams(self, ranks: Collection[int]) -> list[Iterator[Action]]:
        """Return such an iterator for each of these ranks; together they make one pass over the schedule."""
        played = self._deciding(*ranks) if len(ranks) == 1 else {*range(self.schedule.ranks)}
        return [*map(lower_at_once(self, len(played)) or _Play(self, ranks, played).actions, ranks)]

    def _deciding(self, rank: int) -> set[int]:
        """Return the ranks that decide on the order of one rank's transfers, with itself.

        If the schedule has ticks, these are its peers. Else ranks wait in a circle along channels. Where some part of
        the others is connected to it by one of them alone, no circle leads through it, that one and a third: so that
        one decides for the whole part.
        """
        peers, found = defaultdict[int, set[int]](set), {rank}
        for a, b in self.channels:
            peers[a].add(b)
            peers[b].add(a)
        if self.schedule.ticks is not None:
            return found | peers[rank]
        for peer in peers[rank]:
            part, left = {rank}, [peer]
            while left and peer not in found:
                part.add(one := left.pop())
                left += peers[one] - part
            found |= {peer} if part & peers[rank] == {peer} else part
        return found


@singledispatch
def lower_at_once(program: object, played: int) -> Callable[[int], Iterator[Action]] | None:
    """Return a function from ranks to their actions that beats a play of so many; `schedules.arrays` has one."""
    return None


def lower(schedule: Schedule, graph: Graph | None = None) -> Program:
    """Return `schedule` with the transfers that `graph` (by default the chain of stages) requires.

    Lowering is lazy: `Program.actions` does the work, in memory that does not grow with the number of microbatches,
    unless `lower_at_once` does it. The schedule must pass `check` for the same graph, or its actions may raise.
    Raise `GraphError` if the schedule and the graph differ in their number of stages.
    """
    require_types(lower, locals())
    return Program(schedule, graph_of(schedule, graph))


class _Rank:
    """One rank, and how far it has come.

    - `turns`: the next turn, and as many after it as have been looked at; `stream`: the rest.
    - `sends`: the messages to send before the next turn, each with the rank it goes to.
    - `wanted`: the message whose receive comes next; `is_early`: whether only a later turn needs it.
    - `late`: messages that depend on the next turn, so they are received after it.
    - `posted`: the messages received, until they are consumed, each with the messages of this rank it vouches for.
    - `consumed`: per rank, its messages consumed since the last message to it, which the next one vouches for.
    - `unconfirmed`: the messages sent, until another one vouches for them; `confirmed`: those to wait for now.
    - `line`: the actions that nobody has asked for yet; it keeps none if nobody will.
    - `place`: its place on the path of blocked ranks (`_Play.path`); -1 if it is not there.
    """

    def __init__(self, number: int, stream: Iterator[Turn], line: deque[Action]) -> None:
        self.number, self.stream, self.line = number, stream, line
        self.turns = deque[Turn]()
        self.sends = deque[tuple[Message, int]]()
        self.wanted: Message | None = None
        self.is_early = self.has_ended = False
        self.place = -1
        self.late = set[Message | None]()
        self.posted: dict[Message, list[Message]] = {}
        self.consumed = defaultdict[int, list[Message]](list)
        self.unconfirmed: dict[Message, None] = {}
        self.confirmed = list[Message]()

    def turn(self, number: int) -> Turn | None:
        """Return a turn, counted from the next one; `None` if there are not so many."""
        while len(self.turns) <= number and (following := next(self.stream, None)):
            self.turns.append(following)
        return self.turns[number] if number < len(self.turns) else None

    def find_wanted(self) -> Message | None:
        """Return what to receive before the next turn: what it needs, and the compute action after it, if it is one."""
        number, posted, late = 0, self.posted, self.late
        while number < len(self.turns) or self.turn(number) is not None:
            _, actions, waits, _ = self.turns[number]
            for message in waits:
                if message not in posted and message not in late:
                    self.is_early = number > 0
                    return message
            # What goes on beside takes no time of the rank, so nothing overlaps with it.
            if (number > 0) != (actions != () and actions[0].kind in BESIDE):
                break
            number += 1
        return None


class _Play:
    """Ranks of a program, played together; `wanted` are those whose actions will be asked for.

    - `ready`: the ranks that may go on; `latest`: the one that went on last.
    - `path`: blocked ranks, each of which waits for the next.
    - `next`: if the schedule has ticks, the places of the ranks' next turns (`_place`), as a heap.
    """

    def __init__(self, program: Program, wanted: Collection[int], played: Set[int]) -> None:
        self.program, self.schedule, self.routes = program, program.schedule, program.schedule.placement.routes
        turns = {one: Turns(program.schedule, program.graph, one, played - {one}) for one in sorted(played)}
        self.ranks = {one: _Rank(one, iter(turns[one]), deque(maxlen=None if one in wanted else 0)) for one in turns}
        self.ready = [*reversed(self.ranks.values())]
        self.path = list[_Rank]()
        self.latest = self.ready[0]
        self.ticks = cache(program.schedule.ticks) if program.schedule.ticks else None
        self.next: list[tuple[float, bool, int, int]] = [(-inf, False, one, 0) for one in turns if self.ticks]

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the actions of one rank as they become known."""
        me = self.ranks[rank]
        with explain_misfits(self.schedule):
            while me.line or not me.has_ended:
                if me.line:
                    yield me.line.popleft()
                elif self.next:
                    self._step(self.ranks[abs(self.next[0][2])], self.next[0][3])
                elif self.ready:
                    self.latest = self.ready.pop()
                    self._advance(self.latest)
                else:
                    self._unblock(me if self.latest.has_ended else self.latest)

    def _advance(self, rank: _Rank) -> None:
        """Play one rank until it blocks, or to its end."""
        while rank.place >= 0:
            self.path.pop().place = -1
        while not rank.has_ended:
            if rank.sends:
                target = self.ranks[rank.sends[0][1]]
                if target.wanted is None or self._source(target.wanted) is not rank:
                    return
                self._pass(rank, target)
                self.ready.append(target)
                continue
            if rank.confirmed:
                rank.line.extend(map(wait_of, rank.confirmed))
                rank.confirmed.clear()
            rank.wanted = rank.wanted or rank.find_wanted()
            if rank.wanted is None:
                self._run(rank)
                continue
            source = self._source(rank.wanted)
            if not source.sends or source.sends[0][1] != rank.number:
                return
            self._pass(source, rank)
            self.ready.append(source)

    def _place(self, rank: _Rank) -> tuple[float, bool, int, int]:
        """Return the place of a rank's next pass in the order of ticks, and the number of turns up to it."""
        number = 0
        while (turn := rank.turn(number)) and turn.actions:
            number += 1
            if place := place_of(turn.actions[-1], self.schedule, self.ticks, rank.number):
                return *place, number
        return inf, number == 0, rank.number, number or 2  # the end, after all other turns

    def _step(self, rank: _Rank, turns: int) -> None:
        """Play the next turns of the rank that comes first in the order of ticks. What it has made leaves first."""
        for _ in range(turns):
            while rank.sends:
                self._pass(rank, self.ranks[rank.sends[0][1]])
            rank.line.extend(map(wait_of, rank.confirmed))
            rank.confirmed.clear()
            while message := rank.find_wanted():
                if (message, rank.number) in self._source(message).sends:
                    self._pass(self._source(message), rank, message)
                elif rank.is_early:
                    rank.late.add(message)
                else:
                    rank.wanted = message
                    raise self._explain_deadlock(rank)
            self._run(rank)
        heappop(self.next)
        if not rank.has_ended:
            heappush(self.next, self._place(rank))

    def _run(self, rank: _Rank) -> None:
        """Run the next turn of a rank; at the end, wait for the sends that no message vouches for."""
        turn = rank.turns.popleft() if rank.turns else None
        if turn is None:
            rank.has_ended = True
            rank.line.extend(map(wait_of, (*rank.confirmed, *rank.unconfirmed)))
            return
        rank.late.clear()
        if self.program.waits_early and turn.actions:
            old = [sent for sent in rank.unconfirmed if sent.microbatch <= turn.actions[0].microbatch - IN_FLIGHT]
            for sent in old:
                del rank.unconfirmed[sent]
            rank.line.extend(map(wait_of, old))
        for message in turn.waits:
            for sent in rank.posted.pop(message):
                del rank.unconfirmed[sent]
                rank.confirmed.append(sent)
            rank.consumed[self._source(message).number].append(message)
        for message in turn.sends:
            rank.sends.append((message, target_of(message, self.schedule.placement)))
        rank.line.extend(turn.actions)

    def _pass(self, source: _Rank, target: _Rank, message: Message | None = None) -> None:
        """Pass a message of one rank to another, by default the next one."""
        message = message or source.sends[0][0]
        source.sends.remove((message, target.number))
        source.unconfirmed[message] = None
        target.posted[message] = source.consumed.pop(target.number, [])
        target.wanted = None
        source.line.append(message)
        if target.line.maxlen is None:
            target.line.append(receive_of(message))

    def _source(self, message: Message) -> _Rank:
        _, stage, microbatch, _, _ = message
        return self.ranks[self.routes[microbatch % len(self.routes)][stage]]

    def _blocker(self, rank: _Rank) -> _Rank:
        """Return the rank that a blocked rank waits for."""
        if rank.sends:
            return self.ranks[rank.sends[0][1]]
        assert rank.wanted is not None, "a rank that sends nothing waits to receive"
        return self._source(rank.wanted)

    def _unblock(self, rank: _Rank) -> None:
        """Let a rank go on, now that all are blocked: one of those that wait for each other.

        Follow who waits for whom, from the end of the path or else from `rank`, back to a place on the path: the ranks
        from there on wait in a circle. A send whose receive nobody has asked for is received now, if there is one. Else
        a receive waits for the action in between: its message depends on it. Of several such ranks, one that waits for
        a rank of another kind goes on, or else the first, wherever the circle was entered: so each process finds the
        same. Raise `ScheduleError` if there is none.
        """
        path, rank = self.path, self._blocker(self.path[-1]) if self.path else rank
        while rank.place < 0 and not rank.has_ended:
            rank.place = len(path)
            path.append(rank)
            rank = self._blocker(rank)
        circle = path[-1:] if rank.has_ended else path[rank.place :]
        senders = {one for one in circle if one.sends and not rank.has_ended}
        early = {one for one in circle if one.is_early and not one.sends}
        if not (able := senders or early):
            raise self._explain_deadlock(min(circle, key=lambda one: one.number))
        chosen = min(able, key=lambda one: (self._blocker(one) in able, one.number))
        if senders:
            self.ready += [self._blocker(chosen), chosen]
            self._pass(chosen, self._blocker(chosen))
        else:
            self.ready.append(chosen)
            chosen.late |= {chosen.wanted}
            chosen.wanted = None

    def _explain_deadlock(self, rank: _Rank) -> ScheduleError:
        """Return the error for a rank that waits for a message which never comes, or sends one that nobody needs."""
        other, turn = self._blocker(rank), rank.turn(0)
        if rank.sends:
            problem = f"comes after {rank.sends[0][0]}, which rank {other.number} never uses"
        elif other.has_ended:
            problem = f"waits for {rank.wanted}, which rank {other.number} never runs, or runs only once"
        else:
            first = f"needs {other.wanted} first" if other.wanted else "has a later tick"
            problem = f"waits for {rank.wanted}, but its sender {first}"
        repair = "Run check(schedule, graph) first: it names the cause."
        action, position = (next(iter(turn.actions), None), turn.position) if turn else (None, 0)
        return ScheduleError("ordered", rank.number, position, action, problem, repair)
