# SPDX-License-Identifier: Apache-2.0
"""Strategies for schedules and programs that are almost correct.

A checker is only as good as what it rejects. `mutants` drops, duplicates, swaps and moves actions, changes their stage,
microbatch, slice, kind or peer, and inserts collectives, sums and updates; `mutant_programs` edits transfers, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from schedules.arguments import require_types
from schedules.checking.channels import LoweredProgram
from schedules.errors import ArgumentError, quote
from schedules.language.actions import KINDS, Action
from schedules.language.graph import Graph
from schedules.language.schedule import Schedule
from schedules.playing.rows import edit

CHANGES = ("stage", "microbatch", "slice", "kind", "peer")
EDITS = ("drop", "duplicate", "swap", "neighbors", "move", "away", "insert", *CHANGES)
ONCE = tuple(kind for kind, word in KINDS.items() if not word.does and not word.after)  # for many microbatches
COMPUTE = tuple(kind for kind, word in KINDS.items() if not word.does)
TRANSFERS = tuple(kind for kind, word in KINDS.items() if word.does)


@dataclass(frozen=True)
class EditedProgram:
    """An edited program, and the schedule of its compute actions."""

    schedule: Schedule
    graph: Graph
    rows: tuple[tuple[Action, ...], ...]

    def actions(self, rank: int) -> Iterator[Action]:
        """Return an iterator over one rank's compute actions and transfers."""
        return iter(self.rows[rank])


def mutants(plan: Schedule, edits: Sequence[str] = EDITS) -> st.SearchStrategy[Schedule]:
    """Return a strategy for the schedule after one or two of these edits; it may still be correct."""
    require_types(mutants, locals())
    if not edits or not all(one in EDITS for one in edits):
        raise ArgumentError(f"mutants: got edits={quote(edits)}, expected some of {EDITS}. Pass these names.")
    return _mutants(plan, edits)


@st.composite
def _mutants(draw: st.DrawFn, plan: Schedule, edits: Sequence[str]) -> Schedule:
    return edit(plan, draw(_edits(_list_actions(plan), plan, edits)))


@st.composite
def mutant_programs(draw: st.DrawFn, program: LoweredProgram) -> EditedProgram:
    """Draw the program after one or two edits; it may still be correct."""
    rows = draw(_edits(_list_actions(program), program.schedule, EDITS))
    computed = [[action for action in row if action.peer is None] for row in rows]
    return EditedProgram(edit(program.schedule, computed), program.graph, tuple(map(tuple, rows)))


def _list_actions(plan: Schedule | LoweredProgram) -> list[list[Action]]:
    ranks = plan.ranks if isinstance(plan, Schedule) else plan.schedule.ranks
    return [list(plan.actions(rank)) for rank in range(ranks)]


@st.composite
def _edits(draw: st.DrawFn, rows: list[list[Action]], schedule: Schedule, edits: Sequence[str]) -> list[list[Action]]:
    for _ in range(draw(st.integers(1, 2))):
        _edit(draw, rows, schedule, draw(st.sampled_from(edits)))
    return rows


def _edit(draw: st.DrawFn, rows: list[list[Action]], schedule: Schedule, what: str) -> None:
    row = draw(st.sampled_from([row for row in rows if row] or [[Action("F", 0, 0)]]))
    at, to = draw(_positions(row)), draw(st.integers(0, len(row) - 1))
    if what == "drop":
        del row[at]
    elif what == "duplicate":
        row.insert(to, row[at])
    elif what == "swap":
        row[at], row[to] = row[to], row[at]
    elif what == "neighbors":
        row[at - 1], row[at] = row[at], row[at - 1]
    elif what == "move":
        row.insert(to, row.pop(at))
    elif what == "away":
        other = draw(st.sampled_from(rows))
        other.insert(draw(st.integers(0, len(other))), row.pop(at))
    elif what == "insert":
        kind = row[at].kind if row[at].kind in ONCE else draw(st.sampled_from(ONCE))
        inserted = Action(kind, row[at].stage, draw(st.integers(0, schedule.microbatches - 1)))
        row.insert(draw(st.integers(at, at + 1) | st.integers(0, len(row))), inserted)
    else:
        changed: dict[str, Any] = {what: draw(_possible_values(what, row[at], schedule))}
        row[at] = row[at]._replace(**changed)


def _positions(row: list[Action]) -> st.SearchStrategy[int]:
    """Return a strategy for positions in which actions that run once for many microbatches are not rare."""
    rare = [at for at, action in enumerate(row) if action.peer is None and not KINDS[action.kind].after]
    every = st.integers(0, len(row) - 1)
    return every | st.sampled_from(rare) if rare else every


def _possible_values(field: str, action: Action, schedule: Schedule) -> st.SearchStrategy[str | int | None]:
    """Return the values a field may be changed to, including one out of range."""
    if field == "kind":
        return st.sampled_from(COMPUTE if action.peer is None else TRANSFERS)
    if field == "slice":
        return st.none() | st.integers(0, schedule.slices)
    if field == "peer" and action.peer is None:
        return st.none()
    return st.integers(0, schedule.microbatches if field == "microbatch" else schedule.stages)
