# SPDX-License-Identifier: Apache-2.0
"""From a schedule and a stage graph to a program: transfers inserted, ready to run.

Problem. A schedule never mentions a transfer, but a rank must post every send and receive itself, and both ends of a
channel must do so in the same order, early enough that nobody waits for a post.

Idea. A channel is a directed pair (source rank, target rank). A send follows the action that makes its value. Receives
are posted in the sender's order, which the receiver finds by replaying the sender's generator, and at least one compute
action ahead of their use. Waiting happens inside the consuming action, so it has no word of its own.

A send's buffer must stay until the transfer is done, and asking costs a wait. But when a message arrives that the
receiver made after consuming an earlier send of ours, that send is done for certain: `WAIT` then returns at once. What
no message vouches for is waited for at the end.

Invariants. Per channel, sends and receives are the same messages in the same order. Every receive has one consumer on
its rank. Every send is followed by exactly one `WAIT`. `W` never communicates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from schedules.actions import Action
from schedules.authoring import Schedule
from schedules.errors import ScheduleError
from schedules.graph import Graph
from schedules.placement import Placement
from schedules.wiring import graph_of

LOOK_AHEAD = 1


@dataclass(frozen=True)
class Program:
    """A schedule lowered for one stage graph. `actions(rank)` generates one rank's compute actions and transfers.

    >>> from schedules import lower, one_f_one_b
    >>> program = lower(one_f_one_b(ranks=2, microbatches=1))
    >>> " ".join(map(str, program.actions(0)))
    '0RECV_B0<1 0F0 0SEND_F0>1 0B0 0WAIT_F0>1'
    >>> program.channels
    ((0, 1), (1, 0))
    """

    schedule: Schedule
    graph: Graph

    @property
    def channels(self) -> tuple[tuple[int, int], ...]:
        """Every directed pair of ranks between which something travels, in ascending order."""
        homes = self.schedule.placement.homes
        forward = {(homes[s], homes[t]) for s, t in self.graph.values | self.graph.gradients}
        backward = {(homes[t], homes[s]) for s, t in self.graph.cotangents}
        return tuple(sorted((a, b) for a, b in forward | backward if a != b))

    def actions(self, rank: int) -> Iterator[Action]:
        """The lowered actions of `rank`, in order, generated afresh by every call."""
        return _Lowering(self, rank).actions()


def lower(schedule: Schedule, graph: Graph | None = None) -> Program:
    """Insert the transfers that `graph` (by default the chain of stages) asks of `schedule`.

    Lazy: the work is done by `Program.actions`, one rank at a time, in memory that does not grow with the number of
    microbatches. The schedule must pass `check` for the same graph; where it does not, its actions may raise
    `ScheduleError`. Raises `GraphError` if the sizes differ.
    """
    return Program(schedule, graph_of(schedule, graph))


class _Step(NamedTuple):
    """One compute action, with the messages that it waits for and those that leave after it."""

    position: int
    action: Action | None
    waits: tuple[Action, ...]
    sends: tuple[Action, ...]


@dataclass(frozen=True)
class _Wiring:
    """Which messages an action causes, seen from either end; a message is named by the action that sends it."""

    graph: Graph
    placement: Placement
    microbatches: int

    def sends(self, action: Action, last: bool) -> Iterator[Action]:
        """What leaves the rank once `action` has run; `last` says that the stage's gradient is complete with it."""
        kind, s, i, _, _ = action
        homes = self.placement.homes
        if kind == "F":
            yield from (Action("SEND_F", s, i, t) for t in self.graph.feeds[s] if homes[t] != homes[s])
        elif kind != "W":
            yield from (Action("SEND_B", s, i, p) for p in self.graph.pulls[s] if homes[p] != homes[s])
        if last:
            final = self.microbatches - 1
            yield from (Action("SEND_G", s, final, t) for t in self.graph.shares[s] if homes[t] != homes[s])

    def receives(self, action: Action) -> Iterator[Action]:
        """The messages that `action` waits for."""
        kind, s, i, _, _ = action
        homes = self.placement.homes
        if kind == "F":
            yield from (Action("SEND_F", p, i, s) for p in self.graph.fed_by[s] if homes[p] != homes[s])
        elif kind != "W":
            yield from (Action("SEND_B", t, i, s) for t in self.graph.pulled_by[s] if homes[t] != homes[s])

    def gradients(self, stages: tuple[int, ...]) -> Iterator[Action]:
        """The messages with which the owners of shared parameters end the step of these stages' rank."""
        homes, final = self.placement.homes, self.microbatches - 1
        for t in stages:
            yield from (Action("SEND_G", s, final, t) for s in self.graph.shared_by[t] if homes[s] != homes[t])

    def steps(self, schedule: Schedule, rank: int) -> Iterator[_Step]:
        """Every compute action of `rank` and what travels for it; last, without action, the shared gradients."""
        stages, position = self.placement.stages_on(rank), -1
        left = dict.fromkeys(stages, self.microbatches)
        for position, action in enumerate(schedule.actions(rank)):
            if action.kind in "BW":
                left[action.stage] -= 1
            last = action.kind in "BW" and not left[action.stage]
            yield _Step(position, action, tuple(self.receives(action)), tuple(self.sends(action, last)))
        yield _Step(position + 1, None, tuple(self.gradients(stages)), ())


class _Lowering:
    """The state of lowering one rank: which receives are posted, which sends are still out."""

    def __init__(self, program: Program, rank: int) -> None:
        schedule, graph = program.schedule, program.graph
        self.schedule, self.rank = schedule, rank
        self.wiring = _Wiring(graph, schedule.placement, schedule.microbatches)
        self.incoming = {source: self._messages(source) for source, target in program.channels if target == rank}
        self.posted: dict[Action, tuple[Action, ...]] = {}
        self.out: dict[Action, None] = {}

    def actions(self) -> Iterator[Action]:
        """Receives run one compute action ahead; sends follow their action; what is vouched for is let go."""
        ahead: deque[_Step] = deque()
        for step in self.wiring.steps(self.schedule, self.rank):
            yield from self._post(step)
            ahead.append(step)
            if len(ahead) > LOOK_AHEAD:
                yield from self._run(ahead.popleft())
        for step in ahead:
            yield from self._run(step)
        yield from (action._replace(kind=_WAIT[action.kind]) for action in self.out)

    def _post(self, step: _Step) -> Iterator[Action]:
        for message in step.waits:
            source = self.schedule.placement.homes[message.stage]
            while message not in self.posted:
                earlier, vouched = next(self.incoming[source], (None, ()))
                if earlier is None:
                    raise self._stranded(step, f"waits for {message}, which rank {source} never does, or only once")
                self.posted[earlier] = vouched
                yield Action(_RECEIVE[earlier.kind], _peer(earlier), earlier.microbatch, earlier.stage)

    def _run(self, step: _Step) -> Iterator[Action]:
        if step.action:
            yield step.action
        yield from step.sends
        self.out.update(dict.fromkeys(step.sends))
        for message in step.waits:
            if message not in self.posted:
                raise self._stranded(step, f"waits for {message}, which an earlier action has consumed")
            for sent in self.posted.pop(message):
                if sent not in self.out:
                    raise self._stranded(step, f"waits for {message}, before which its sender needs {sent}")
                del self.out[sent]
                yield sent._replace(kind=_WAIT[sent.kind])

    def _stranded(self, step: _Step, problem: str) -> ScheduleError:
        repair = "Run check(schedule, graph) first: it names the cause."
        return ScheduleError("ordered", self.rank, step.position, step.action, problem, repair)

    def _messages(self, source: int) -> Iterator[tuple[Action, tuple[Action, ...]]]:
        """What `source` sends to this rank, in its order, each with the messages of ours that it has consumed since."""
        homes = self.schedule.placement.homes
        consumed: list[Action] = []
        for step in self.wiring.steps(self.schedule, source):
            consumed += (message for message in step.waits if homes[message.stage] == self.rank)
            for message in step.sends:
                if homes[_peer(message)] == self.rank:
                    yield message, tuple(consumed)
                    consumed = []


def _peer(message: Action) -> int:
    assert message.peer is not None, "a message has a peer stage"
    return message.peer


_RECEIVE = {"SEND_F": "RECV_F", "SEND_B": "RECV_B", "SEND_G": "RECV_G"}
_WAIT = {"SEND_F": "WAIT_F", "SEND_B": "WAIT_B", "SEND_G": "WAIT_G"}
