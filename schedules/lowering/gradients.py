# SPDX-License-Identifier: Apache-2.0
"""When a rank sends gradients to other ranks, and which gradients it waits for.

Gradients travel once per step, and there are two reasons to send one:

- A stage has replicas. Each replica sends its part to the others once its last backward has run; each `G` waits for
  the parts of the others and adds them up.
- A stage shares parameters with other stages. Its gradient goes to them once it is complete: after its `REDUCE_GRAD`
  if the schedule has one, else after the `G` if the stage has replicas, else after its last backward. They use it in
  their `U`, or at the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from schedules.language.actions import Action, Message
from schedules.language.graph import Graph
from schedules.language.schedule import Schedule
from schedules.replay.dependencies import completes_gradient


class GradientExchange:
    """The gradients that `rank` exchanges with the ranks in `peers`.

    `backwards_left` counts, per stage, the backwards that `rank` has still to run; `received` are the stages whose
    update has used the gradients of the parameters they share; `completers` says, for each stage that shares
    parameters, which actions complete its gradient.
    """

    def __init__(self, schedule: Schedule, graph: Graph, rank: int, peers: Set[int]) -> None:
        self.schedule, self.graph, self.rank, self.peers = schedule, graph, rank, peers
        self.placement, self.routes = schedule.placement, schedule.placement.routes
        self.backwards_left = {s: self._count_units(s) for s in self.placement.stages_on(rank)}
        self.received = set[int]()
        self.completers = {
            s: completes_gradient(schedule, s, rank) for s in self.placement.stages_on(rank) if graph.shares[s]
        }

    def has_any(self, kind: str, s: int) -> bool:
        """Return whether an action of this kind may send gradients or wait for them.

        The kind is a backward, `G`, `REDUCE_GRAD` or `U`.
        """
        if kind == "U":
            return bool(self.graph.shared_by[s])
        if kind == "REDUCE_GRAD":
            return bool(self.graph.shares[s])
        return kind == "G" or bool(self.graph.shares[s]) or self._is_replicated(s)

    def needed_by(self, kind: str, s: int) -> Iterator[Message]:
        """Yield the gradients that an action on stage `s` waits for: a `G`, or the first `U`."""
        if kind == "U" and s not in self.received:
            self.received.add(s)
            yield from self._from_sharing_stages(s)
        if kind == "G":
            for route, home in self._replicas(s):
                if home in self.peers:
                    yield Action("SEND_G", s, self._last_microbatch(route), s)

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
        if what == "done" and self._is_replicated(s):
            yield from self._to_replicas(s)
        if what == self.completers.get(s):
            yield from self._to_sharing_stages(s)

    def _to_replicas(self, s: int) -> Iterator[Message]:
        last = self._last_microbatch(self.placement.route(s, self.rank))
        for _, home in self._replicas(s):
            if home in self.peers:
                yield Action("SEND_G", s, last, s)

    def _to_sharing_stages(self, s: int) -> Iterator[Message]:
        for route, homes in enumerate(self.routes):
            if homes[s] == self.rank:
                yield from (
                    Action("SEND_G", s, self._last_microbatch(route), t)
                    for t in self.graph.shares[s]
                    if homes[t] in self.peers
                )

    def _from_sharing_stages(self, t: int) -> Iterator[Message]:
        for route, homes in enumerate(self.routes if self.schedule.backward else ()):
            if homes[t] == self.rank:
                yield from (
                    Action("SEND_G", s, self._last_microbatch(route), t)
                    for s in self.graph.shared_by[t]
                    if homes[s] in self.peers
                )

    def _replicas(self, s: int) -> Iterator[tuple[int, int]]:
        """Yield each route on which another rank runs stage `s`, with that rank."""
        return ((route, homes[s]) for route, homes in enumerate(self.routes) if homes[s] != self.rank)

    def _is_replicated(self, s: int) -> bool:
        return any(self._replicas(s))

    def _count_units(self, s: int) -> int:
        """Return how many microbatches, or slices of them, `rank` runs through stage `s`."""
        mine = [route for route, homes in enumerate(self.routes) if homes[s] == self.rank]
        return sum(len(self._microbatches(route)) for route in mine) * self.schedule.slices

    def _microbatches(self, route: int) -> range:
        return range(route, self.schedule.microbatches, len(self.routes))

    def _last_microbatch(self, route: int) -> int:
        """Return the last microbatch of a route, which names the messages sent once per step."""
        return self._microbatches(route)[-1]
