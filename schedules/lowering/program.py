# SPDX-License-Identifier: Apache-2.0
"""Lower a schedule for a stage graph: insert the transfers, so that the program is ready to run.

Problem. A schedule never mentions a transfer, but every rank must post its own sends and receives, and both ends of a
channel must post in the same order, early enough that neither waits for the other's post.

Idea. A channel is a directed pair (source rank, target rank). A send follows the action that makes its value. Receives
are posted in the sender's order, which the receiver finds by replaying the sender's generator, and at least one compute
action before their use. The consuming action waits for its receives itself, so the vocabulary has no wait for them.

A send buffer must live until the transfer completes, and asking whether it has costs a wait. But once we consume a
message that the peer made after consuming one of our sends, that send has completed: its `WAIT` returns at once. Sends
that no message vouches for are waited for at the end.

Gradients travel once per step. A replica's gradient leaves after its last weight gradient, for the `G` of the other
replica. A tied parameter's gradient leaves when it is complete, for the other stages that hold copies; they consume it
in their `U`, or at the end of the step.

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
from typing import NamedTuple, TypeAlias

from schedules.errors import ScheduleError
from schedules.language.actions import KINDS, Action
from schedules.language.graph import Graph
from schedules.language.membership import require_fitting
from schedules.language.picture import picture
from schedules.language.schedule import Schedule
from schedules.replay.dependencies import graph_of

LOOK_AHEAD = 1
Message: TypeAlias = tuple[str, int, int, int, int | None]
"""The payload (`F` value, `B` cotangent, `G` gradient), source stage, microbatch, target stage and slice."""


_new = tuple.__new__  # fast: actions and steps are made by the million


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
        found = set[tuple[int, int]]()
        for homes in placement.routes:
            found |= {(homes[s], homes[t]) for s, t in graph.values}
            if self.schedule.backward:
                found |= {(homes[s], homes[t]) for s, t in graph.gradients}
                found |= {(homes[t], homes[s]) for s, t in graph.cotangents}
        for s in range(placement.stages * self.schedule.backward):
            found |= {(a, b) for a in placement.replicas(s) for b in placement.replicas(s)}
        return tuple(sorted((a, b) for a, b in found if a != b))

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
    return Program(schedule, graph_of(schedule, graph))


class Step(NamedTuple):
    """An action or a fused pair, the messages it waits for, and the messages sent after it."""

    position: int
    actions: tuple[Action, ...]
    waits: list[Message]
    sends: list[Message]


class _Row(NamedTuple):
    """The transfers of one kind of action on one stage, as pairs of payload and peer stage.

    `closes` is true if the action may exchange gradients: it may complete the stage's gradient, or use others'.
    """

    taken: tuple[tuple[str, int], ...]
    given: tuple[tuple[str, int], ...]
    closes: bool


class Steps:
    """The steps of `rank`, with all its messages, or only those it exchanges with rank `other`."""

    def __init__(self, program: Program, rank: int, other: int | None = None) -> None:
        self.schedule, self.graph, self.rank, self.other = program.schedule, program.graph, rank, other
        self.placement = program.schedule.placement
        self.routes = self.placement.routes
        self.rows: dict[str, dict[int, _Row]] = {kind: {} for kind, word in KINDS.items() if not word.mark}
        for route, homes in enumerate(self.routes):
            for s in (s for s in self.placement.stages_on(rank) if homes[s] == rank):
                for kind, rows in self.rows.items():
                    rows[s * len(self.routes) + route] = self._row(kind, s, homes)
        self.left = {s: self._units(s) for s in self.placement.stages_on(rank)}
        self.copied = set[int]()  # stages whose update has taken the gradients of tied parameters

    def _row(self, kind: str, s: int, homes: tuple[int, ...]) -> _Row:
        word, graph = KINDS[kind], self.graph
        taken, given = {"F": (graph.fed_by, graph.feeds), "B": (graph.pulled_by, graph.pulls), "": ((), ())}[
            word.crosses
        ]
        closes = (word.after == "done" or kind == "G") and bool(graph.shares[s] or self._replicas(s))
        return _Row(
            tuple((word.crosses, p) for p in (taken[s] if taken else ()) if self._across(homes[p])),
            tuple((word.crosses, t) for t in (given[s] if given else ()) if self._across(homes[t])),
            closes or kind == "G" or (kind == "U" and bool(graph.shared_by[s])),
        )

    def _across(self, rank: int) -> bool:
        """Return whether messages to and from `rank` cross a channel and are among those wanted."""
        return rank != self.rank and self.other in (None, rank)

    def _replicas(self, s: int) -> list[int]:
        """Return the routes on which another rank runs stage `s`."""
        return [route for route, homes in enumerate(self.routes) if homes[s] != self.rank]

    def _units(self, s: int) -> int:
        mine = [route for route, homes in enumerate(self.routes) if homes[s] == self.rank]
        each = (len(range(route, self.schedule.microbatches, len(self.routes))) for route in mine)
        return sum(each) * self.schedule.slices

    def _last(self, route: int) -> int:
        """Return the last microbatch of a route, which names the messages sent once per step."""
        return range(route, self.schedule.microbatches, len(self.routes))[-1]

    def __iter__(self) -> Iterator[Step]:
        """Yield every step, then one without actions that waits for the remaining gradients of tied parameters."""
        R, rows, opener, position = len(self.routes), self.rows, None, -1
        nothing: list[Message] = []
        for position, action in enumerate(self.schedule.actions(self.rank)):
            kind, s, i, _, part = action
            taken, given, closes = rows[kind][s if R == 1 else s * R + i % R]
            waits = sends = nothing
            for what, p in taken:  # mostly one message, for which a comprehension is slow
                waits = [*waits, (what, p, i, s, part)]
            for what, t in given:
                sends = [*sends, (what, s, i, t, part)]
            if closes:
                waits, sends = [*waits, *self._partials(kind, s)], [*sends, *self._complete(kind, s)]
            step = _new(Step, (position, (action,), waits, sends))
            if opener is not None:
                first, opener = opener, None
                yield Step(first.position, (*first.actions, action), first.waits + waits, first.sends + sends)
            elif kind == "OVERLAP_F":
                opener = step
            else:
                yield step
        if opener is not None:
            yield opener
        left = [t for t in self.placement.stages_on(self.rank) if t not in self.copied]
        yield Step(position + 1, (), [copy for t in left for copy in self._copies(t)], nothing)

    def _partials(self, kind: str, s: int) -> Iterator[Message]:
        """Yield the gradients that a `G` waits for, or a `U` of parameters that other stages share."""
        if kind == "U" and s not in self.copied:
            self.copied.add(s)
            yield from self._copies(s)
        if kind == "G":
            for route in self._replicas(s):
                if self._across(self.routes[route][s]):
                    yield "G", s, self._last(route), s, None

    def _complete(self, kind: str, s: int) -> Iterator[Message]:
        """Yield the gradients to send after the action that completes stage `s` on this rank or over all replicas."""
        if kind == "U":
            return
        self.left[s] -= kind != "G"
        if self.left[s] or (kind == "G") != bool(self._replicas(s)):
            if not self.left[s]:
                mine = self.placement.route(s, self.rank)
                yield from (
                    ("G", s, self._last(mine), s, None) for k in self._replicas(s) if self._across(self.routes[k][s])
                )
            return
        for route, homes in enumerate(self.routes):
            if homes[s] == self.rank:
                yield from (
                    ("G", s, self._last(route), t, None) for t in self.graph.shares[s] if self._across(homes[t])
                )

    def _copies(self, t: int) -> Iterator[Message]:
        """Yield the gradients of stage `t`'s tied parameters that other ranks send."""
        for route, homes in enumerate(self.routes if self.schedule.backward else ()):
            if homes[t] == self.rank:
                owners = (s for s in self.graph.shared_by[t] if self._across(homes[s]))
                yield from (("G", s, self._last(route), t, None) for s in owners)


class _Lowering:
    """The state of lowering one rank: which receives are posted and which sends are outstanding."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.schedule, self.rank = program, program.schedule, rank
        self.routes = program.schedule.placement.routes
        self.incoming = {source: self._messages(source) for source, target in program.channels if target == rank}
        self.posted: dict[Message, list[Message]] = {}
        self.out: dict[Message, None] = {}

    def actions(self) -> Iterator[Action]:
        """Yield receives one compute action early, sends after their action, and `WAIT`s as soon as they are free."""
        try:
            yield from self._actions()
        except KeyError:
            require_fitting(self.schedule)
            raise

    def _actions(self) -> Iterator[Action]:
        ahead: deque[Step] = deque()
        for step in Steps(self.program, self.rank):
            posts = self._post(step)
            ahead.append(step)
            yield from posts + self._run(ahead.popleft()) if len(ahead) > LOOK_AHEAD else posts
        for step in ahead:
            yield from self._run(step)
        yield from (_new(Action, (_WAIT[what], s, i, t, part)) for what, s, i, t, part in self.out)

    def _post(self, step: Step) -> list[Action]:
        """Return the receives to post for the step, in each source's send order, up to the last one needed."""
        posts: list[Action] = []
        routes, posted = self.routes, self.posted
        for message in step.waits:
            if message in posted:
                continue
            source = routes[message[2] % len(routes)][message[1]]
            for earlier, vouched in self.incoming[source]:
                posted[earlier] = vouched
                what, s, i, t, part = earlier
                posts.append(_new(Action, (_RECEIVE[what], t, i, s, part)))
                if earlier == message:
                    break
            else:
                why = f"waits for {transfer('SEND', message)}, which rank {source} never does, or only once"
                raise self._stranded(step, why)
        return posts

    def _run(self, step: Step) -> list[Action]:
        """Return the step's actions, its sends, and a `WAIT` for each send that the messages it consumed vouch for."""
        words = [*step.actions]
        out, posted = self.out, self.posted
        for message in step.sends:
            out[message] = None
            what, s, i, t, part = message
            words.append(_new(Action, (_SEND[what], s, i, t, part)))
        for message in step.waits:
            if message not in posted:
                raise self._stranded(
                    step, f"waits for {transfer('SEND', message)}, which an earlier action has consumed"
                )
            for sent in posted.pop(message):
                if sent not in out:
                    problem = (
                        f"waits for {transfer('SEND', message)}, before which its sender needs {transfer('SEND', sent)}"
                    )
                    raise self._stranded(step, problem)
                del out[sent]
                what, s, i, t, part = sent
                words.append(_new(Action, (_WAIT[what], s, i, t, part)))
        return words

    def _stranded(self, step: Step, problem: str) -> ScheduleError:
        repair = "Run check(schedule, graph) first: it names the cause."
        return ScheduleError("ordered", self.rank, step.position, next(iter(step.actions), None), problem, repair)

    def _messages(self, source: int) -> Iterator[tuple[Message, list[Message]]]:
        """Yield what `source` sends here, in order, each with the messages of ours it has consumed since the last."""
        consumed: list[Message] = []
        for _, _, waits, sends in Steps(self.program, source, self.rank):
            consumed += waits
            for message in sends:
                yield message, consumed
                consumed = []


def transfer(word: str, message: Message) -> Action:
    """Return the `SEND`, `RECV` or `WAIT` action of a message.

    >>> str(transfer("RECV", ("F", 0, 3, 1, None)))
    '1RECV_F3<0'
    """
    what, s, i, t, part = message
    return Action(f"{word}_{what}", t, i, s, part) if word == "RECV" else Action(f"{word}_{what}", s, i, t, part)


_SEND = {"F": "SEND_F", "B": "SEND_B", "G": "SEND_G"}
_RECEIVE = {"F": "RECV_F", "B": "RECV_B", "G": "RECV_G"}
_WAIT = {"F": "WAIT_F", "B": "WAIT_B", "G": "WAIT_G"}
