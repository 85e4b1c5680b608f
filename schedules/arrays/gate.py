# SPDX-License-Identifier: Apache-2.0
"""The place where arrays replace the loops over actions: in large schedules, if NumPy is installed.

Arrays only ever say that all is well, or what it takes. Of anything else they say nothing, and the loops decide: they
name what is wrong, and serve schedules that have no codes. So there is one meaning, that of the loops, and nobody needs
NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Final

from schedules.language.actions import Action
from schedules.language.graph import Graph
from schedules.language.schedule import Schedule
from schedules.lowering.program import Program, lower_at_once
from schedules.playing.costs import Costs
from schedules.playing.dependencies import Wires
from schedules.playing.engine import Span

if TYPE_CHECKING:
    from schedules.arrays.abreast import Totals

LEAST_RANKS: Final = 8
"""With fewer ranks, an operation on all of them does too little."""
LEAST_UNITS: Final = 2**13
LEAST_OF_RANK: Final = 2**3
"""With fewer units, an operation on those of a rank does too little."""
FASTER: Final = 8
"""Arrays lower this many times as many actions in the same time, or more."""
MOST_UNITS: Final = 2**21
"""More would take hundreds of megabytes; the loops keep only what is in flight."""


def is_large(schedule: Schedule) -> bool:
    """Return whether arrays pay for a schedule, and NumPy is there."""
    units = schedule.stages * schedule.microbatches * schedule.slices
    least = max(LEAST_UNITS, LEAST_OF_RANK * schedule.ranks)
    if schedule.ranks >= LEAST_RANKS and least <= units <= MOST_UNITS:
        with suppress(ImportError):
            return bool(import_module("numpy"))
    return False


def is_surely_correct(schedule: Schedule, graph: Graph) -> bool:
    """Return whether arrays show that a schedule is correct; if not, `check` has to look."""
    if not is_large(schedule):
        return False
    from schedules.arrays.abreast import can_be_played

    return can_be_played(schedule, graph)


@lower_at_once.register
def _lower_large(program: Program, played: int) -> Callable[[int], Iterator[Action]] | None:
    """Return a function from ranks to their actions, those of the loops, for most large programs."""
    if not is_large(program.schedule) or played * FASTER < program.schedule.ranks:
        return None
    from schedules.arrays.lowered import lower_all

    found = lower_all(program.schedule, program.graph)
    return None if found is None else found.decode


def play_large(schedule: Schedule, wires: Wires, costs: Costs) -> Totals | None:
    """Return the totals of a schedule, those of `replay` to the last bit.

    Return `None` if it is not large, has no codes or breaks a rule, if there is jitter, or without NumPy.
    """
    if not is_large(schedule) or costs.jitter:
        return None
    from schedules.arrays.abreast import play_abreast
    from schedules.arrays.lives import read_lives

    found = read_lives(schedule)
    return None if found is None else play_abreast(schedule, *found, wires, costs)


def trace_large(schedule: Schedule, graph: Graph, costs: Costs) -> list[tuple[Span, float]] | None:
    """Return the spans on the critical path of most large schedules, each with the transfer time it waited for."""
    if not is_large(schedule) or costs.jitter:
        return None
    from schedules.arrays.lives import read_lives
    from schedules.arrays.paths import trace_path

    found = read_lives(schedule)
    return None if found is None else trace_path(schedule, graph, *found, costs)


def list_kinds_large(schedule: Schedule) -> frozenset[str] | None:
    """Return the kinds of a large schedule's actions, if they have codes: whoever checks it next need not read it."""
    if not is_large(schedule):
        return None
    from schedules.arrays.lives import list_kinds

    return list_kinds(schedule)
