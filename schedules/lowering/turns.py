# SPDX-License-Identifier: Apache-2.0
"""The messages that a rank exchanges with other ranks, action by action.

Values and cotangents cross the edges of the stage graph with every microbatch: for each kind of action and stage, they
are found once. Gradients travel once per step (`GradientExchange`).
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from functools import cache
from typing import NamedTuple, TypeAlias

from schedules.language.actions import KINDS, SENDS, Action, Message, new_tuple
from schedules.language.graph import Graph
from schedules.language.placement import Placement
from schedules.language.schedule import Schedule, TickRule, completes_gradient


class Turn(NamedTuple):
    """An action or a fused pair at `position`, the messages it waits for, and the messages to send after it."""

    position: int
    actions: tuple[Action, ...]
    waits: list[Message]
    sends: list[Message]


class _Exchange(NamedTuple):
    """The transfers of one kind of action on one stage with other ranks, as pairs of kind of send and peer stage.

    `gradients` is true if the action may also send gradients or wait for them.
    """

    takes: tuple[tuple[str, int], ...]
    gives: tuple[tuple[str, int], ...]
    gradients: bool


class Turns:
    """The turns of `rank`, with the messages that it exchanges with the ranks in `peers`, by default all others."""

    def __init__(self, schedule: Schedule, graph: Graph, rank: int, peers: Set[int] | None = None) -> None:
        self.schedule, self.graph, self.rank = schedule, graph, rank
        self.peers = {*range(schedule.ranks)} - {rank} if peers is None else peers
        self.routes = schedule.placement.routes
        self.gradients = GradientExchange(schedule, graph, rank, self.peers)

    def _exchange(self, kind: str, s: int, route: int) -> _Exchange:
        word, graph, homes = KINDS[kind], self.graph, self.routes[route]
        if word.does or (s, self.rank) not in enumerate(homes):
            raise KeyError(kind, s, route)
        sources = {"F": graph.fed_by[s], "B": graph.pulled_by[s], "": ()}[word.crosses]
        targets = {"F": graph.feeds[s], "B": graph.pulls[s], "": ()}[word.crosses]
        return _Exchange(
            tuple((SENDS[word.crosses], p) for p in sources if homes[p] in self.peers),
            tuple((SENDS[word.crosses], t) for t in targets if homes[t] in self.peers),
            (word.after == "done" or kind in ("G", "REDUCE_GRAD", "U")) and self.gradients.has_any(s),
        )

    def __iter__(self) -> Iterator[Turn]:
        """Yield every turn, then one without actions that waits for the remaining gradients of shared parameters."""
        R, opener, position = len(self.routes), None, -1
        exchange = cache(self._exchange)  # in an attribute, it would refer to itself
        nothing: list[Message] = []
        for position, action in enumerate(self.schedule.actions(self.rank)):
            kind, s, i, _, part = action
            takes, gives, gradients = exchange(kind, s, i % R)
            waits = sends = nothing
            for send, p in takes:  # mostly one message, for which a comprehension is slow
                waits = [*waits, new_tuple(Action, (send, p, i, s, part))]
            for send, t in gives:
                sends = [*sends, new_tuple(Action, (send, s, i, t, part))]
            if gradients:
                waits = [*waits, *self.gradients.needed_by(kind, s)]
                sends = [*sends, *self.gradients.completed_by(kind, s)]
            turn = new_tuple(Turn, (position, (action,), waits, sends))
            if opener is not None:
                yield Turn(opener.position, (*opener.actions, action), opener.waits + waits, opener.sends + sends)
                opener = None
            elif kind == "OVERLAP_F":
                opener = turn
            else:
                yield turn
        if opener is not None:
            yield opener
        yield Turn(position + 1, (), [*self.gradients.left_to_receive()], nothing)


TickPlace: TypeAlias = tuple[int, bool, int]
"""The place of a pass in the order of ticks: in each, forwards go down the ranks, then backwards go up."""


def place_of(action: Action, schedule: Schedule, ticks: TickRule | None, rank: int) -> TickPlace | None:
    """Return the place of an action of a rank in the order of ticks, if it is a pass of a schedule that has them."""
    kind, s, i, _, part = action
    crosses = KINDS[kind].crosses
    if ticks is None or not crosses:
        return None
    return place_at(ticks, s, i * schedule.slices + (part or 0), crosses == "B", rank)


def place_at(ticks: TickRule, stage: int, unit: int, is_back: bool, rank: int) -> TickPlace:
    """Return the place of the forward or backward of a stage for a unit, on a rank."""
    return ticks(stage)[is_back][unit], is_back, -rank if is_back else rank


def target_of(message: Message, placement: Placement) -> int:
    """Return the rank a message goes to: the target stage's, or that of another replica of the stage."""
    _, s, i, t, part = message
    assert t is not None, "a message has a target stage"
    if s != t:
        return placement.home(t, i)
    source, replicas = placement.home(s, i), placement.replicas(s)
    others = [rank for rank in replicas if rank != source]
    if len(others) == 1:
        return others[0] if part is None else source
    return dict(enumerate(replicas)).get(-1 if part is None else part, source)


def message_to_replica(placement: Placement, s: int, source: int, target: int, microbatches: int) -> Message:
    """Return the message in which one replica of a stage sends another its part of the gradient.

    If there are more than two, the slice says which of them gets it.
    """
    replicas = placement.replicas(s)
    part = replicas.index(target) if len(replicas) > 2 else None
    return Action("SEND_G", s, placement.last(s, source, microbatches), s, part)


class GradientExchange:
    """The gradients that `rank` exchanges with the ranks in `peers`, each once per step, for one of two reasons.

    - A stage has replicas. Each replica sends its part to the others once its last backward has run; each `G` waits for
      the parts of the others and adds them up.
    - A stage shares parameters with other stages. Its gradient goes to them once it is complete: after its
      `REDUCE_GRAD` if the schedule has one, else after the `G` if the stage has replicas, else after its last backward.
      They use it in their `U`, or at the end of the step.

    `backwards_left` counts, per stage, the backwards that `rank` has still to run; `received` are the stages whose
    update has used the gradients of the parameters they share; `completers` says, for each stage that shares
    parameters, which actions complete its gradient.
    """

    def __init__(self, schedule: Schedule, graph: Graph, rank: int, peers: Set[int]) -> None:
        self.schedule, self.graph, self.rank, self.peers = schedule, graph, rank, peers
        self.placement, held = schedule.placement, schedule.placement.stages_on(rank)
        self.backwards_left = {
            s: sum(self.placement.home(s, i) == rank for i in range(schedule.microbatches)) * schedule.slices
            for s in filter(self.has_any, held)
        }
        self.received = set[int]()
        self.completers = {s: completes_gradient(schedule, s, rank) for s in held if graph.shares[s]}

    def has_any(self, s: int) -> bool:
        """Return whether actions on stage `s` send gradients or wait for them."""
        return bool(self.graph.shares[s] or self.graph.shared_by[s]) or len(self.placement.replicas(s)) > 1

    def needed_by(self, kind: str, s: int) -> Iterator[Message]:
        """Yield the gradients that an action on stage `s` waits for: a `G`, or the first `U`."""
        if kind == "U" and s not in self.received:
            self.received.add(s)
            yield from self._from_sharing_stages(s)
        if kind == "G":
            for home in self._replicas(s):
                yield message_to_replica(self.placement, s, home, self.rank, self.schedule.microbatches)

    def left_to_receive(self) -> Iterator[Message]:
        """Yield the gradients that no update has waited for: their stages use them at the end of the step."""
        for s in self.placement.stages_on(self.rank):
            if s not in self.received:
                yield from self._from_sharing_stages(s)

    def completed_by(self, kind: str, s: int) -> Iterator[Message]:
        """Yield the gradients to send after an action on stage `s`, which has run."""
        if kind == "U":
            return
        what = kind if kind in ("G", "REDUCE_GRAD") else "done"
        self.backwards_left[s] -= what == "done"
        if self.backwards_left[s]:
            return
        for home in self._replicas(s) if what == "done" else ():
            yield message_to_replica(self.placement, s, self.rank, home, self.schedule.microbatches)
        if what == self.completers.get(s):
            yield from self._to_sharing_stages(s)

    def _to_sharing_stages(self, s: int) -> Iterator[Message]:
        for t in self.graph.shares[s]:
            pairs = self._last_microbatches(s, t).items()
            yield from (Action("SEND_G", s, i, t) for (a, b), i in pairs if a == self.rank and b in self.peers)

    def _from_sharing_stages(self, t: int) -> Iterator[Message]:
        for s in self.graph.shared_by[t] if self.schedule.backward else ():
            pairs = self._last_microbatches(s, t).items()
            yield from (Action("SEND_G", s, i, t) for (a, b), i in pairs if b == self.rank and a in self.peers)

    def _last_microbatches(self, s: int, t: int) -> dict[tuple[int, int], int]:
        """Return, for each pair of ranks that run two stages for the same microbatches, the last of these."""
        M, home = self.schedule.microbatches, self.placement.home
        return {(home(s, i), home(t, i)): i for i in range(max(0, M - len(self.placement.routes)), M)}

    def _replicas(self, s: int) -> Iterator[int]:
        """Yield the peers that hold stage `s`, too."""
        return (rank for rank in self.placement.replicas(s) if rank in self.peers)
