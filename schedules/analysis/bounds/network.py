# SPDX-License-Identifier: Apache-2.0
"""The passes of a problem as queues that wait for each other, and the same backward in time.

A queue is all passes of one kind of one stage, in order of microbatch. What is true of a schedule is true of its mirror
image in time, in which every wait and every hold runs the other way; so what is proved of starts holds for ends, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter

from schedules.playing.problem import PlacedStage, Problem


@dataclass(frozen=True)
class Queue:
    """The passes of one kind of one placed stage.

    Each waits for the passes of its microbatch in `waits`, and for a transfer from there.
    """

    kind: str
    stage: int
    rank: int
    passes: int
    time: float
    waits: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Hold:
    """Memory that each pass of `taker` takes at its start, until that microbatch's pass of `giver` ends."""

    taker: int
    giver: int
    amount: float


@dataclass(frozen=True)
class QueueNetwork:
    """All queues, all holds, and the `memory` of each rank."""

    queues: tuple[Queue, ...]
    holds: tuple[Hold, ...]
    memory: tuple[float, ...]

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The queues in an order in which each comes after those it waits for."""
        return tuple(
            TopologicalSorter({c: [u for u, _ in one.waits] for c, one in enumerate(self.queues)}).static_order()
        )

    @cached_property
    def earlier(self) -> tuple[frozenset[int], ...]:
        """Per queue, those whose pass of a microbatch ends before the queue's pass of that microbatch starts."""
        found: list[frozenset[int]] = [frozenset()] * len(self.queues)
        for c in self.order:
            direct = [u for u, _ in self.queues[c].waits]
            found[c] = frozenset(direct).union(*(found[u] for u in direct))
        return tuple(found)

    def on(self, rank: int) -> list[int]:
        """Return the queues of one rank."""
        return [c for c, one in enumerate(self.queues) if one.rank == rank]

    def find_work(self, rank: int) -> float:
        """Return the time that all passes of a rank take."""
        return sum(self.queues[c].time * self.queues[c].passes for c in self.on(rank))

    def find_least_room(self, rank: int) -> float:
        """Return the most memory that one microbatch alone holds on a rank, in whatever order.

        When a pass of `u` starts, each hold counts that was taken up to `u` and that `u` or a later pass gives back.
        """
        mine = self.on(rank)
        holds = [hold for hold in self.holds if self.queues[hold.taker].rank == rank]
        return max((sum(hold.amount for hold in holds if self._is_held(hold, u)) for u in mine), default=0.0)

    def _is_held(self, hold: Hold, u: int) -> bool:
        is_taken = hold.taker == u or hold.taker in self.earlier[u]
        return is_taken and (hold.giver == u or u in self.earlier[hold.giver])


def connect_queues(problem: Problem) -> QueueNetwork:
    """Return the queues of a problem: forwards, then input halves and weight halves unless they take no time."""
    queues, holds = list[Queue](), list[Hold]()
    S = len(problem.stages)
    for n, one in enumerate(problem.stages):
        queues.append(Queue("F", n, one.rank, len(one.microbatches), one.forward, one.fed_by))
    if problem.backward:
        for n, one in enumerate(problem.stages):
            waits = ((n, 0.0), *((S + m, transfer) for m, transfer in one.pulled_by))
            queues.append(Queue("I", n, one.rank, len(one.microbatches), one.input_half, waits))
        for n, one in enumerate(problem.stages):
            holds += _hold(n, S + n, len(queues), one)
            if one.weight_half:
                waits = ((S + n, 0.0),)
                queues.append(Queue("W", n, one.rank, len(one.microbatches), one.weight_half, waits))
    return QueueNetwork(tuple(queues), tuple(holds), problem.room)


def _hold(forward: int, input_half: int, weight_half: int, one: PlacedStage) -> Iterator[Hold]:
    """Yield what a forward holds up to the input half, and up to the weight half: nothing if that takes no time."""
    late = one.residual if one.weight_half else 0
    if one.activation > late:
        yield Hold(forward, input_half, one.activation - late)
    if late:
        yield Hold(forward, weight_half, late)


def reverse(network: QueueNetwork) -> QueueNetwork:
    """Return the mirror image in time: what waited is waited for, and what took memory gives it back.

    >>> from schedules.analysis.bounds.network import QueueNetwork, Queue, reverse
    >>> first, second = Queue("F", 0, 0, 1, 1, ()), Queue("F", 1, 1, 1, 1, ((0, 0.5),))
    >>> [one.waits for one in reverse(QueueNetwork((first, second), (), (1, 1))).queues]
    [((1, 0.5),), ()]
    """
    waits: list[list[tuple[int, float]]] = [[] for _ in network.queues]
    for c, one in enumerate(network.queues):
        for u, transfer in one.waits:
            waits[u].append((c, transfer))
    queues = (
        Queue(one.kind, one.stage, one.rank, one.passes, one.time, tuple(turned))
        for one, turned in zip(network.queues, waits, strict=True)
    )
    return QueueNetwork(tuple(queues), tuple(Hold(h.giver, h.taker, h.amount) for h in network.holds), network.memory)
