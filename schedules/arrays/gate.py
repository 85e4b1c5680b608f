# SPDX-License-Identifier: Apache-2.0
"""Where arrays replace the loops over actions: in large schedules, if NumPy is installed.

Arrays only ever say that all is well, or what it takes. Of anything else they say nothing, and the loops decide: they
name what is wrong, and serve schedules that have no codes. So there is one meaning, that of the loops, and nobody needs
NumPy.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from schedules.language.graph import Graph
from schedules.language.schedule import Schedule
from schedules.playing.costs import FREE, UNITS, Costs
from schedules.playing.dependencies import Wires, wires

if TYPE_CHECKING:
    from schedules.arrays.abreast import Totals

LEAST_RANKS: Final = 32
"""With fewer ranks, an operation on all of them does too little."""
LEAST_UNITS: Final = 2**13
MOST_UNITS: Final = 2**22
"""More would take gigabytes, some 60 bytes for each action; the loops keep only what is in flight."""


def is_large(schedule: Schedule) -> bool:
    """Return whether arrays pay for a schedule, and NumPy is there."""
    units = schedule.stages * schedule.microbatches * schedule.slices
    return schedule.ranks >= LEAST_RANKS and LEAST_UNITS <= units <= MOST_UNITS and find_spec("numpy") is not None


def is_surely_correct(schedule: Schedule, graph: Graph) -> bool:
    """Return whether arrays show that a schedule is correct; if not, `check` has to look."""
    return is_large(schedule) and play_large(schedule, wires(schedule, graph, FREE, UNITS), FREE) is not None


def play_large(schedule: Schedule, wires: Wires, costs: Costs) -> Totals | None:
    """Return the totals of a large schedule; `None` if it is not, if it is not plainly correct, or if there is jitter.

    They are those of `replay`, to the last bit.
    """
    if not is_large(schedule) or costs.jitter:
        return None
    from schedules.arrays.abreast import play_abreast
    from schedules.arrays.lives import read_lives

    found = read_lives(schedule)
    return None if found is None else play_abreast(schedule, *found, wires, costs)
