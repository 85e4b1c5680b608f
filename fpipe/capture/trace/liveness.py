# SPDX-License-Identifier: Apache-2.0
"""Liveness: which torch calls of a run matter to its results.

A module created in a forward is initialized there: numbers are drawn, and may be overwritten at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from fpipe.capture.trace.history import History
from fpipe.ir.captured import Unit, Value


def live_units(history: History, returned: Iterable[Value]) -> list[Unit]:
    """Return the units that lead to `returned` values, or change the memory of these or of the run's sources.

    A unit that neither makes nor changes anything, such as a check, may raise, and so counts as live.
    """
    storage, values = history.values.storage, set(returned)
    memory = {storage[value] for value in (*values, *history.values.sources)}
    found: list[Unit] = []
    for unit in reversed(history.units):
        written = history.facts[unit].written
        if (unit.makes or written) and values.isdisjoint(unit.makes) and memory.isdisjoint(written):
            continue
        found.append(unit)
        values.update(unit.reads)
        memory.update(storage[value] for value in (*unit.reads, *unit.makes))
    return found[::-1]
