# SPDX-License-Identifier: Apache-2.0
"""Run two copies of a schedule in opposite directions.

Problem. While a pipeline fills, the last ranks idle; while it drains, the first ranks do.

Idea. Start a second copy from the other end, so that the work of each fills the idle time of the other (Chimera,
arXiv 2107.06925, section 3.1). Every stage then lives on two ranks, whose gradients are summed at the end.

Invariant: each copy keeps its order on each rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import isfinite
from typing import Any

from schedules.errors import SizeError
from schedules.language.actions import COLLECTIVES, KINDS, Action, G
from schedules.language.graph import Graph
from schedules.language.placement import Placement
from schedules.language.schedule import Factory, Limits, Schedule, Shape, graph_of
from schedules.playing.outputs import Output, inputs_of, output_of, unit_of
from schedules.transforms.transform import transform


def sum_replicas(rank: int, placement: Placement, microbatches: int) -> Iterator[Action]:
    """Yield the `G`s that end a turn, one for every stage `rank` shares with another rank, in stage order.

    >>> from schedules import bidirectional
    >>> [list(sum_replicas(rank, bidirectional(ranks=3), microbatches=4)) for rank in (0, 1)]
    [[G(0, 2), G(2, 3)], []]
    """
    last = range(microbatches - 1, microbatches - 1 - len(placement.routes), -1)
    for stage in placement.stages_on(rank):
        if len(placement.replicas(stage)) > 1:
            yield G(stage, next(i for i in last if placement.home(stage, i) == rank))


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
    yield from _merge_copies(schedule)[rank]
    if schedule.backward:
        yield from sum_replicas(rank, _mirror_placement(schedule.placement), 2 * schedule.microbatches)


@lru_cache(maxsize=1)  # every rank asks for its row in turn
def _merge_copies(schedule: Schedule) -> Sequence[Sequence[Action]]:
    """Return each rank's actions of both copies; those whose inputs never come are last, for `check` to report.

    A lane is what a rank has still to run of one copy. In each round, every rank runs one turn of its two lanes.
    """
    P, graph = schedule.ranks, graph_of(schedule, None)
    lanes = [[deque(_list_turns(schedule, home, way)) for way, home in enumerate((r, P - 1 - r))] for r in range(P)]
    rows: list[list[Action]] = [[] for _ in range(P)]
    outputs = set[Output]()
    while True:
        ran: list[Action] = []
        for row, pair in zip(rows, lanes, strict=True):
            ready = [lane for lane in pair if lane and outputs.issuperset(_inputs(lane[0], graph))]
            if ready:
                turn = min(ready, key=lambda lane: _priority(lane[0], graph)).popleft()
                row += turn
                ran += turn
        if not ran:
            break
        outputs.update(map(output_of, ran))
    for row, pair in zip(rows, lanes, strict=True):
        row += [action for lane in pair for turn in lane for action in turn]
    return tuple(tuple(one._replace(microbatch=one.microbatch // schedule.slices) for one in row) for row in rows)


def _list_turns(schedule: Schedule, home: int, way: int) -> Iterator[tuple[Action, ...]]:
    """Yield the actions of rank `home` for the copy `way`, numbered by slice; a fused pair is one turn."""
    opener: tuple[Action, ...] = ()
    for action in schedule.actions(home):
        if action.kind == "U":
            raise _drift_error(schedule)
        if action.kind in COLLECTIVES:
            repair = "Mirror it first, and insert them afterwards."
            raise SizeError.of("mirror", "schedule", schedule, "one without UNSHARD, RESHARD and REDUCE_GRAD", repair)
        copy = action._replace(microbatch=2 * action.microbatch + way)
        turn = (*opener, copy._replace(microbatch=unit_of(copy, schedule.slices)))
        opener = turn if action.kind == "OVERLAP_F" else ()
        if not opener:
            yield turn
    if opener:
        yield opener


def _inputs(turn: tuple[Action, ...], graph: Graph) -> set[Output]:
    return {output for action in turn for output in inputs_of(action, graph)}


def _priority(turn: tuple[Action, ...], graph: Graph) -> tuple[int, int]:
    """Return the priority of a turn: the stages its microbatch has to go (most for weight gradients), then its age."""
    kind, stage, microbatch, *_ = turn[-1]
    stages_to_go = {"F": 2 * graph.stages - stage, "B": stage + 1, "": 2 * graph.stages + 1}
    return stages_to_go[KINDS[kind].crosses], microbatch
