# SPDX-License-Identifier: Apache-2.0
"""Let contenders at one problem compete: collect many, improve the best, drop the slower half, and repeat.

If the problem is small, beams go through its partial orders before and after that: first narrow ones, which often try
every order and so solve it at once; at last, with the best orders known, wider ones.

Invariant: the same seed and tries give the same contenders, unless time runs out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Final

from schedules.playing.costs import ROUNDING
from schedules.playing.instance import Contender, Instance
from schedules.searching.beam import Beam
from schedules.searching.improving import Climb, shake
from schedules.searching.offsets import PriorityRule, draw_rule, follow, vary_rule
from schedules.searching.units import find_unit

if TYPE_CHECKING:
    from random import Random

FIELD: Final = 12
"""The number of contenders that compete."""
ALIKE: Final = 4
"""Of those, so many may have the same origin."""
EXPLORED: Final = 0.4
"""The share of the tries for new contenders; the rest improves them."""
RULES_PER_UNIT: Final = 3
"""Rules get so many tries for each one of units."""
SHAKES: Final = 4
"""Between looks at the clock, so many tries are made."""
SHAKEN: Final = 0.2
"""The share of the tries for other priorities; the rest are single moves."""
MOVES: Final = 20
"""Between looks at the clock, so many moves are made."""
WARMTHS: Final = (0.1, 0.3, 1.0)
"""The warmth that moves begin with, in periods: one of these, drawn for each contender and round."""
MOVE: Final = 0.1
"""The time of a move, in tries: it is played faster than it is dispatched."""


SMALL: Final = 200
"""A problem of so many passes is small."""
NARROW: Final = 0.25
"""The part of the time at whose end contenders begin to compete at the latest, if the problem is small."""
RACED: Final = 0.5
"""The part at whose end they stop."""
NARROWEST: Final = 4
"""The width of the first beam; each is twice as wide as the last."""
SWEEP: Final = 4
"""The time to extend a partial order by a pass, in that to dispatch a pass."""


@dataclass
class Race:
    """The contenders of one search, best first, and what it has spent.

    - `tries`, `spent`: they count schedules that were played; `begin` and `end` are seconds of `time.monotonic`.
    - `swept`: what beams have spent, in tries; they get as many again as the contenders.
    - `part`: the share of the time, and of the beams' tries, that may be spent by now.
    - `is_complete`: true once every order was tried that may be faster than the best contender.
    """

    instance: Instance
    target: float
    tries: float
    end: float
    random: Random
    report: Callable[[float, float], None]
    contenders: list[Contender] = field(default_factory=list)
    spent: float = 0.0
    swept: float = 0.0
    begin: float = field(default_factory=monotonic)
    part: float = 1.0
    is_complete: bool = False

    def run(self) -> None:
        """Spend the tries, and on a small problem as much again for beams."""
        if not self.is_small:
            self.explore()
            self.compete()
            return
        beam, widths = Beam(self.instance, self.target), (NARROWEST << i for i in count())
        self.part = NARROW
        self.sweep(beam, widths)
        self.part = RACED
        self.explore()
        self.compete()
        self.part = 1.0
        self.sweep(beam, widths)

    def is_over(self, tries: float) -> bool:
        """Return whether so many tries are made, time has run out, the target is reached, or every order was tried."""
        best = self.contenders[0].makespan if self.contenders else inf
        self.report(min(1.0, (self.spent + self.swept) / (self.tries * (1 + self.is_small))), best)
        return self.spent >= tries or self.is_late or self.is_complete or best <= self.target * (1 + ROUNDING)

    @property
    def is_late(self) -> bool:
        """True if the time for this part has run out."""
        return monotonic() > self.begin + self.part * (self.end - self.begin)

    @property
    def is_small(self) -> bool:
        """True if beams may go through the partial orders."""
        return self.passes <= SMALL

    @property
    def passes(self) -> int:
        """The number of passes."""
        return len(self.instance.kinds) * sum(self.instance.counts)

    @property
    def unit_cost(self) -> float:
        """The time to find a unit, in tries: it depends on the number of stages, not on that of microbatches."""
        return 1 + 600 * len(self.instance.rank) / self.passes

    def add(self, contender: Contender | None) -> None:
        """Add a contender; of those that take equally long, one is kept, and of each origin, the best few."""
        if contender is None:
            return
        distinct = {(one.origin, float(f"{one.makespan:.9g}")): one for one in (contender, *self.contenders)}
        kept, left = list[Contender](), Counter[str]()
        for _, one in sorted(distinct.items(), key=lambda item: (item[0][1], item[0][0])):
            left[one.origin] += 1
            if left[one.origin] <= ALIKE:
                kept.append(one)
        self.contenders[:] = kept[:FIELD]

    def sweep(self, beam: Beam, widths: Iterator[int]) -> None:
        """Send out one beam after the other, if there are orders that they may improve."""
        while self.contenders and self.swept < self.part * self.tries and not self.is_over(inf):
            swept = beam.sweep(self.contenders[0], next(widths), lambda: self.is_over(inf))
            self.is_complete = swept.complete
            self.swept += SWEEP * swept.extended / self.passes
            self.add(swept.best)

    def explore(self) -> None:
        """Collect new contenders by rules and by units."""
        rule: PriorityRule | None = None
        best, surplus = inf, 0.0
        while not self.is_over((EXPLORED if self.contenders else 1.0) * self.tries):
            if surplus <= 0:
                tried = self._propose(rule)
                found, cost = follow(self.instance, tried, self.random), 1.0
                surplus += cost
                if found is not None and found.makespan <= best:
                    rule, best = tried, found.makespan
            else:
                found, cost = find_unit(self.instance, self.random), self.unit_cost
                surplus -= RULES_PER_UNIT * cost
            self.spent += cost
            self.add(found)

    def _propose(self, best: PriorityRule | None) -> PriorityRule:
        """Return a rule near the best so far, or any."""
        if best is None or self.random.random() < 0.3:
            return draw_rule(self.random)
        return vary_rule(best, self.random)

    def compete(self) -> None:
        """Improve the contenders, and drop the slower half again and again, until one is left."""
        left = list(self.contenders)
        rounds = max(1, (len(left) - 1).bit_length())
        share = (self.tries - self.spent) / rounds
        while left and not self.is_over(self.tries):
            left = sorted((self.improve(one, share / len(left)) for one in left), key=lambda one: one.makespan)
            left = left[: (len(left) + 1) // 2]

    def improve(self, contender: Contender, tries: float) -> Contender:
        """Return the contender, improved: in half of all cases by other priorities first, then by moves."""
        begin = self.spent
        shaken = begin + SHAKEN * tries * self.random.randrange(2)
        while not self.is_over(shaken):
            contender = shake(self.instance, contender, SHAKES, self.random)
            self.add(contender)
            self.spent += SHAKES
        climb = Climb(self.instance, contender, self.random)
        warmest = self.random.choice(WARMTHS) * self.instance.period
        while not self.is_over(begin + tries):
            cooled = max(0.0, 1 - (self.spent - begin) / tries)
            climb.move(MOVES, warmest * cooled)
            self.add(climb.best)
            self.spent += MOVES * MOVE
        return climb.best
