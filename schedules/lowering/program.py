# SPDX-License-Identifier: Apache-2.0
"""Lower a schedule for a stage graph: insert the transfers, so that the program is ready to run.

Problem. A schedule never mentions a transfer, but every rank must post its own sends and receives, and both ends of a
channel must post in the same order, early enough that neither waits for the other's post.

Idea. A channel is a directed pair (source rank, target rank). A send follows the action that makes its value. Receives
are posted in the sender's order, which the receiver finds by replaying the sender's generator, and at least one compute
action before their use. The consuming action waits for its receives itself, so the vocabulary has no wait for them.

A send buffer must live until the transfer completes, and asking whether it has costs a wait. But once we consume a
message that the peer made after consuming one of our sends, that send has completed: its `WAIT` returns at once. Sends
that no message vouches for are waited for at the end. Without backwards, as in evaluation, that would be all of them.
So a rank with one stage waits for those of earlier microbatches as it goes on, and is a few ahead of its peers at most.

So receive buffers are few, whatever the number of microbatches. While an action runs, the pending receives are those
the next action uses, plus any sent earlier on the same channel but used later: one or two, or three beside fused pairs.

Invariants. On each channel, sends and receives are the same messages in the same order. Every receive has one consumer
on its rank. Every send is followed by exactly one `WAIT`. `W` never communicates. A fused pair stays together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from schedules.arguments import require_types
from schedules.errors import ScheduleError
from schedules.language.actions import COLLECTIVES, Action, Message, receive_of, wait_of
from schedules.language.graph import Graph
from schedules.language.membership import require_valid_actions
from schedules.language.schedule import Schedule, graph_of, picture
from schedules.lowering.turns import Turn, Turns

LOOK_AHEAD = 1
IN_FLIGHT = 2
"""The number of microbatches whose values a rank without backwards sends before it waits for the first of them."""


@dataclass(frozen=True)
class Program:
    """A schedule lowered for one stage graph; `actions(rank)` generates one rank's compute actions and transfers.

    >>> from schedules import lower, one_f_one_b
    >>> program = lower(one_f_one_b(ranks=2, microbatches=1))
    >>> " ".join(map(str, program.actions(0)))
    '0RECV_B0<1 0F0 0SEND_F0>1 0B0 0WAIT_F0>1'
    >>> program.channels
    ((0, 1), (1, 0))
    """

    schedule: Schedule
    graph: Graph

    @cached_property
    def channels(self) -> tuple[tuple[int, int], ...]:
        """Every directed pair of ranks between which a message travels, in ascending order."""
        placement, graph = self.schedule.placement, self.graph
        pairs = set[tuple[int, int]]()
        for homes in placement.routes:
            pairs |= {(homes[s], homes[t]) for s, t in graph.values}
            if self.schedule.backward:
                pairs |= {(homes[s], homes[t]) for s, t in graph.gradients}
                pairs |= {(homes[t], homes[s]) for s, t in graph.cotangents}
        for s in range(placement.stages * self.schedule.backward):
            pairs |= {(a, b) for a in placement.replicas(s) for b in placement.replicas(s)}
        return tuple(sorted((a, b) for a, b in pairs if a != b))

    @cached_property
    def waits_early(self) -> bool:
        """True if ranks wait for sends of earlier microbatches before they run later ones.

        There are no backwards, and each rank runs all microbatches in order on its one stage. So whoever waits, waits
        for a peer to begin an earlier microbatch, and ranks never wait in a circle.
        """
        schedule, placement = self.schedule, self.schedule.placement
        if schedule.backward or any(len(placement.stages_on(rank)) > 1 for rank in range(schedule.ranks)):
            return False
        orders = ((a.microbatch for a in schedule.actions(rank) if a.kind == "F") for rank in range(schedule.ranks))
        return all(i <= j for order in orders for i, j in pairwise(order))

    def __str__(self) -> str:
        """Draw the timeline of the schedule on this graph."""
        return picture(self)

    def actions(self, rank: int) -> Iterator[Action]:
        """Return an iterator over the lowered actions of `rank`, in order. Each call generates them anew."""
        return _Lowering(self, rank).actions()


def lower(schedule: Schedule, graph: Graph | None = None) -> Program:
    """Return `schedule` with the transfers that `graph` (by default the chain of stages) requires.

    Lowering is lazy: `Program.actions` does the work, one rank at a time, in memory that does not grow with the number
    of microbatches. The schedule must pass `check` for the same graph; otherwise its actions may raise `ScheduleError`.
    Raise `GraphError` if the schedule and the graph differ in their number of stages.
    """
    require_types(lower, locals())
    return Program(schedule, graph_of(schedule, graph))


class _Lowering:
    """The state of lowering one rank.

    - `incoming`: per source rank, its messages to this rank in the order it sends them, each with the messages that it
      has consumed before: those vouch for sends of this rank.
    - `posted`: the messages whose receive is posted, until they are consumed, each with what it vouches for.
    - `unconfirmed`: the messages sent, until another one vouches for them.
    """

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.schedule, self.rank = program, program.schedule, rank
        self.routes = program.schedule.placement.routes
        self.incoming = {source: self._messages(source) for source, target in program.channels if target == rank}
        self.posted: dict[Message, list[Message]] = {}
        self.unconfirmed: dict[Message, None] = {}

    def _messages(self, source: int) -> Iterator[tuple[Message, list[Message]]]:
        """Yield what `source` sends here, in order, each with the messages of ours it has consumed since the last."""
        consumed: list[Message] = []
        for _, _, waits, sends in Turns(self.schedule, self.program.graph, source, peers={self.rank}):
            consumed += waits
            for message in sends:
                yield message, consumed
                consumed = []

    def actions(self) -> Iterator[Action]:
        """Yield receives one compute action early, sends after their action, and `WAIT`s once they return at once."""
        try:
            yield from self._actions()
        except KeyError:
            require_valid_actions(self.schedule)
            raise

    def _actions(self) -> Iterator[Action]:
        ahead: deque[Turn] = deque()
        collectives = (
            0  # among the turns ahead; they take no time, so none counts as one that a receive is posted before
        )
        for turn in Turns(self.schedule, self.program.graph, self.rank):
            posts = self._post(turn)
            ahead.append(turn)
            if turn.actions and turn.actions[0].kind in COLLECTIVES:
                collectives += 1
                continue
            while collectives and ahead[0].actions[0].kind in COLLECTIVES:
                posts += self._run(ahead.popleft())
                collectives -= 1
            yield from posts + self._run(ahead.popleft()) if len(ahead) - collectives > LOOK_AHEAD else posts
        for turn in ahead:
            yield from self._run(turn)
        yield from map(wait_of, self.unconfirmed)

    def _post(self, turn: Turn) -> list[Action]:
        """Return the receives to post for the turn, in each source's send order, up to the last one needed."""
        posts: list[Action] = []
        routes, posted = self.routes, self.posted
        for message in turn.waits:
            if message in posted:
                continue
            source = routes[message[2] % len(routes)][message[1]]
            for earlier, vouched in self.incoming[source]:
                posted[earlier] = vouched
                posts.append(receive_of(earlier))
                if earlier == message:
                    break
            else:
                raise self._explain_missing(turn, message, f"which rank {source} never runs, or runs only once")
        return posts

    def _run(self, turn: Turn) -> list[Action]:
        """Return the turn's actions, its sends, and a `WAIT` for each send that the messages it consumes vouch for."""
        actions = [*self._wait_early(turn), *turn.actions, *turn.sends]
        unconfirmed, posted = self.unconfirmed, self.posted
        for message in turn.sends:
            unconfirmed[message] = None
        for message in turn.waits:
            if message not in posted:
                raise self._explain_missing(turn, message, "which an earlier action has consumed")
            for sent in posted.pop(message):
                if sent not in unconfirmed:
                    raise self._explain_missing(turn, message, f"but its sender needs {sent} first")
                del unconfirmed[sent]
                actions.append(wait_of(sent))
        return actions

    def _wait_early(self, turn: Turn) -> list[Action]:
        """Return a `WAIT` for each send of microbatches that are long past, if no message will vouch for them."""
        if not (self.program.waits_early and turn.actions):
            return []
        old = [sent for sent in self.unconfirmed if sent[2] <= turn.actions[0].microbatch - IN_FLIGHT]
        for sent in old:
            del self.unconfirmed[sent]
        return list(map(wait_of, old))

    def _explain_missing(self, turn: Turn, message: Message, why: str) -> ScheduleError:
        action, problem = next(iter(turn.actions), None), f"waits for {message}, {why}"
        repair = "Run check(schedule, graph) first: it names the cause."
        return ScheduleError("ordered", self.rank, turn.position, action, problem, repair)
