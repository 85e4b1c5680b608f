# SPDX-License-Identifier: Apache-2.0
"""Choose a plan: try schedules, improve the best, and say how far from the best possible the result is.

Invariant: the same profiles and arguments give the same plan, unless it runs out of time or is interrupted.

Runs when a plan is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Final, NamedTuple

from fpipe.errors import InputError
from fpipe.pipelines.description import format_bytes
from fpipe.planning.candidates import Candidate, Predictor, Room, ScheduleFactory, improve, keep_best, list_candidates
from fpipe.planning.floor import bound_plans
from fpipe.planning.ordering import list_orderable, place_on_islands, reorder
from fpipe.planning.plan import Plan, RunnerUp, format_seconds, name_schedule
from fpipe.planning.profile import Profile
from fpipe.stages.conversion import splits
from schedules import Bound, critical_path, recompute

IMPROVED: Final = 6
"""The number of candidates whose cuts are improved."""
SHOWN: Final = 3


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


@dataclass
class Search:
    """A search: the candidates found so far, best first, and why other schedules were left out.

    `total` is the number of schedules to try; no plan takes less than `bound` seconds; the search may take `seconds`.
    """

    room: Room
    report: Report
    total: int
    bound: float
    seconds: float
    found: list[Candidate] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    tried: int = 0
    complete: bool = True

    def add(self, candidate: Candidate, doing: str) -> None:
        """Add a candidate, and report."""
        self.tried += 1
        self.found = keep_best([*self.found, candidate], self.room, 1000)
        self.tell(doing)

    def tell(self, doing: str) -> None:
        """Report how far the search is."""
        best = self.found[0].predicted
        seconds = best.seconds if best.fits(self.room.caps) else None
        gap = None if seconds is None or not self.bound else max(0.0, seconds / self.bound - 1)
        took = self.seconds - (self.room.end - monotonic())
        self.report(PlanProgress(self.tried, self.total, doing, seconds, gap, took, self.seconds))


def choose(
    profiles: Mapping[int, Profile],
    factories: Iterable[ScheduleFactory],
    ranks: int,
    room: Room,
    *,
    weights: float,
    seconds: float,
    report: Report,
    ordered: bool = False,
) -> Plan:
    """Return the best plan found for a model, given its profile for each number of microbatches.

    If `ordered`, the best candidates may get an order of their own, beyond those of the factories, and where links
    differ, a placement of its own.

    Stop after about `seconds`, or at a KeyboardInterrupt, with the best so far. Raise `InputError` if nothing fits.
    """
    predictors = {count: Predictor(profile, weights) for count, profile in profiles.items()}
    room, made = replace(room, end=monotonic() + seconds), tuple(factories)
    bounds = [bound_plans(one, ranks, number, split=True, single=False, copies=2) for number, one in profiles.items()]
    search = Search(room, report, len(made) * len(bounds), min(one.makespan for one in bounds), seconds)
    try:
        for one in list_candidates(predictors, made, ranks, room):
            search.refused.append(one) if isinstance(one, str) else search.add(one, "trying schedules")
            if room.is_closed() and search.found:
                break
        if ordered:
            for count, predictor in predictors.items():
                for candidate in place_on_islands(predictor, count, ranks, room):
                    search.add(candidate, "placing stages where links are fast")
        _improve_all(search)
        if ordered:
            _order_all(search)
        search.complete = not room.is_closed()
    except KeyboardInterrupt:
        search.complete = False
        if not search.found:
            raise
    return _conclude(search, predictors, ranks)


def _improve_all(search: Search) -> None:
    """Move the cuts of the best candidates as long as that helps, and there is time."""
    for candidate in search.found[:IMPROVED]:
        for better in improve(candidate, search.room):
            search.add(better, f"moving cuts of {better.schedule!r}")


def _order_all(search: Search) -> None:
    """Give the best candidates faster orders."""
    for candidate in list(list_orderable(search.found)):
        search.tell(f"ordering {candidate.schedule!r}")
        better = reorder(candidate, search.room)
        if better is not None:
            search.add(better, f"ordering {candidate.schedule!r}")


def _conclude(search: Search, predictors: Mapping[int, Predictor], ranks: int) -> Plan:
    """Return the plan for the best candidate; raise `InputError` if it does not fit."""
    best = _require_fitting(search)
    least = _bound_all(search.found, predictors, ranks)
    alone, copies = _estimate_alternatives(predictors, ranks, search.room)
    profile = best.predictor.profile
    return Plan(
        model=profile.model,
        microbatch=profile.microbatch,
        device=profile.device,
        cuts=tuple(profile.blocks[cut].name for cut in best.cuts),
        schedule=best.schedule,
        predicted=best.predicted,
        limits=_explain_time(best),
        caps=search.room.caps,
        bound=least.makespan,
        because=least.because,
        others=tuple(_runner_up(one, search.room) for one in search.found[1 : 1 + SHOWN]),
        alone=alone,
        copies=copies,
        advice=_advise(best, alone, copies),
        complete=search.complete,
    )


def _explain_time(candidate: Candidate, most: int = 3) -> str:
    """Return what the step's time consists of: the largest shares of the critical path."""
    path = critical_path(candidate.schedule, candidate.predictor.profile.costs(candidate.cuts))
    whole = sum(share.time for share in path.shares) or 1.0
    return ", ".join(f"{share.what} {100 * share.time / whole:.0f} %" for share in path.shares[:most])


def _require_fitting(search: Search) -> Candidate:
    if not search.found:
        raise InputError(
            f"schedules: got none that can run this model: {' '.join(dict.fromkeys(search.refused))} Use fewer ranks, "
            "fewer pins, other schedules, or more microbatches."
        )
    best = search.found[0]
    if not best.predicted.fits(search.room.caps):
        held, cap = max(zip(best.predicted.memory, search.room.caps, strict=True), key=lambda pair: pair[0] - pair[1])
        raise InputError(
            f"memory: got {format_bytes(cap)}, expected at least {format_bytes(held)} ({held} bytes), which is the "
            f"least that a rank holds of all that was tried ({name_schedule(best.schedule)}). Use more ranks, more "
            "microbatches, or a smaller batch."
        )
    return best


def _bound_all(found: Sequence[Candidate], predictors: Mapping[int, Predictor], ranks: int) -> Bound:
    """Return the bound for all plans that do no more than some candidates: split, recompute, or hold stages twice."""
    schedules = [one.schedule for one in found]
    split, single = any(map(splits, schedules)), all(how.stages == how.ranks for how in schedules)
    recomputed = any(how.factory is recompute for how in schedules)
    copies = max(len(how.placement.replicas(s)) for how in schedules for s in range(how.stages))
    bounds = [
        bound_plans(one.profile, ranks, count, split=split, single=single, copies=copies, recomputed=recomputed)
        for count, one in predictors.items()
    ]
    return min(bounds, key=lambda one: one.makespan)


def _runner_up(candidate: Candidate, room: Room) -> RunnerUp:
    predicted = candidate.predicted
    return RunnerUp(
        name_schedule(candidate.schedule), predicted.seconds, max(predicted.memory), predicted.fits(room.caps)
    )


def _estimate_alternatives(predictors: Mapping[int, Predictor], ranks: int, room: Room) -> tuple[RunnerUp, RunnerUp]:
    """Return the fastest step on one device, and of a copy of the model on every device, without a pipeline."""
    alone = [_one_device(one, count, room) for count, one in predictors.items()]
    copies = [_data_parallel(one, count, ranks, room) for count, one in predictors.items()]
    first, second = (min(found, key=lambda one: (not one.fits, one.seconds)) for found in (alone, copies))
    return first, second


def _one_device(predictor: Predictor, microbatches: int, room: Room) -> RunnerUp:
    seconds, held = _one_microbatch(predictor)
    total = microbatches * seconds + predictor.profile.step
    return RunnerUp(f"{microbatches} microbatches on one device", total, held, held <= max(room.caps))


def _data_parallel(predictor: Predictor, microbatches: int, ranks: int, room: Room) -> RunnerUp:
    """Return the step in which every rank has a copy, trains its share, and gradients are summed in a ring."""
    seconds, held = _one_microbatch(predictor)
    profile = predictor.profile
    shared = 2 * (ranks - 1) / ranks * float(profile.ranges.parameters[0, len(profile.blocks)])
    summing = shared / profile.link.bandwidth + 2 * (ranks - 1) * profile.link.latency
    total = -(-microbatches // ranks) * seconds + summing + profile.step
    return RunnerUp(f"a copy on each of {ranks} devices", total, held, held <= min(room.caps))


def _one_microbatch(predictor: Predictor) -> tuple[float, int]:
    """Return the seconds of a forward and backward of the whole model, and the bytes that it holds with them."""
    profile, whole = predictor.profile, (0, len(predictor.profile.blocks))
    ranges = profile.ranges
    seconds = float(ranges.seconds("F")[whole] + ranges.seconds("B")[whole])
    return seconds, int(predictor.weights * ranges.parameters[whole] + ranges.activation[whole])


def _advise(best: Candidate, alone: RunnerUp, copies: RunnerUp) -> str:
    """Return what to do instead of a pipeline, if it does not pay."""
    faster = [one for one in (alone, copies) if one.fits and 0 < one.seconds <= best.predicted.seconds]
    if not faster:
        return ""
    one = min(faster, key=lambda other: other.seconds)
    what = "train on one device" if one is alone else "use data parallelism"
    ratio = best.predicted.seconds / one.seconds
    return (
        f"No pipeline pays here: {what}, in {format_seconds(one.seconds)} per step. The model fits, and this plan "
        f"takes {ratio:.2f} times as long."
    )
