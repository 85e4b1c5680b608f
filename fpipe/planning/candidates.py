# SPDX-License-Identifier: Apache-2.0
"""The ways to run a model that a plan chooses among: schedule, cuts, recomputation, and number of microbatches.

Every schedule begins with the cuts that balance its stages. If a rank holds too much, stages are recomputed, those that
lower its peak most first, until it fits. Then cuts move, block by block, as long as the predicted step gets shorter.

A candidate's step takes what `schedules.simulate` says of its schedule, for the costs of the stages that its cuts make.

Runs when a plan is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import islice, product, takewhile
from math import ceil, inf
from time import monotonic
from typing import Final, TypeAlias

import torch
from torch import Tensor

from fpipe.errors import InputError
from fpipe.pipelines.argument_checks import require_backward, require_runnable
from fpipe.pipelines.description import name_schedule
from fpipe.planning.chain import Loads, partition_chain
from fpipe.planning.plan import Prediction
from fpipe.planning.profile import Profile
from schedules import (
    KINDS,
    Costs,
    Graph,
    Placement,
    Problem,
    Schedule,
    SizeError,
    Sizes,
    eager_1f1b,
    gis,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    offload,
    one_f_one_b,
    recompute,
    seq_1f1b,
    simulate,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)
from schedules.errors import quote
from schedules.playing.costs import of_stage

StageEnds: TypeAlias = tuple[str | None, str | None]
"""The module that a stage begins at, and the one that it ends before; `None` for the beginning and end of the model."""
ScheduleFactory: TypeAlias = Callable[[int, int], Schedule]
"""Makes a schedule of so many ranks and microbatches; raises `SizeError` for sizes that it does not support."""


def four_chunks(ranks: int, microbatches: int) -> Schedule:
    """Return interleaved 1F1B with four stages on each rank."""
    return interleaved_1f1b(ranks, microbatches, 4)


def half_groups(ranks: int, microbatches: int) -> Schedule:
    """Return interleaved, split 1F1B in groups of half as many microbatches as ranks, which takes the least memory."""
    return gis(ranks, microbatches, group=(ranks + 1) // 2)


FACTORIES: Final[tuple[ScheduleFactory, ...]] = (
    *(one_f_one_b, eager_1f1b, zb_h1, zb_h2, zb_v, v_half, v_min, gpipe),
    *(interleaved_1f1b, four_chunks, interleaved_zero_bubble, gis, half_groups),
)
"""Tried unless the user names schedules."""
SLICED: Final = (seq_1f1b,)
"""Tried for each number of slices unless the user names schedules."""
TRIED_AT_START: Final = 40
TRIED_LATER: Final = 2000
"""Of long lists of cuts, so many are looked at."""
SIZE_UNITS: Final = (Sizes(1, 0, 0), Sizes(0, 1, 0), Sizes(0, 0, 1), Sizes(0, 0, 0, gathered=1))
"""A unit of each part of what a rank holds: activations, saved inputs, residuals, and gathered weights."""
MARGIN: Final = 1e-6
"""Of memory, so that rounding does not exceed it."""


@dataclass(frozen=True)
class PlanProblem:
    """The problem that a plan solves: a model for `microbatches` of one size, and the limits that it must fit into.

    - `profile`: the costs of the model's blocks.
    - `caps`: the bytes of each rank. `weights`: how often parameters are held, optimizer state included.
    - `places`: the blocks at which a stage may begin; `pinned`: those at which one must.
    - `host`: the bytes per second at which a rank can move activations to the host; 0 if none may.
    - `end`: when the search has to end, in seconds of `time.monotonic`.
    """

    profile: Profile
    microbatches: int
    caps: tuple[float, ...]
    weights: float
    places: frozenset[int]
    pinned: tuple[int, ...] = ()
    host: float = 0
    end: float = inf

    @classmethod
    def of(
        cls, profile: Profile, microbatches: int, caps: tuple[float, ...], weights: float = 4.0, host: float = 0
    ) -> PlanProblem:
        """Return the problem in which a stage may begin with the call of any module, which a plan can name."""
        starts = (any(mark.path and not mark.end for mark in block.marks) for block in profile.blocks)
        return cls(
            *(profile, microbatches, caps, weights),
            frozenset(k for k, begins in enumerate(starts) if k and begins),
            host=host,
        )

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.caps)

    @property
    def slices(self) -> int:
        """The number of slices of a microbatch."""
        return len(self.profile.parts)

    def is_over(self) -> bool:
        """Return whether time has run out."""
        return monotonic() > self.end

    def sizes(self, placement: Placement, cuts: Sequence[int]) -> Sizes:
        """Return the sizes of the stages, in bytes; weights with what is held beside them."""
        found = self.profile.sizes(cuts, placement)
        return replace(found, weight=tuple(self.weights * of_stage(found.weight, s) for s in range(placement.stages)))

    def costs(self, cuts: Sequence[int]) -> Costs:
        """Return the costs of the stages, in seconds, with those of moves to the host if there are any."""
        found = self.profile.costs(cuts)
        if not self.host:
            return found
        ranges = self.profile.ranges.activation
        return replace(found, OFFLOAD=tuple(float(ranges[stage]) / self.host for stage in self.profile.stages(cuts)))

    def pose(self, placement: Placement, cuts: Sequence[int], split: bool, graph: Graph | None = None) -> Problem:
        """Return the problem that an order of these stages solves."""
        memory, sizes = tuple(cap * (1 - MARGIN) for cap in self.caps), self.sizes(placement, cuts)
        return Problem(self.costs(cuts), placement, self.microbatches, memory, sizes, graph, split)

    def try_out(self, schedule: Schedule, cuts: Sequence[int]) -> Candidate:
        """Return a schedule and cuts as a candidate, with the prediction of a step."""
        timeline = simulate(schedule, self.costs(cuts), sizes=self.sizes(schedule.placement, cuts))
        memory = tuple(int(-(-held // 1)) for held in timeline.peak_memory)
        predicted = Prediction(timeline.makespan + self.profile.step, timeline.bubble, memory)
        return Candidate(self, schedule, tuple(cuts), predicted)

    def pin(self, cuts: Sequence[str], stages: Sequence[StageEnds] = ()) -> PlanProblem:
        """Return the problem in which a stage must begin at each of `cuts`, and each of `stages` is a whole stage.

        Raise `InputError` for modules that no stage can begin at, and if a stage would have to be cut.
        """
        blocks, pinned = self.profile.blocks, {start for start, _ in self.profile.stages(cuts)[1:]}
        wholes = [_find_blocks(self.profile, k, stage) for k, stage in enumerate(stages)]
        pinned = pinned.union(*wholes) - {0, len(blocks)}
        for (begin, end), stage in zip(wholes, stages, strict=True):
            inside = sorted(place for place in pinned if begin < place < end)
            if inside:
                raise InputError(
                    f"stages: got {stage} and a stage that begins at {blocks[inside[0]].name!r}, in the middle of it, "
                    "expected none there. Drop one of the two."
                )
        places = {place for place in self.places if not any(begin < place < end for begin, end in wholes)}
        return replace(self, places=frozenset(places), pinned=tuple(sorted(pinned)))


@dataclass(frozen=True)
class Candidate:
    """A way to run the model, and its prediction; stages after the first begin at the blocks numbered `cuts`."""

    problem: PlanProblem
    schedule: Schedule
    cuts: tuple[int, ...]
    predicted: Prediction

    @property
    def fits(self) -> bool:
        """True if no rank holds more than its cap at any moment."""
        return all(held <= cap for held, cap in zip(self.predicted.memory, self.problem.caps, strict=True))

    @property
    def rank_key(self) -> tuple[bool, float]:
        """The order of candidates: those that fit first, then the faster; of those that do not, the smaller."""
        return not self.fits, self.predicted.seconds if self.fits else max(self.predicted.memory)


def _find_blocks(profile: Profile, k: int, stage: StageEnds) -> tuple[int, int]:
    """Return the first block of a stage and the one after its last."""
    if not (isinstance(stage, tuple) and len(stage) == 2 and all(isinstance(name, str | None) for name in stage)):
        raise InputError(
            f'stages[{k}]: got {stage!r}, expected two names of modules, or None. Pass, for example, ("blocks.4", '
            '"blocks.8").'
        )
    begin, end = (None if name is None else profile.stages([name])[1][0] for name in stage)
    if begin is not None and end is not None and begin >= end:
        raise InputError(
            f"stages[{k}]: got {stage}, expected a second module that comes after the first. Give them in the order of "
            "execution."
        )
    return begin or 0, len(profile.blocks) if end is None else end


def start(problem: PlanProblem, schedule: Schedule) -> Candidate | None:
    """Return a schedule with good cuts, recomputed as far as memory asks for; `None` if there are too few places.

    Of a short list of cuts, those with the least load on the busiest rank are tried; otherwise, those that balance the
    stages. The candidate may still not fit.
    """
    loads = Loads(problem.profile, schedule)
    balanced = partition_chain(loads.work, schedule.stages, problem.places, problem.pinned)
    if balanced is None:
        return None
    best = fit_memory(problem.try_out(schedule, balanced))
    return _best_of(best, loads, loads.list_cuts(problem.places, problem.pinned)[:TRIED_AT_START])


def _best_of(best: Candidate, loads: Loads, cuts: Sequence[tuple[int, ...]]) -> Candidate:
    """Return the best of a candidate and the same schedule with these cuts, as far as there is time.

    If it fits, cuts with which the busiest rank alone works for as long as its step takes are not tried.
    """
    problem, base = best.problem, _find_base(best.schedule)
    if cuts and best.fits:
        worth = loads.busiest(torch.tensor(cuts, dtype=torch.int64)) < best.predicted.seconds
        cuts = [one for one, yes in zip(cuts, worth.tolist(), strict=True) if yes]
    in_time = takewhile(lambda one: not problem.is_over(), cuts)
    return min((best, *(fit_memory(problem.try_out(base, one)) for one in in_time)), key=lambda one: one.rank_key)


def fit_memory(candidate: Candidate) -> Candidate:
    """Return the candidate with as many stages recomputed as it takes to fit, or with all of them; or offloaded."""
    if candidate.fits:
        return candidate
    made = [_fit_by_recomputation(candidate), *([_offload(candidate)] if candidate.problem.host else [])]
    return min(made, key=lambda one: one.rank_key)


def _offload(candidate: Candidate) -> Candidate:
    """Return the candidate with activations moved to the host, at the rate at which the slowest move keeps up."""
    problem, schedule = candidate.problem, candidate.schedule
    costs, stages = problem.costs(candidate.cuts), range(schedule.stages)
    slowest = max(costs.time("OFFLOAD", s) for s in stages)
    quickest = min(costs.time(kind, s) for kind in "FB" for s in stages)
    passes = min(schedule.microbatches, ceil(slowest / quickest)) if quickest else schedule.microbatches
    return problem.try_out(offload(schedule, passes=max(1, passes)), candidate.cuts)


def _fit_by_recomputation(candidate: Candidate) -> Candidate:
    problem, base, stages = candidate.problem, candidate.schedule, frozenset[int]()
    sizes = problem.sizes(base.placement, candidate.cuts)
    for rank, (held, cap) in enumerate(zip(candidate.predicted.memory, problem.caps, strict=True)):
        stages = _recompute_on(rank, base, sizes, cap, stages) if held > cap else stages
    return problem.try_out(_recompute(base, stages), candidate.cuts) if stages else candidate


def find_peak(schedule: Schedule, rank: int, sizes: Sizes) -> float:
    """Return the most bytes that a rank holds at any moment, without its weights; `simulate` says the same.

    It follows from the order of the rank's actions, so this takes a fraction of the time.
    """
    stages = schedule.placement.stages_on(rank)
    residual = sizes.activation if sizes.residual is None else sizes.residual
    parts = sizes.activation, sizes.inputs, residual, sizes.gathered
    bytes_of_each = torch.tensor([of_stage(part, s) for s in stages for part in parts], dtype=torch.float64)
    return max(0.0, float((_list_levels(schedule, rank) @ bytes_of_each).max()))


@lru_cache(maxsize=2**12)  # a plan asks for the same order with thousands of cuts
def _list_levels(schedule: Schedule, rank: int) -> Tensor:
    """Return what a rank holds when it holds most: rows of how many of each part of `Sizes`, stage by stage."""
    stages = {s: k for k, s in enumerate(schedule.placement.stages_on(rank))}
    held = [0.0] * (len(SIZE_UNITS) * len(stages))

    @cache
    def changes(kind: str) -> list[tuple[int, float]]:
        share = schedule.slices if KINDS[kind].after else 1
        return [(k, part.growth(kind, 0, schedule.backward) / share) for k, part in enumerate(SIZE_UNITS)]

    levels = set[tuple[float, ...]]()
    for action in schedule.actions(rank):
        first, grown = len(SIZE_UNITS) * stages[action.stage], changes(action.kind)
        if any(change < 0 for _, change in grown):  # a peak is before something is freed
            levels.add(tuple(held))
        for k, change in grown:
            held[first + k] += change
    return torch.tensor([*levels, held], dtype=torch.float64)


def _recompute_on(rank: int, base: Schedule, sizes: Sizes, cap: float, stages: frozenset[int]) -> frozenset[int]:
    """Return the stages to recompute, so that a rank fits, if it can: one by one, those that lower its peak most.

    `stages` are recomputed already.
    """
    mine = base.placement.stages_on(rank)
    chosen = stages.intersection(mine)
    left = cap - sum(of_stage(sizes.weight, s) for s in mine)
    savings = {s: of_stage(sizes.activation, s) - of_stage(sizes.inputs, s) for s in mine if s not in stages}
    useful = {s for s, saved in savings.items() if saved > 0}
    while useful and find_peak(_recompute(base, chosen), rank, sizes) > left:
        peaks = {s: find_peak(_recompute(base, chosen | {s}), rank, sizes) for s in useful}
        best = min(useful, key=lambda s: (peaks[s], -savings[s], s))
        useful, chosen = useful - {best}, chosen | {best}
    return stages | chosen


def _recompute(base: Schedule, stages: frozenset[int]) -> Schedule:
    return recompute(base, tuple(sorted(stages))) if stages else base


def improve(candidate: Candidate) -> Iterator[Candidate]:
    """Yield better and better candidates: each moves one cut of the one before, or two, by the step that helps most."""
    problem = candidate.problem
    loads = Loads(problem.profile, _find_base(candidate.schedule))
    listed = loads.list_cuts(problem.places, problem.pinned)[TRIED_AT_START:TRIED_LATER]
    moves: tuple[Callable[[tuple[int, ...]], Iterable[tuple[int, ...]]], ...] = (
        lambda cuts: listed,
        lambda cuts: _neighbors(cuts, problem),
        lambda cuts: (pair for one in _neighbors(cuts, problem) for pair in _neighbors(one, problem)),
    )
    k = 0
    while k < len(moves):
        better = _best_of(candidate, loads, [*islice(moves[k](candidate.cuts), TRIED_LATER)])
        if better is candidate:
            k += 1
            continue
        candidate, k = better, 1
        yield candidate


def follow_costs(candidate: Candidate) -> Candidate | None:
    """Return the candidate with the order that its schedule's factory makes for the costs of its stages, if that is
    faster and fits; `None` if not, or if the factory follows no costs.
    """
    base = _find_base(candidate.schedule)
    given = dict(base.arguments)
    if given.get("costs", candidate) is not None:
        return None
    found = base.factory(**{**given, "costs": candidate.problem.costs(candidate.cuts)})
    if base is not candidate.schedule:
        found = candidate.schedule.factory(**{**dict(candidate.schedule.arguments), "schedule": found})
    followed = candidate.problem.try_out(found, candidate.cuts)
    return followed if followed.rank_key < candidate.rank_key else None


def _find_base(schedule: Schedule) -> Schedule:
    """Return the schedule that was recomputed or offloaded to fit into memory."""
    inner = dict(schedule.arguments).get("schedule")
    return inner if schedule.factory in (recompute, offload) and isinstance(inner, Schedule) else schedule


def _neighbors(cuts: tuple[int, ...], problem: PlanProblem) -> Iterator[tuple[int, ...]]:
    """Yield the cuts with one of them moved by one place, or by two."""
    places, ends = sorted(problem.places), [0, *cuts, len(problem.profile.blocks)]
    for k, cut in enumerate(cuts):
        at = places.index(cut)
        for moved in places[max(0, at - 2) : at + 3]:
            if ends[k] < moved < ends[k + 2] and moved != cut and cut not in problem.pinned:
                yield (*cuts[:k], moved, *cuts[k + 1 :])


def list_factories(slices: Iterable[int]) -> list[ScheduleFactory]:
    """Return the built-in schedules to try for these numbers of slices."""
    numbers = sorted({*slices})
    return [
        *(FACTORIES if 1 in numbers else ()),
        *(partial(factory, slices=n) for factory in SLICED for n in numbers if n > 1),
    ]


def list_candidates(
    problems: Iterable[PlanProblem], schedules: Iterable[Schedule | ScheduleFactory]
) -> Iterator[Candidate | str]:
    """Yield a candidate for every number of microbatches and every schedule, or why there is none."""
    for problem, factory in product(problems, schedules):
        try:
            schedule = _make(factory, problem)
        except SizeError as error:
            yield str(error)
            continue
        yield start(problem, schedule) or _explain(schedule, problem)


def _make(factory: Schedule | ScheduleFactory, problem: PlanProblem) -> Schedule:
    """Return what a factory makes; a schedule as it is.

    Raise `SizeError` for other sizes, and `InputError` for what can't train a model in a pipeline.
    """
    ranks, microbatches, slices = problem.ranks, problem.microbatches, problem.slices
    made: object = factory if isinstance(factory, Schedule) else factory(ranks, microbatches)
    if not isinstance(made, Schedule):
        raise InputError(
            f"schedules: got {quote(made)} from {quote(factory)}, expected a Schedule of {ranks} ranks and "
            f"{microbatches} microbatches. Return one, or raise SizeError where there is none."
        )
    require_runnable(made)
    require_backward(made)
    if (made.ranks, made.microbatches, made.slices) != (ranks, microbatches, slices):
        cut = f" of {slices} slices" if max(slices, made.slices) > 1 else ""
        raise SizeError.of("plan", "schedules", made, f"{ranks} ranks and {microbatches} microbatches{cut}", "Drop it.")
    return made


def _explain(schedule: Schedule, problem: PlanProblem) -> str:
    """Return why no cuts make the stages of a schedule."""
    name, stages = name_schedule(schedule), schedule.stages
    if len(problem.pinned) >= stages:
        return f"{name} has {stages} stages, and the pins make at least {len(problem.pinned) + 1}."
    return f"{name} needs {stages - 1} cuts, and the model has too few places for them: {len(problem.places)}."


def keep_best(candidates: Iterable[Candidate], most: int) -> list[Candidate]:
    """Return the best candidates, best first; of equal schedules only one."""
    ordered = sorted(candidates, key=lambda one: one.rank_key)
    return list({repr(one.schedule): one for one in reversed(ordered)}.values())[::-1][:most]
