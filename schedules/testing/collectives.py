# SPDX-License-Identifier: Apache-2.0
"""A strategy for arbitrary correct schedules with collectives: gathered weights and reduced gradients."""

from __future__ import annotations

from itertools import count

from hypothesis import strategies as st

from schedules.checking.rules import check
from schedules.errors import ScheduleError
from schedules.language.actions import KINDS, Action
from schedules.language.graph import Graph
from schedules.language.schedule import Schedule
from schedules.playing.rows import edit
from schedules.testing.orders import orders


@st.composite
def collective_orders(
    draw: st.DrawFn, ranks: int = 4, stages: int = 6, microbatches: int = 4
) -> tuple[Schedule, Graph]:
    """Draw any correct schedule as `orders` does, with collectives in any places where they are correct.

    Some stages are gathered, each seldom or often, early or late. The gradients of all stages may be reduced, at once
    or later; then each stage is updated once, if at all, and otherwise perhaps several times.
    """
    schedule, graph = draw(orders(ranks, stages, microbatches))
    rows = [list(schedule.actions(rank)) for rank in range(schedule.ranks)]
    if schedule.backward and draw(st.booleans()):
        rows = [_keep_last_updates(row) for row in rows]
        _add_reductions(draw, schedule, graph, rows)
    for rank, row in enumerate(rows):
        for s in sorted(draw(st.sets(st.sampled_from(schedule.placement.stages_on(rank))))):
            row[:] = _shard_stage(draw, schedule, rank, row, s)
    return edit(schedule, rows), graph


def _keep_last_updates(row: list[Action]) -> list[Action]:
    """Return the row with only the last update of each stage, which applies all gradients."""
    last = {action.stage: at for at, action in enumerate(row) if action.kind == "U"}
    return [action for at, action in enumerate(row) if action.kind != "U" or last[action.stage] == at]


def _add_reductions(draw: st.DrawFn, schedule: Schedule, graph: Graph, rows: list[list[Action]]) -> None:
    """Reduce the gradient of every stage on every rank right after it is complete, or, if that is correct, later."""
    added = list[tuple[list[Action], Action]]()
    for row in rows:
        for s in sorted({action.stage for action in row}):
            last = max(a.microbatch for a in row if a.stage == s and KINDS[a.kind].after == "done")
            added.append((row, Action("REDUCE_GRAD", s, last)))
            row.insert(_find_completion(row, s) + 1, added[-1][1])
    for row, reduction in added:
        at = row.index(reduction)
        to = draw(st.integers(at, len(row) - 1))
        row.insert(to, row.pop(at))
        try:
            check(edit(schedule, rows), graph)
        except ScheduleError:  # it splits a pair, or an update waits for it
            row.insert(at, row.pop(to))


def _find_completion(row: list[Action], s: int) -> int:
    """Return the position of the last weight gradient of stage `s`, or of its sum over replicas."""
    return max(at for at, a in enumerate(row) if a.stage == s and (KINDS[a.kind].after == "done" or a.kind == "G"))


def _shard_stage(draw: st.DrawFn, schedule: Schedule, rank: int, row: list[Action], s: int) -> list[Action]:
    """Return the row with gatherings of stage `s`: each at most a few actions early, and freed at once or later."""
    home = schedule.placement.home
    numbers = (i for i in count() if home(s, i) == rank)
    sharded, number, earliest = list[Action](), -1, 0
    for at, action in enumerate(row):
        reads = action.stage == s and KINDS[action.kind].reads
        if reads and number < 0:
            number = next(numbers)
            early = max(earliest, len(sharded) - draw(st.integers(0, 3)))
            sharded.insert(early - (early > 0 and sharded[early - 1].kind == "OVERLAP_F"), Action("UNSHARD", s, number))
        is_update = action.kind == "U" and action.stage == s
        if is_update and number >= 0:
            sharded.append(Action("RESHARD", s, number))
            number = -1
        sharded.append(action)
        is_apart = action.kind != "OVERLAP_F"
        if number >= 0 and is_apart and (at == len(row) - 1 or draw(st.sampled_from([False, False, True]))):
            sharded.append(Action("RESHARD", s, number))
            number = -1
            earliest = len(sharded)
        if is_update:
            earliest = len(sharded)
    return sharded
