# SPDX-License-Identifier: Apache-2.0
"""Run two copies of a schedule in opposite directions.

Problem. While a pipeline fills, the last ranks idle; while it drains, the first ranks do.

Idea. Start a second copy from the other end, so that the work of each fills the idle time of the other (Chimera,
arXiv 2107.06925, section 3.1). Every stage then lives on two ranks, whose gradients are summed at the end.

Invariant: each copy keeps its order on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import isfinite
from typing import Any

from schedules.errors import SizeError
from schedules.language.actions import COLLECTIVES, KINDS, Action
from schedules.language.placement import Placement
from schedules.language.schedule import Factory, Limits, Schedule, Shape
from schedules.playing.board import sum_replicas
from schedules.playing.costs import Costs
from schedules.playing.play import Rule, play
from schedules.playing.problem import Problem
from schedules.transforms.transform import transform


def _double(once: Factory[[Schedule]]) -> Factory[[Schedule]]:
    """Return the transform with twice the microbatches, every second one on a mirrored route."""

    def shape(arguments: dict[str, Any]) -> Shape:
        given, schedule = once.shape(arguments), arguments["schedule"]
        _require_copies(schedule)
        return given._replace(
            microbatches=2 * given.microbatches,
            placement=_mirror_placement(given.placement),
            backward=schedule.backward,
        )

    limits = Limits(memory=lambda rank, schedule: schedule.memory(rank) + schedule.memory(schedule.ranks - 1 - rank))
    return Factory(once.generator, once.signature, shape, limits)


def _require_copies(schedule: Schedule) -> None:
    if schedule.placement.mirrors:
        expected = "one whose stages live on one rank each"
        raise SizeError.of("mirror", "schedule", schedule, expected, "Mirror the original schedule.")
    if isfinite(schedule.versions(0)):
        raise _drift_error(schedule)


def _drift_error(schedule: Schedule) -> SizeError:
    expected = "one that updates no weights: the two copies would drift apart"
    return SizeError.of("mirror", "schedule", schedule, expected, "Mirror a synchronous schedule.")


def _mirror_placement(placement: Placement) -> Placement:
    P, homes = placement.ranks, placement.homes
    return Placement(P, homes, (tuple(P - 1 - home for home in homes),))


@_double
@transform
def mirror(rank: int, schedule: Schedule) -> Iterator[Action]:
    """Run the schedule down and up the ranks at once: its microbatch `k` becomes `2k` going down, `2k + 1` going up.

    If a rank can run a pass of either copy, it picks the one with fewer stages to go, then the older microbatch; weight
    gradients come last. That requires playing all ranks along the schedule's stage graph (`connect`): the first rank
    whose actions are generated pays for all of them.

    Peak memory: that of ranks `r` and `P - 1 - r` together. Mirrored 1F1B with at least `P` microbatches in total idles
    for `2 floor((P - 1) / 2) max(F, B)`. `chimera` is that in units of `P` microbatches, with less memory; `dualpipe`
    is that with weight gradients deferred.

    Raise `SizeError` for a schedule that is already mirrored, is asynchronous, or has collectives.

    >>> from schedules import one_f_one_b
    >>> print(mirror(one_f_one_b(ranks=2, microbatches=2)))
    rank 0 |0F0 1F1 1B1     0F2 0B0     1F3 1B3     0B2    g|
    rank 1 |0F1 1F0 1B0     0F3 0B1     1F2 1B2     0B3    g|
    """
    yield from _merge_copies(schedule).actions(rank)
    if schedule.backward:
        yield from sum_replicas(rank, _mirror_placement(schedule.placement), 2 * schedule.microbatches)


@lru_cache(maxsize=1)  # every rank asks for its row in turn
def _merge_copies(schedule: Schedule) -> Schedule:
    """Return the schedule of both copies; actions whose inputs never come are last, for `check` to report."""
    P = schedule.ranks
    placement, S = _mirror_placement(schedule.placement), schedule.stages
    problem = Problem(TURNS, placement, 2 * schedule.microbatches, graph=schedule.graph, backward=schedule.backward)

    def prefer(action: Action) -> tuple[int, int, int]:
        kind, stage, microbatch, _, part = action
        stages_to_go = {"F": 2 * S - stage, "B": stage + 1, "": 2 * S + 1}
        return stages_to_go[KINDS[kind].crosses], microbatch, part or 0

    lanes = [[_copy(schedule, r, 0), _copy(schedule, P - 1 - r, 1)] for r in range(P)]
    return play(problem, Rule(prefer), lanes=lanes)


TURNS = Costs(F=1, B=1, I=1, W=1, C=1, R=1, OVERLAP_F=0)
"""Every action takes one turn, and so does a pair."""


def _copy(schedule: Schedule, home: int, way: int) -> Iterator[Action]:
    """Yield the actions of rank `home` for the copy `way`."""
    for action in schedule.actions(home):
        if action.kind == "U":
            raise _drift_error(schedule)
        if action.kind in COLLECTIVES:
            repair = "Mirror it first, and insert them afterwards."
            raise SizeError.of("mirror", "schedule", schedule, "one without UNSHARD, RESHARD and REDUCE_GRAD", repair)
        yield action._replace(microbatch=2 * action.microbatch + way)
