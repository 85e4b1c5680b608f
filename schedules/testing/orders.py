# SPDX-License-Identifier: Apache-2.0
"""A strategy for arbitrary correct schedules, each with the stage graph it is correct for.

Families are orderly; a checker, a lowering or an executor must also handle orders that nobody would write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count, pairwise
from typing import TypeAlias

from hypothesis import strategies as st

from schedules.checking.rules import check
from schedules.errors import ScheduleError
from schedules.files.csv import table
from schedules.language.actions import KINDS, Action
from schedules.language.graph import Graph
from schedules.language.placement import Placement
from schedules.language.schedule import Schedule
from schedules.playing.outputs import inputs_of, output_of
from schedules.testing.strategies import graphs

DrawnUnit: TypeAlias = tuple[int, int, int | None]
"""A stage, a microbatch, and a slice."""


@st.composite
def orders(draw: st.DrawFn, ranks: int = 4, stages: int = 6, microbatches: int = 4) -> tuple[Schedule, Graph]:
    """Draw any correct schedule of at most these sizes, and the graph it is correct for.

    Draw a placement with up to three routes and a graph, then repeatedly any action whose inputs are there. Full and
    split backwards are mixed, and forwards with and without recomputation, or moved off the device and back; there may
    be slices, fused neighbors, and weight updates, also of replicas and of stages that share parameters. Shrinks toward
    one microbatch at a time.
    """
    S, M, slices = draw(st.integers(1, stages)), draw(st.integers(1, microbatches)), draw(st.sampled_from([1, 1, 1, 2]))
    routes = draw(st.integers(1, min(3, M)))
    homes = [draw(st.lists(st.integers(0, ranks - 1), min_size=S, max_size=S)) for _ in range(routes)]
    homes = homes if len({rank for route in homes for rank in route}) > 2 else homes[:2]  # as many as a table holds
    used = sorted({rank for route in homes for rank in route})
    first, *mirrors = (tuple(used.index(rank) for rank in route) for route in homes)
    placement = Placement(len(used), first, tuple(mirrors))
    graph = draw(graphs(S))
    rows: list[list[Action]] = [[] for _ in used]
    for action in _any_order(draw, graph, M, slices):
        rows[placement.home(action.stage, action.microbatch)].append(action)
    _add_replica_sums(placement, M, rows)
    if draw(st.booleans()):
        _add_updates(draw, slices, rows, _stages_with_copies(placement, graph))
        _add_updates_of_copies(draw, placement, graph, M, rows)
    return _fuse_some(draw, rows, graph), graph


def _any_order(draw: st.DrawFn, graph: Graph, microbatches: int, slices: int) -> Iterator[Action]:
    """Yield all compute actions of all units in some order in which their inputs are there."""
    parts = [None] if slices == 1 else [*range(slices)]
    each = [(s, i, part) for i in range(microbatches) for part in parts for s in range(graph.stages)]
    split, recomputed, moved = (draw(st.sets(st.sampled_from(each))) for _ in "abc")
    waiting = [
        Action(kind, *unit[:2], None, unit[2])
        for unit in each
        for kind in (
            *("CR" if unit in recomputed else "F"),
            *(("OFFLOAD", "RELOAD") if unit in moved else ()),
            *("IW" if unit in split else "B"),
        )
    ]
    made = set[tuple[object, ...]]()
    while waiting:
        ready = [a for a in waiting if made.issuperset(_list_inputs(a, graph, slices, recomputed, moved))]
        action = ready[draw(st.integers(0, len(ready) - 1))]
        waiting.remove(action)
        made.add((*output_of(action), action.slice))
        yield action


def _list_inputs(
    action: Action, graph: Graph, slices: int, recomputed: set[DrawnUnit], moved: set[DrawnUnit]
) -> Iterator[tuple[object, ...]]:
    """Yield what an action needs, by slice: going forward, also the previous slice; going backward, the next one."""
    kind, s, i, _, part = action
    for token in inputs_of(action, graph):
        yield (*token, part)
    if kind not in ("R", "RELOAD") and KINDS[kind].before == "forward" and (s, i, part) in recomputed:
        yield "R", s, i, part
    if KINDS[kind].crosses == "B" and (s, i, part) in moved:
        yield "RELOAD", s, i, part
    if part is not None and (crosses := KINDS[kind].crosses):
        neighbor = part - 1 if crosses == "F" else part + 1
        if 0 <= neighbor < slices:
            yield crosses, s, i, neighbor


def _add_replica_sums(placement: Placement, microbatches: int, rows: list[list[Action]]) -> None:
    """End each replica of a stage with the sum of their gradients."""
    for s in range(placement.stages):
        replicas = placement.replicas(s)
        for rank in replicas if len(replicas) > 1 else ():
            rows[rank].append(Action("G", s, placement.last(s, rank, microbatches)))


def _stages_with_copies(placement: Placement, graph: Graph) -> set[int]:
    """Return the stages that share weights with another rank or another stage."""
    tied = {s for edge in graph.gradients for s in edge}
    return tied | {s for s in range(placement.stages) if len(placement.replicas(s)) > 1}


def _add_updates_of_copies(
    draw: st.DrawFn, placement: Placement, graph: Graph, microbatches: int, rows: list[list[Action]]
) -> None:
    """Add one update of every stage with copies, at the end or somewhere after the rank's last gradient."""
    updates = list[tuple[int, Action]]()
    for s in sorted(_stages_with_copies(placement, graph)):
        for rank in placement.replicas(s):
            last = max(i for i in range(microbatches) if placement.home(s, i) == rank)
            updates.append((rank, Action("U", s, last)))
            rows[rank].append(updates[-1][1])
    for rank, update in updates:
        row, at = rows[rank], rows[rank].index(update)
        done = max(at for at, a in enumerate(row) if a.stage == update.stage and (KINDS[a.kind].after or a.kind == "G"))
        row.insert(draw(st.integers(done + 1, at)), row.pop(at))
        try:
            check(_as_schedule(rows), graph)
        except ScheduleError:  # the update would wait for a gradient that comes later
            row.remove(update)
            row.append(update)


def _add_updates(draw: st.DrawFn, slices: int, rows: list[list[Action]], apart: set[int]) -> None:
    """Add updates of every stage not in `apart`, after the last microbatch and after some that complete a prefix."""
    for row in rows:
        for s in {action.stage for action in row} - apart:
            row[:] = _update_stage(draw, slices, row, s)


def _update_stage(draw: st.DrawFn, slices: int, row: list[Action], s: int) -> list[Action]:
    """Return the row with updates of stage `s`, never between the slices of a microbatch."""
    total = sum(action.stage == s and KINDS[action.kind].after == "done" for action in row)
    done, applied, forwards = set[tuple[int, int | None]](), -1, Counter[int]()
    updated = list[Action]()
    for action in row:
        updated.append(action)
        forwards[action.microbatch] += action.stage == s and KINDS[action.kind].crosses == "F"
        if action.stage != s or KINDS[action.kind].after != "done":
            continue
        done.add((action.microbatch, action.slice))
        full = next(i for i in count() if sum(j == i for j, _ in done) < slices) - 1
        is_between_slices = any(0 < some < slices for some in forwards.values())
        if full > applied and not is_between_slices and (len(done) == total or draw(st.booleans())):
            updated.append(Action("U", s, full))
            applied = full
    return updated


def _fuse_some(draw: st.DrawFn, rows: list[list[Action]], graph: Graph) -> Schedule:
    """Return the schedule of these rows, with some neighbors fused if it stays correct."""
    for row in rows:
        for at, (first, second) in enumerate(pairwise(row)):
            if first.kind == "F" and second.kind in "BI" and draw(st.booleans()):
                row[at] = first._replace(kind="OVERLAP_F")
                try:
                    check(_as_schedule(rows), graph)
                except ScheduleError:
                    row[at] = first
    return _as_schedule(rows)


def _as_schedule(rows: list[list[Action]]) -> Schedule:
    return table(rows=tuple(",".join(map(str, row)) for row in rows))
