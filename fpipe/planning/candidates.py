# SPDX-License-Identifier: Apache-2.0
"""The ways to run a model that a plan chooses among: schedule, cuts, recomputation, and number of microbatches.

Every schedule begins with the cuts that balance its stages. If a rank holds too much, stages are recomputed, those that
keep most first, until it fits. Then cuts move, block by block, as long as the predicted step gets shorter.

Runs when a plan is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from fpipe.planning.chain import partition_chain
from fpipe.planning.prediction import Prediction, Predictor
from fpipe.planning.profile import Profile
from schedules import (
    Schedule,
    SizeError,
    eager_1f1b,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    recompute,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)
from schedules.language.costs import of_stage

ScheduleFactory: TypeAlias = Callable[[int, int], Schedule]
"""Makes a schedule of so many ranks and microbatches; raises `SizeError` for sizes that it does not support."""


def four_chunks(ranks: int, microbatches: int) -> Schedule:
    """Return interleaved 1F1B with four stages on each rank."""
    return interleaved_1f1b(ranks, microbatches, 4)


FACTORIES: Final[tuple[ScheduleFactory, ...]] = (
    *(one_f_one_b, eager_1f1b, zb_h1, zb_h2, zb_v, v_half, v_min, gpipe),
    *(interleaved_1f1b, four_chunks, interleaved_zero_bubble),
)
"""What is tried unless the user names schedules."""


@dataclass(frozen=True)
class Candidate:
    """A way to run the model, and its prediction; stages after the first begin at the blocks numbered `cuts`."""

    predictor: Predictor
    schedule: Schedule
    cuts: tuple[int, ...]
    predicted: Prediction

    @classmethod
    def of(cls, predictor: Predictor, schedule: Schedule, cuts: Sequence[int]) -> Candidate:
        """Return the candidate with its prediction."""
        return cls(predictor, schedule, tuple(cuts), predictor.predict(schedule, cuts))

    @property
    def profile(self) -> Profile:
        """The profile of the model for microbatches of this size."""
        return self.predictor.profile

    @property
    def excess(self) -> float:
        """The most bytes that a rank holds."""
        return max(self.predicted.memory)


@dataclass(frozen=True)
class Room:
    """What candidates must fit into: the bytes of each rank. `pinned` are the blocks at which a stage must begin."""

    caps: tuple[float, ...]
    pinned: tuple[int, ...] = ()


def start(predictor: Predictor, schedule: Schedule, room: Room) -> Candidate | None:
    """Return a schedule with balanced stages, recomputed as far as memory asks for; `None` if there are too few blocks.

    It may still not fit.
    """
    ranges = predictor.profile.ranges
    work = ranges.seconds("F") + (
        ranges.seconds("I") + ranges.seconds("W") if _splits(schedule) else ranges.seconds("B")
    )
    cuts = partition_chain(work, schedule.stages, room.pinned)
    if cuts is None:
        return None
    return fit(Candidate.of(predictor, schedule, cuts), room)


def _splits(schedule: Schedule) -> bool:
    return any(action.kind == "I" for action in schedule.actions(0))


def fit(candidate: Candidate, room: Room) -> Candidate:
    """Return the candidate with as many stages recomputed as it takes to fit, or with all of them."""
    found, stages = candidate, set[int]()
    base = candidate.schedule
    while not found.predicted.fits(room.caps):
        more = _largest_saving(found, base, stages, room.caps)
        if more is None:
            return found
        stages.add(more)
        found = Candidate.of(found.predictor, recompute(base, tuple(sorted(stages))), found.cuts)
    return found


def _largest_saving(found: Candidate, base: Schedule, stages: set[int], caps: Sequence[float]) -> int | None:
    """Return the stage, on a rank that holds too much, whose recomputation saves most; `None` if none is left."""
    over = [rank for rank, (held, cap) in enumerate(zip(found.predicted.memory, caps, strict=True)) if held > cap]
    sizes = found.predictor.sizes(base, found.cuts)
    savings = {
        s: of_stage(sizes.activation, s) - of_stage(sizes.inputs, s)
        for rank in over
        for s in base.placement.stages_on(rank)
        if s not in stages
    }
    best = max(savings, key=lambda s: (savings[s], -s), default=None)
    return best if best is not None and savings[best] > 0 else None


def improve(candidate: Candidate, room: Room) -> Iterator[Candidate]:
    """Yield better and better candidates: each moves one cut of the one before, by the step that helps most."""
    while True:
        base = _without_recomputation(candidate.schedule)
        better = min(
            (fit(Candidate.of(candidate.predictor, base, cuts), room) for cuts in _neighbors(candidate, room)),
            key=lambda one: _rank(one, room),
            default=candidate,
        )
        if not _rank(better, room) < _rank(candidate, room):
            return
        candidate = better
        yield candidate


def _without_recomputation(schedule: Schedule) -> Schedule:
    inner = dict(schedule.arguments).get("schedule")
    return inner if schedule.factory is recompute and isinstance(inner, Schedule) else schedule


def _rank(candidate: Candidate, room: Room) -> tuple[bool, float]:
    """Return what candidates are compared by: those that fit are first, then the faster one."""
    fits = candidate.predicted.fits(room.caps)
    return not fits, candidate.predicted.seconds if fits else candidate.excess


def _neighbors(candidate: Candidate, room: Room) -> Iterator[tuple[int, ...]]:
    """Yield the cuts with one of them moved by one block, or by two."""
    cuts, end = candidate.cuts, len(candidate.profile.blocks)
    for k, cut in enumerate(cuts):
        low, high = cuts[k - 1] if k else 0, cuts[k + 1] if k + 1 < len(cuts) else end
        for moved in (cut - 2, cut - 1, cut + 1, cut + 2):
            if low < moved < high and cut not in room.pinned:
                yield (*cuts[:k], moved, *cuts[k + 1 :])


def list_candidates(
    predictors: dict[int, Predictor], factories: Iterable[ScheduleFactory], ranks: int, room: Room
) -> Iterator[Candidate | str]:
    """Yield a candidate for every number of microbatches and every schedule, or why there is none."""
    for microbatches, predictor in predictors.items():
        for factory in factories:
            try:
                found = start(predictor, factory(ranks, microbatches), room)
            except SizeError as error:
                yield str(error)
                continue
            yield found if found is not None else f"{factory}: the model has too few places for cuts"


def keep_best(candidates: Iterable[Candidate], room: Room, most: int) -> list[Candidate]:
    """Return the best candidates, best first; of equal schedules only one."""
    ordered = sorted(candidates, key=lambda one: _rank(one, room))
    return list({repr(one.schedule): one for one in reversed(ordered)}.values())[::-1][:most]


def replace_schedule(candidate: Candidate, schedule: Schedule) -> Candidate:
    """Return the candidate with another order of the same stages."""
    return replace(candidate, schedule=schedule, predicted=candidate.predictor.predict(schedule, candidate.cuts))
