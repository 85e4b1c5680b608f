# SPDX-License-Identifier: Apache-2.0
"""Search for an order for given costs and memory by playing all ranks forward in time.

Idea (arXiv 2401.10241, section 3.1). Microbatch by microbatch, every rank runs a forward and then an input half, plus a
weight half whenever it would otherwise wait long enough for one or is out of memory. Three heuristic choices are tried
both ways: how many forwards to run at first, whether to skip a forward so that a backward comes sooner, and whether to
fill a gap that is too short. The best of the eight orders wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from schedules.arguments import is_number
from schedules.errors import SizeError
from schedules.language.actions import Action
from schedules.language.placement import linear
from schedules.language.schedule import Limits, schedule
from schedules.playing.costs import Costs, require_stages


class Heuristics(NamedTuple):
    """The heuristic choices that are tried both ways."""

    delay: bool  # a forward may make the first backward late
    skip: bool  # a rank two forwards ahead of the next may skip one and wait for its cotangent
    fill: bool  # a weight half may fill a gap too short for it, though the rank could afford to wait


class Lane:
    """One rank so far: `actions`, `clock`, time spent `waiting`, activations `held`, and `ends` of passes by kind."""

    def __init__(self, rank: int, costs: Costs, residual: float) -> None:
        self.rank, self.costs = rank, costs
        self.actions: list[Action] = []
        self.ends: dict[str, list[float]] = {"F": [], "I": [], "W": []}
        self.clock = self.begun = self.waiting = self.held = 0.0
        self.growth = {"F": 1.0, "I": residual - 1, "W": -residual}

    def count(self, kind: str) -> int:
        """Return the number of passes of this kind run so far."""
        return len(self.ends[kind])

    def time(self, kind: str) -> float:
        """Return the time a pass of this kind takes on this rank."""
        return self.costs.time(kind, self.rank)

    def run(self, kind: str, ready: float = 0) -> None:
        """Run the next pass of this kind as soon as its inputs are `ready`."""
        start = max(self.clock, ready)
        if self.actions:
            self.waiting += start - self.clock
        else:
            self.begun = start
        self.actions.append(Action(kind, self.rank, self.count(kind)))
        self.clock = start + self.time(kind)
        self.ends[kind].append(self.clock)
        self.held += self.growth[kind]

    @property
    def pending_weights(self) -> int:
        """The number of weight halves that could run now."""
        return self.count("I") - self.count("W")


class Attempt:
    """All ranks, played forward microbatch by microbatch."""

    def __init__(
        self, ranks: int, microbatches: int, memory: float, costs: Costs, residual: float, heuristics: Heuristics
    ) -> None:
        self.lanes = [Lane(rank, costs, residual) for rank in range(ranks)]
        self.microbatches, self.memory, self.costs, self.residual = microbatches, memory, costs, residual
        self.heuristics = heuristics
        self._start()
        for _ in range(1, microbatches):
            self._advance()
        for lane in self.lanes:
            self._finish(lane)

    @property
    def length(self) -> float:
        """The longest time from a rank's first start to its last end."""
        return max(lane.clock - lane.begun for lane in self.lanes)

    def _ready_time(self, kind: str, lane: Lane) -> float:
        """Return when the inputs of the rank's next pass of this kind arrive."""
        source = lane.rank + (1 if kind == "I" else -1)
        if not 0 <= source < len(self.lanes):
            return 0
        return self.lanes[source].ends[kind][lane.count(kind)] + self._transfer(kind, source, lane.rank)

    def _transfer(self, kind: str, source: int, target: int) -> float:
        return self.costs.transfer("F" if kind == "F" else "B", source, source, target)

    def _allowed_wait(self, lane: Lane) -> float:
        """Return how much longer the rank may wait without exceeding the longest wait of any rank."""
        return max(other.waiting for other in self.lanes) - lane.waiting

    def _start(self) -> None:
        """Run microbatch 0, and as many more forwards as fit before its cotangent comes back."""
        for lane in self.lanes:
            lane.run("F", self._ready_time("F", lane))
        for lane, more in zip(self.lanes, self._count_extra_forwards(), strict=True):
            for _ in range(more):
                lane.run("F", self._ready_time("F", lane))
        for lane in reversed(self.lanes):
            lane.run("I", self._ready_time("I", lane))

    def _count_extra_forwards(self) -> Sequence[int]:
        """Return the extra forwards per rank: fewer than on the previous rank, unless all fit on both."""
        most, back = self.microbatches - 1, self.lanes[-1].clock + self.lanes[-1].time("I")
        more = [0] * len(self.lanes)
        for lane in reversed(self.lanes[:-1]):
            back += self._transfer("I", lane.rank + 1, lane.rank)
            rank, clock, forward = lane.rank, lane.clock, lane.time("F")
            while more[rank] < most and more[rank] + 2 <= self.memory:
                if clock >= back if self.heuristics.delay else clock + forward > back:
                    break
                more[rank], clock = more[rank] + 1, clock + forward
            back = max(clock, back) + lane.time("I")
        for rank in range(1, len(more)):
            if min(more[rank], more[rank - 1]) < most:
                more[rank] = max(0, min(more[rank], more[rank - 1] - 1))
        return more

    def _advance(self) -> None:
        """Run one more input half on every rank, and a forward on all ranks after the last one that skips it."""
        going = [lane.count("F") < self.microbatches and not self._should_skip(lane) for lane in self.lanes]
        for rank, lane in enumerate(self.lanes):
            if all(going[rank:]):
                while lane.held + 1 > self.memory:
                    lane.run("W")
                self._fill_and_run("F", lane)
        for lane in reversed(self.lanes):
            self._fill_and_run("I", lane)

    def _should_skip(self, lane: Lane) -> bool:
        """Return whether the rank is far enough ahead of the next rank to wait for its cotangent instead."""
        if not self.heuristics.skip or lane is self.lanes[-1]:
            return False
        after = self.lanes[lane.rank + 1]
        if lane.count("F") < after.count("F") + 2:
            return False
        back = after.clock + after.time("F") + after.time("I") + self._transfer("I", after.rank, lane.rank)
        room, halves = self.memory - lane.held - 1, 0
        while room < 0 and halves < lane.pending_weights:
            room, halves = room + self.residual, halves + 1
        return lane.clock + lane.time("F") + halves * lane.time("W") > back and back - lane.clock <= self._allowed_wait(
            lane
        )

    def _fill_and_run(self, kind: str, lane: Lane) -> None:
        """Run a pass, after as many weight halves as there is time for until its inputs arrive."""
        ready = self._ready_time(kind, lane)
        while lane.pending_weights and lane.clock + lane.time("W") <= ready:
            lane.run("W")
        if (
            lane.pending_weights
            and lane.clock < ready
            and (self.heuristics.fill or ready - lane.clock > self._allowed_wait(lane))
        ):
            lane.run("W")
        if kind == "I" and lane is self.lanes[0] and lane.count("F") == self.microbatches:
            self._finish(lane)
        lane.run(kind, ready)

    def _finish(self, lane: Lane) -> None:
        while lane.pending_weights:
            lane.run("W")


@lru_cache(maxsize=1)  # every rank asks for its own actions in turn
def _find_orders(
    ranks: int, microbatches: int, memory: float, costs: Costs, residual: float
) -> Sequence[Sequence[Action]]:
    """Return every rank's actions in the best order, the first of equals."""
    choices = (Heuristics(*answers) for answers in product((False, True), (True, False), (True, False)))
    attempts = (Attempt(ranks, microbatches, memory, costs, residual, heuristics) for heuristics in choices)
    return tuple(tuple(lane.actions) for lane in min(attempts, key=lambda attempt: attempt.length).lanes)


def _require_possible(ranks: int, microbatches: int, memory: float, costs: Costs, residual: float) -> None:
    if not is_number(memory) or not memory >= 1:
        raise SizeError.of("zb_auto", "memory", memory, "at least 1: one microbatch", "Choose memory >= 1.")
    if not isinstance(costs, Costs):
        raise SizeError.of("zb_auto", "costs", costs, "Costs to find an order for", "Pass Costs(F=1, I=1, W=1).")
    require_stages(costs, ranks)
    if not is_number(residual) or not 0 < residual <= 1:
        raise SizeError.of("zb_auto", "residual", residual, "a share above 0, at most 1", "Choose residual=1 for all.")


def _peak_memory(rank: int, ranks: int, microbatches: int, memory: float, costs: Costs, residual: float) -> float:
    return min(microbatches, memory / residual)


@schedule(placement=linear, limits=Limits(memory=_peak_memory), requires=_require_possible)
def zb_auto(
    rank: int, ranks: int, microbatches: int, memory: float = 8, costs: Costs = Costs(), residual: float = 0.5
) -> Iterator[Action]:
    """The best of eight orders for these costs, within `memory` (arXiv 2401.10241, section 3.1: ZB-1p, ZB-2p).

    `memory` is in units of a rank's activations for one microbatch: `P` gives ZB-1p, `2P` gives ZB-2p. An input half
    frees all of its activations but the fraction `residual`. The order of any rank requires playing all ranks, so
    actions are not generated lazily: the first rank pays for all. Idle time has no formula; for ZB-2p with large `M` it
    is next to none. Peak memory, if activations are held up to the weight half: at most `min(memory / residual, M)`.

    >>> print(zb_auto(ranks=3, microbatches=4, memory=6))
    rank 0 |F0 F1 F2 F3 .  I0 W0 I1 W1 I2 W2 I3 W3 .  |
    rank 1 |.  F0 F1 F2 I0 F3 I1 W0 I2 W1 I3 W2 W3 .  |
    rank 2 |.  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3 |
    """
    yield from _find_orders(ranks, microbatches, memory, costs, residual)[rank]
