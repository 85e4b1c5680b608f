# SPDX-License-Identifier: Apache-2.0
"""An order found for given costs and memory, by playing all ranks forward in time.

Idea (arXiv 2401.10241, section 3.1). Microbatch by microbatch, every rank does a forward and then an input half, and a
weight half where it would wait long enough for one, or has no memory left. What is a matter of taste, how many forwards
to do at first, whether a forward may be skipped so that a backward comes sooner, and whether to fill a gap that is too
short, is tried both ways: the best of the eight orders is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from schedules.actions import Action
from schedules.authoring import Limits, schedule
from schedules.costs import Costs
from schedules.errors import SizeError
from schedules.placement import linear


class Taste(NamedTuple):
    """What is tried both ways."""

    delay: bool  # a forward may make the first backward late
    skip: bool  # a rank two forwards ahead of the next may wait for its backward
    fill: bool  # a weight half may start where it does not fit, though the rank could afford to wait


class Lane:
    """One rank so far: its `actions`, `clock`, time spent `waiting`, activations `held`; when passes ended, by kind."""

    def __init__(self, rank: int, costs: Costs, residual: float) -> None:
        self.rank, self.costs = rank, costs
        self.actions: list[Action] = []
        self.ends: dict[str, list[float]] = {"F": [], "I": [], "W": []}
        self.clock = self.begun = self.waiting = self.held = 0.0
        self.growth = {"F": 1.0, "I": residual - 1, "W": -residual}

    def count(self, kind: str) -> int:
        """How many passes of this kind it has done."""
        return len(self.ends[kind])

    def time(self, kind: str) -> float:
        """How long a pass of this kind takes here."""
        return self.costs.time(kind, self.rank)

    def do(self, kind: str, ready: float = 0) -> None:
        """The next pass of this kind, as soon as its data are there."""
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
    def owed(self) -> int:
        """How many weight halves could be done now."""
        return self.count("I") - self.count("W")


class Game:
    """All ranks, played forward microbatch by microbatch."""

    def __init__(
        self, ranks: int, microbatches: int, memory: float, costs: Costs, residual: float, taste: Taste
    ) -> None:
        self.lanes = [Lane(rank, costs, residual) for rank in range(ranks)]
        self.microbatches, self.memory, self.costs, self.residual = microbatches, memory, costs, residual
        self.taste = taste
        self._begin()
        for _ in range(1, microbatches):
            self._go_on()
        for lane in self.lanes:
            self._finish(lane)

    @property
    def span(self) -> float:
        """The longest time from a rank's first start to its last end."""
        return max(lane.clock - lane.begun for lane in self.lanes)

    def _ready(self, kind: str, lane: Lane) -> float:
        """When the data of the rank's next pass of this kind are there."""
        source = lane.rank + (1 if kind == "I" else -1)
        if not 0 <= source < len(self.lanes):
            return 0
        return self.lanes[source].ends[kind][lane.count(kind)] + self._transfer(kind, source, lane.rank)

    def _transfer(self, kind: str, source: int, target: int) -> float:
        return self.costs.transfer("F" if kind == "F" else "B", source, source, target)

    def _slack(self, lane: Lane) -> float:
        """How much longer the rank may wait without being the one that waits longest."""
        return max(other.waiting for other in self.lanes) - lane.waiting

    def _begin(self) -> None:
        """Microbatch 0, and as many more forwards as fit before its cotangent is back."""
        for lane in self.lanes:
            lane.do("F", self._ready("F", lane))
        for lane, more in zip(self.lanes, self._more(), strict=True):
            for _ in range(more):
                lane.do("F", self._ready("F", lane))
        for lane in reversed(self.lanes):
            lane.do("I", self._ready("I", lane))

    def _more(self) -> Sequence[int]:
        """Fewer on each rank than on the one before it, unless these are all that there are."""
        most, back = self.microbatches - 1, self.lanes[-1].clock + self.lanes[-1].time("I")
        more = [0] * len(self.lanes)
        for lane in reversed(self.lanes[:-1]):
            back += self._transfer("I", lane.rank + 1, lane.rank)
            rank, clock, forward = lane.rank, lane.clock, lane.time("F")
            while more[rank] < most and more[rank] + 2 <= self.memory:
                if clock >= back if self.taste.delay else clock + forward > back:
                    break
                more[rank], clock = more[rank] + 1, clock + forward
            back = max(clock, back) + lane.time("I")
        for rank in range(1, len(more)):
            if more[rank] < most:
                more[rank] = max(0, min(more[rank], more[rank - 1] - 1))
        return more

    def _go_on(self) -> None:
        """One more input half on every rank, and a forward on all ranks up to one that skips it."""
        going = [lane.count("F") < self.microbatches and not self._skips(lane) for lane in self.lanes]
        for rank, lane in enumerate(self.lanes):
            if all(going[rank:]):
                while lane.held + 1 > self.memory:
                    lane.do("W")
                self._fill_and_do("F", lane)
        for lane in reversed(self.lanes):
            self._fill_and_do("I", lane)

    def _skips(self, lane: Lane) -> bool:
        """Whether the rank is far enough ahead of the next to wait for the next one's cotangent instead."""
        if not self.taste.skip or lane is self.lanes[-1]:
            return False
        after = self.lanes[lane.rank + 1]
        if lane.count("F") < after.count("F") + 2:
            return False
        back = after.clock + after.time("F") + after.time("I") + self._transfer("I", after.rank, lane.rank)
        room, halves = self.memory - lane.held - 1, 0
        while room < 0 and halves < lane.owed:
            room, halves = room + self.residual, halves + 1
        return lane.clock + lane.time("F") + halves * lane.time("W") > back and back - lane.clock <= self._slack(lane)

    def _fill_and_do(self, kind: str, lane: Lane) -> None:
        """A pass, and before it the weight halves for which there is time until its data are there."""
        ready = self._ready(kind, lane)
        while lane.owed and lane.clock + lane.time("W") <= ready:
            lane.do("W")
        if lane.owed and lane.clock < ready and (self.taste.fill or ready - lane.clock > self._slack(lane)):
            lane.do("W")
        if kind == "I" and lane is self.lanes[0] and lane.count("F") == self.microbatches:
            self._finish(lane)
        lane.do(kind, ready)

    def _finish(self, lane: Lane) -> None:
        while lane.owed:
            lane.do("W")


@lru_cache(maxsize=1)  # one rank after the other asks for its own
def _orders(ranks: int, microbatches: int, memory: float, costs: Costs, residual: float) -> Sequence[Sequence[Action]]:
    """Of every rank, the actions of the best order; the first such in case of doubt."""
    tastes = (Taste(*answers) for answers in product((False, True), (True, False), (True, False)))
    games = (Game(ranks, microbatches, memory, costs, residual, taste) for taste in tastes)
    return tuple(tuple(lane.actions) for lane in min(games, key=lambda game: game.span).lanes)


def _possible(ranks: int, microbatches: int, memory: float, costs: Costs, residual: float) -> None:
    if not memory >= 1:
        raise SizeError.of("zb_auto", "memory", memory, "at least 1: one microbatch", "Choose memory >= 1.")
    if not isinstance(costs, Costs):
        raise SizeError.of(
            "zb_auto", "costs", costs, "costs, for which to find an order", "Write Costs(F=1, I=1, W=1)."
        )
    if not 0 < residual <= 1:
        raise SizeError.of("zb_auto", "residual", residual, "a share above 0, at most 1", "Choose residual=1 for all.")


def _bound(rank: int, ranks: int, microbatches: int, memory: float, costs: Costs, residual: float) -> float:
    return min(microbatches, memory / residual)


@schedule(placement=linear, limits=Limits(memory=_bound), requires=_possible)
def zb_auto(
    rank: int, ranks: int, microbatches: int, memory: int = 8, costs: Costs = Costs(), residual: float = 0.5
) -> Iterator[Action]:
    """The best of eight orders for these costs, within `memory` (arXiv 2401.10241, section 3.1: ZB-1p, ZB-2p).

    `memory` is in microbatches of a rank's activations, of which an input half lets go of all but the share
    `residual`: `P` gives ZB-1p, `2P` gives ZB-2p. All ranks are played for the order of any one, so actions are not
    made as they are asked for: the first rank pays for all. Idle time has no formula; for ZB-2p it is next to none
    where `M` is large. Peak memory, if all is held up to the weight half: at most `min(memory / residual, M)`.

    >>> print(zb_auto(ranks=3, microbatches=4, memory=6))
    rank 0 |F0 F1 F2 F3 .  I0 W0 I1 W1 I2 W2 I3 W3 .  |
    rank 1 |.  F0 F1 F2 I0 F3 I1 W0 I2 W1 I3 W2 W3 .  |
    rank 2 |.  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3 |
    """
    yield from _orders(ranks, microbatches, memory, costs, residual)[rank]
