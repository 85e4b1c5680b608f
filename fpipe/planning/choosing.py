# SPDX-License-Identifier: Apache-2.0
"""Choose a plan: try schedules, improve the best, and say how far from the best possible the result is.

Invariant: the same profiles and arguments give the same plan, unless it runs out of time or is interrupted.

Runs when a plan is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from time import monotonic
from typing import Final, NamedTuple

from fpipe.errors import InputError
from fpipe.pipelines.description import format_bytes, name_schedule
from fpipe.planning.candidates import (
    Candidate,
    PlanProblem,
    ScheduleFactory,
    follow_costs,
    improve,
    keep_best,
    list_candidates,
)
from fpipe.planning.floor import bound_plans
from fpipe.planning.ordering import list_orderable, place_on_islands, reorder
from fpipe.planning.plan import Plan, RunnerUp, format_seconds
from fpipe.stages.backends import splits
from schedules import Bound, Certificate, ProgramError, Schedule, certify, critical_path, recompute
from schedules.files.calls import read_call, spell_call
from schedules.status import say

IMPROVED: Final = 6
"""The number of candidates whose cuts are improved."""
SHOWN: Final = 3
MOST_CERTIFIED: Final = 2**16
"""The stages of all microbatches, or slices, in a program that is certified: about a minute's work."""


class PlanProgress(NamedTuple):
    """The state of a search.

    - `tried`: the candidates tried so far: first `total` schedules, then the best of them with other cuts.
    - `doing`: what the search does.
    - `best`: the seconds of the best step found, `None` if nothing fits yet; `gap`: by what fraction of the bound it
      exceeds the bound.
    - `took`: the seconds that the search took so far; `most`: those that it may take.
    """

    tried: int
    total: int
    doing: str
    best: float | None
    gap: float | None
    took: float
    most: float


Report = Callable[[PlanProgress], None]


def say_progress(progress: PlanProgress) -> None:
    """Show how far a search is, by the time that it may take."""
    say(describe_progress(progress), progress.took / progress.most)


def describe_progress(progress: PlanProgress) -> str:
    """Return what a search does, and what it found.

    >>> describe_progress(PlanProgress(14, 11, "moving cuts of zb_v", 0.25, 0.125, took=30.0, most=60.0))
    '14 tried, best 250 ms, bound 11.1 % less, moving cuts of zb_v'
    """
    best = "nothing fits yet" if progress.best is None else f"best {format_seconds(progress.best)}"
    gap = "" if progress.gap is None else f", bound {100 * progress.gap / (1 + progress.gap):.1f} % less"
    tried = f"{progress.tried} of {progress.total}" if progress.tried < progress.total else f"{progress.tried}"
    return f"{tried} tried, {best}{gap}, {progress.doing}"


@dataclass
class Search:
    """A search: the candidates found so far, best first, and why other schedules were left out.

    `total` is the number of schedules to try; no plan takes less than `bound` seconds; the search may take `seconds`.
    """

    report: Report
    total: int
    bound: float
    seconds: float
    begin: float = field(default_factory=monotonic)
    found: list[Candidate] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    tried: int = 0
    complete: bool = True

    def add(self, candidate: Candidate, doing: str) -> None:
        """Add a candidate, and report."""
        self.tried += 1
        self.found = keep_best([*self.found, candidate], 1000)
        self.tell(doing)

    def tell(self, doing: str) -> None:
        """Report how far the search is."""
        best = self.found[0]
        seconds = best.predicted.seconds if best.fits else None
        gap = None if seconds is None or not self.bound else max(0.0, seconds / self.bound - 1)
        took = monotonic() - self.begin
        self.report(PlanProgress(self.tried, self.total, doing, seconds, gap, took, self.seconds))


def choose(
    problems: Sequence[PlanProblem],
    schedules: Iterable[Schedule | ScheduleFactory],
    *,
    seconds: float,
    report: Report,
    ordered: bool = False,
) -> Plan:
    """Return the best plan found for a model, given the problem for each number of microbatches.

    If `ordered`, the best candidates may get an order of their own, beyond those of `schedules`, and where links
    differ, a placement of its own.

    Stop after about `seconds`, or at a KeyboardInterrupt, with the best so far. Raise `InputError` if nothing fits.
    """
    bounds, made = [bound_plans(one, split=True, single=False, copies=2) for one in problems], tuple(schedules)
    search = Search(report, len(made) * len(problems), min(one.makespan for one in bounds), seconds)
    problems = [replace(one, end=search.begin + seconds) for one in problems]
    try:
        for one in list_candidates(problems, made):
            search.refused.append(one) if isinstance(one, str) else search.add(one, "trying schedules")
            if problems[0].is_over() and search.found:
                break
        for candidate in chain.from_iterable(map(place_on_islands, problems)) if ordered else ():
            search.add(candidate, "placing stages where links are fast")
        for candidate in search.found[:IMPROVED]:
            for better in improve(candidate):
                search.add(better, f"moving cuts of {better.schedule!r}")
        for candidate in [one for one in search.found[:IMPROVED] if one.schedule not in made]:
            followed = follow_costs(candidate)
            if followed is not None:
                search.add(followed, f"following the costs of {candidate.schedule!r}")
        for candidate in list(list_orderable(search.found)) if ordered else ():
            search.tell(f"ordering {candidate.schedule!r}")
            reordered = reorder(candidate)
            if reordered is not None:
                search.add(reordered, f"ordering {candidate.schedule!r}")
        search.complete = not problems[0].is_over()
    except KeyboardInterrupt:
        search.complete = False
        if not search.found:
            raise
    return _conclude(search, problems)


def _conclude(search: Search, problems: Sequence[PlanProblem]) -> Plan:
    """Return the plan for the best candidate; raise `InputError` if it does not fit."""
    best = _require_fitting(search)
    least = _bound_all(search.found, problems)
    alone, copies = _estimate_alternatives(problems)
    profile = best.problem.profile
    return Plan(
        model=profile.model,
        microbatch=profile.microbatch,
        device=profile.device,
        cuts=tuple(profile.blocks[cut].name for cut in best.cuts),
        schedule=read_call(spell_call(best.schedule)),  # as its file has it, so that plans compare
        predicted=best.predicted,
        limits=_explain_time(best),
        caps=best.problem.caps,
        costs=best.problem.costs(best.cuts),
        sizes=best.problem.sizes(best.schedule.placement, best.cuts),
        bound=least.makespan,
        because=least.because,
        others=tuple(
            RunnerUp(name_schedule(one.schedule), one.predicted.seconds, max(one.predicted.memory), one.fits)
            for one in search.found[1 : 1 + SHOWN]
        ),
        alone=alone,
        copies=copies,
        advice=_advise(best, alone, copies),
        complete=search.complete,
        certificate=_certify(best),
    )


def _certify(best: Candidate) -> Certificate | None:
    """Return the certificate of a candidate's program; `None` for what certificates do not cover, or if it is long."""
    how = best.schedule
    if how.stages * how.microbatches * how.slices > MOST_CERTIFIED:
        return None
    try:
        return certify(how, best.problem.costs(best.cuts), best.problem.sizes(how.placement, best.cuts))
    except ProgramError:
        return None


def _explain_time(candidate: Candidate, most: int = 3) -> str:
    """Return what the step's time consists of: the largest shares of the critical path."""
    path = critical_path(candidate.schedule, candidate.problem.costs(candidate.cuts))
    whole = sum(share.time for share in path.shares) or 1.0
    return ", ".join(f"{share.what} {100 * share.time / whole:.0f} %" for share in path.shares[:most])


def _require_fitting(search: Search) -> Candidate:
    if not search.found:
        raise InputError(
            f"schedules: got none that can run this model: {' '.join(dict.fromkeys(search.refused))} Use fewer ranks, "
            "fewer pins, other schedules, or more microbatches."
        )
    best = search.found[0]
    if not best.fits:
        held, cap = max(zip(best.predicted.memory, best.problem.caps, strict=True), key=lambda pair: pair[0] - pair[1])
        raise InputError(
            f"memory: got {format_bytes(cap)}, expected at least {format_bytes(held)} ({held} bytes), the least peak "
            f"of a rank among all plans that were tried ({name_schedule(best.schedule)}). Use more ranks, more "
            "microbatches, or a smaller batch."
        )
    return best


def _bound_all(found: Sequence[Candidate], problems: Sequence[PlanProblem]) -> Bound:
    """Return the bound for all plans that do no more than some candidates: split, recompute, or hold stages twice."""
    schedules = [one.schedule for one in found]
    split, single = any(map(splits, schedules)), all(how.stages == how.ranks for how in schedules)
    recomputed = any(how.factory is recompute for how in schedules)
    copies = max(len(how.placement.replicas(s)) for how in schedules for s in range(how.stages))
    bounds = [bound_plans(one, split=split, single=single, copies=copies, recomputed=recomputed) for one in problems]
    return min(bounds, key=lambda one: one.makespan)


def _estimate_alternatives(problems: Sequence[PlanProblem]) -> tuple[RunnerUp, RunnerUp]:
    """Return the fastest step on one device, and of a copy of the model on every device, without a pipeline.

    Each copy trains its share of the microbatches, and gradients are summed in a ring.
    """
    alone, copies = list[RunnerUp](), list[RunnerUp]()
    for one in problems:
        profile, ranges, ranks = one.profile, one.profile.ranges, one.ranks
        whole = 0, len(profile.blocks)
        parameters = float(ranges.parameters[whole])
        held = int(one.weights * parameters + ranges.activation[whole])
        seconds = float(ranges.seconds("F")[whole] + ranges.seconds("B")[whole])
        summing = 2 * (ranks - 1) * (parameters / ranks / profile.link.bandwidth + profile.link.latency)
        total, share = one.microbatches * seconds, -(-one.microbatches // ranks) * seconds + summing
        cut = f" of {one.slices} slices" if one.slices > 1 else ""
        name = f"{one.microbatches} microbatches{cut} on one device"
        alone.append(RunnerUp(name, total + profile.step, held, held <= max(one.caps)))
        copies.append(RunnerUp(f"a copy on each of {ranks} devices", share + profile.step, held, held <= min(one.caps)))
    first, second = (min(found, key=lambda one: (not one.fits, one.seconds)) for found in (alone, copies))
    return first, second


def _advise(best: Candidate, alone: RunnerUp, copies: RunnerUp) -> str:
    """Return what to do instead of a pipeline, if it does not pay."""
    faster = [one for one in (alone, copies) if one.fits and 0 < one.seconds <= best.predicted.seconds]
    if not faster:
        return ""
    one = min(faster, key=lambda other: other.seconds)
    what = "train on one device" if one is alone else "use data parallelism"
    ratio = best.predicted.seconds / one.seconds
    return (
        f"No pipeline pays off here: {what}, in {format_seconds(one.seconds)} per step. The model fits, and this plan "
        f"takes {ratio:.2f} times as long."
    )
