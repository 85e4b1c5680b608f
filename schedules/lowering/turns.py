# SPDX-License-Identifier: Apache-2.0
"""The messages that a rank exchanges with other ranks, action by action.

Values and cotangents cross the edges of the stage graph with every microbatch: for each kind of action and stage, they
are looked up in a table that is built once. Gradients travel once per step (`schedules.lowering.gradients`).
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import NamedTuple

from schedules.language.actions import KINDS, SENDS, Action, Message, new_tuple
from schedules.language.graph import Graph
from schedules.language.schedule import Schedule
from schedules.lowering.gradients import GradientExchange


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
        self.exchanges: dict[str, dict[int, _Exchange]] = {kind: {} for kind, word in KINDS.items() if not word.does}
        for route, homes in enumerate(self.routes):
            for s in (s for s in schedule.placement.stages_on(rank) if homes[s] == rank):
                for kind, exchanges in self.exchanges.items():
                    exchanges[s * len(self.routes) + route] = self._exchange(kind, s, homes)

    def _exchange(self, kind: str, s: int, homes: tuple[int, ...]) -> _Exchange:
        word, graph = KINDS[kind], self.graph
        sources = {"F": graph.fed_by[s], "B": graph.pulled_by[s], "": ()}[word.crosses]
        targets = {"F": graph.feeds[s], "B": graph.pulls[s], "": ()}[word.crosses]
        return _Exchange(
            tuple((SENDS[word.crosses], p) for p in sources if homes[p] in self.peers),
            tuple((SENDS[word.crosses], t) for t in targets if homes[t] in self.peers),
            (word.after == "done" or kind in ("G", "REDUCE_GRAD", "U")) and self.gradients.has_any(kind, s),
        )

    def __iter__(self) -> Iterator[Turn]:
        """Yield every turn, then one without actions that waits for the remaining gradients of shared parameters."""
        R, opener, position = len(self.routes), None, -1
        nothing: list[Message] = []
        for position, action in enumerate(self.schedule.actions(self.rank)):
            kind, s, i, _, part = action
            takes, gives, gradients = self.exchanges[kind][s if R == 1 else s * R + i % R]
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
