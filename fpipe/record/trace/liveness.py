# SPDX-License-Identifier: Apache-2.0
"""Liveness: find the torch calls that the results of a run depend on.

Not all are live: a module created in a forward draws its initial weights, which may be overwritten at once.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections.abc import Iterable

from fpipe.record.captured import Unit, Value
from fpipe.record.trace.history import History


def live_units(history: History, returned: Iterable[Value]) -> list[Unit]:
    """Return, in order, the units on which `returned` values, or the memory of the run's sources, depend.

    A unit that neither makes nor changes anything, such as a check, counts as live because it may raise.
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
