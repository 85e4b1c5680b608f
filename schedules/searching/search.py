# SPDX-License-Identifier: Apache-2.0
"""Search for the schedule that takes the least time, and say how far from the best possible it can be.

Problem. Families of schedules are made for stages that cost the same and links that cost nothing. Real stages differ,
links are slow in places, and ranks have unequal memory.

Idea. Collect orders from everywhere: the families with this placement (`seeds`), rules that a few numbers bend
(`offsets`), and repeating units (`units`); if the problem is small, go through partial orders, if possible through all
(`beam`). Then let the best ones compete: each is improved for a while, half of them are dropped, and so on until one is
left, which gets the rest of the time (`improving`). Stop as soon as a lower bound is reached, or every order was tried:
then the result is the best possible.

Invariants. No result is slower than any schedule of the literature on the same placement in the same memory. The same
arguments give the same result, unless time runs out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple

from schedules.analysis.bounds.lower_bound import Bound, bound
from schedules.analysis.bounds.rough import Reason
from schedules.analysis.simulation import simulate
from schedules.arguments import require_types
from schedules.errors import SizeError
from schedules.language.placement import linear
from schedules.language.schedule import Schedule
from schedules.playing.costs import ROUNDING, UNITS, Costs
from schedules.playing.instance import Contender, Instance, make_instance
from schedules.playing.problem import Problem
from schedules.searching.race import Race
from schedules.searching.seeds import list_families, read_seed, spell
from schedules.searching.solver import Solver
from schedules.searching.units import take_turns

if TYPE_CHECKING:
    from random import Random

TRIES: Final = 20_000


@dataclass(frozen=True)
class SearchResult:
    """The best schedule found, its `makespan`, and the lower `bound` on that of all schedules.

    - `origin`: what the schedule began as: a schedule of the literature, rules, a repeating unit, or partial orders.
    - `complete`: false if time ran out, or the search was interrupted, before all tries were made.
    """

    schedule: Schedule
    makespan: float
    bound: Bound
    origin: str
    complete: bool

    @property
    def gap(self) -> float:
        """By what share of the bound the schedule may be slower than the best possible: at most this."""
        return max(0.0, self.makespan / self.bound.makespan - 1) if self.bound.makespan else 0.0

    def __str__(self) -> str:
        state = "" if self.complete else ", stopped early"
        return (
            f"makespan {self.makespan:g}, at most {100 * self.gap:.2f} % above the best possible, from "
            f"{self.origin}{state}\nno schedule takes less than {self.bound.makespan:g}: {self.bound.because}"
        )


class SearchProgress(NamedTuple):
    """The state of a search: the share of its tries that are made, the best makespan so far, and the lower bound."""

    share: float
    best: float
    bound: float


class Suggestion(NamedTuple):
    """A schedule that fits, its makespan, and where it comes from."""

    schedule: Schedule
    makespan: float
    origin: str


def list_instances(problem: Problem) -> list[Instance]:
    """Return the instances to search: with halves, and, where a whole backward takes less, with whole ones.

    It may take less time, or less memory: an input half may keep more than its forward did.
    """
    stages, time, sizes = range(problem.placement.stages), problem.costs.time, problem.sizes or UNITS
    pays = any(time("B", s) < (time("I", s) + time("W", s)) * (1 - ROUNDING) for s in stages)
    pays = pays or any(sizes.growth("I", s) > 0 for s in stages)
    kinds = (True, False) if problem.split and problem.backward and pays else (problem.split,)
    return [make_instance(replace(problem, split=split)) for split in kinds]


@dataclass
class Quest:
    """A search under way: the best schedule so far."""

    problem: Problem
    instances: Sequence[Instance]
    bound: Bound
    progress: Callable[[SearchProgress], None]
    best: Suggestion | None = None
    contenders: dict[Instance, Contender] = field(default_factory=dict)

    @property
    def is_solved(self) -> bool:
        """True if the best schedule is the best possible."""
        return self.best is not None and self.best.makespan <= self.bound.makespan * (1 + ROUNDING)

    def offer(self, schedule: Schedule, origin: str) -> None:
        """Take a schedule, if it fits and is faster than the best."""
        timeline = simulate(schedule, self.problem.costs, self.problem.graph, self.problem.sizes)
        if self.best is not None and timeline.makespan >= self.best.makespan * (1 - ROUNDING):
            return
        caps = self.problem.memory if isinstance(self.problem.memory, tuple) else repeat(self.problem.memory)
        if all(held <= cap * (1 + ROUNDING) for held, cap in zip(timeline.peak_memory, caps, strict=False)):
            self.best = Suggestion(schedule, timeline.makespan, origin)

    def run(self, instance: Instance, tries: float, end: float, random: Random) -> None:
        """Search one instance."""
        turns = take_turns(instance)
        contenders = [turns] if instance.fits(turns.orders) else []
        for schedule in list_families(instance, self.problem.costs, self.problem.graph):
            self.offer(schedule, repr(schedule))
            contenders += filter(None, [read_seed(instance, schedule)])
        race = Race(instance, self.bound.makespan, tries, end, random, self._report)
        for contender in contenders:
            race.add(contender)
        try:
            race.run()
        finally:
            if race.contenders:
                self.contenders[instance] = race.contenders[0]
                self._take(instance, race.contenders[0])
        if race.is_complete and race.contenders:
            self._raise_bound(race.contenders[0].makespan, "every order was tried")

    def prove(self, solver: Solver, end: float, seed: int) -> None:
        """Let a solver improve the best orders of each instance, and the bound if all schedules are in one."""
        for instance, contender in self.contenders.items():
            if self.is_solved or monotonic() >= end:
                return
            solution = solver(instance, contender, end - monotonic(), seed)
            self._take(instance, solution.contender)
            self._raise_bound(solution.bound, "the solver proved that there is no faster schedule")

    def _raise_bound(self, makespan: float, because: str) -> None:
        """Take a lower bound on the makespan of an instance, if all schedules are in one.

        That they are if nothing is random, and a fused pair takes the time of its parts.
        """
        costs, stages = self.problem.costs, range(self.problem.placement.stages)
        plain = not costs.jitter and all(costs.time("OVERLAP_F", s) >= costs.time("F", s) for s in stages)
        if len(self.instances) == 1 and plain and makespan > self.bound.makespan * (1 + ROUNDING):
            self.bound = Bound((Reason(makespan, because), *self.bound.parts))

    def _take(self, instance: Instance, contender: Contender) -> None:
        self.offer(spell(instance, contender.orders, self.problem.costs, self.problem.graph), contender.origin)

    def _report(self, share: float, best: float) -> None:
        self.progress(SearchProgress(share, best, self.bound.makespan))


def search(
    problem: Problem,
    *,
    seconds: float = 60.0,
    tries: int = TRIES,
    seed: int = 0,
    solver: Solver | None = None,
    progress: Callable[[SearchProgress], None] = lambda progress: None,
) -> SearchResult:
    """Return the fastest schedule found for a problem, and a lower bound on the makespan of all.

    - `seconds`, `tries`: when to stop, whichever comes first; a try is one schedule, and on small problems also the
      time of one for partial orders. A search ends early if it reaches the bound.
    - `seed`: the same seed and tries give the same schedule, unless the seconds run out.
    - `solver` improves the result and the bound in the second half of the time, such as `cp_sat`.
    - `progress` is called from time to time.

    A KeyboardInterrupt ends the search with the best schedule so far. The result is never slower than a schedule of the
    literature that has this placement and fits, but it may still not be the best possible; `gap` says by how much it
    can be off: by nothing if every order was tried, as happens where the problem is small. The schedule holds whole
    microbatches, and neither recomputes nor fuses actions.

    Raise `SizeError` as `bound` does, and if a rank has nothing to do, if no order is found that fits, for a negative
    number of seconds, and for no tries. Raise `SolverError`, before the search, if the solver is not installed.

    >>> from schedules import linear
    >>> found = search(Problem(Costs(F=(1, 3), B=(2, 6), I=(1, 3), W=(1, 3)), linear(ranks=2), microbatches=3))
    >>> found.makespan, found.gap
    (28.0, 0.0)
    """
    require_types(search, locals())
    from random import Random  # it is rarely needed, and slow to import

    require_limits(seconds, tries)
    if solver is not None:
        require_solver(solver)
    quest = Quest(problem, list_instances(problem), bound(problem), progress)
    begin = monotonic()
    end = begin + (seconds if solver is None else seconds / 2)
    try:
        for instance in quest.instances:
            if not quest.is_solved:
                quest.run(instance, tries / len(quest.instances), end, Random(seed))
        if solver is not None:
            quest.prove(solver, begin + seconds, seed)
        complete = quest.is_solved or monotonic() <= end
    except KeyboardInterrupt:
        if quest.best is None:
            raise
        complete = False
    if quest.best is None:
        raise _no_room(problem, quest.instances[-1])
    return SearchResult(quest.best.schedule, quest.best.makespan, quest.bound, quest.best.origin, complete)


def _no_room(problem: Problem, instance: Instance) -> SizeError:
    """Return the error if not even one microbatch at a time fits: branches of a graph may have to take turns."""
    one = spell(instance, take_turns(instance).orders, problem.costs, problem.graph)
    held = simulate(one, problem.costs, problem.graph, problem.sizes).peak_memory
    expected = f"at least {held}, which ranks hold with one microbatch at a time: no order was found that holds less"
    return SizeError.of("search", "memory", problem.memory, expected, "Choose more memory, or smaller stages.")


def require_limits(seconds: float, tries: int) -> None:
    """Raise `SizeError` unless both are above 0."""
    for name, value in (("seconds", seconds), ("tries", tries)):
        if not value > 0:
            raise SizeError.of("search", name, value, "a number above 0", f"Choose {name} > 0.")


def require_solver(solver: Solver) -> None:
    """Let a solver solve the smallest problem there is, so that one that can't run says so before the search."""
    smallest = make_instance(Problem(Costs(), linear(1), 1))
    solver(smallest, take_turns(smallest), 1.0, 0)
