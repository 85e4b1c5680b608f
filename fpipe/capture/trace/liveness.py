# SPDX-License-Identifier: Apache-2.0
"""Liveness: which torch calls of a run matter to its results.

A module created in a forward is initialized there: numbers are drawn, and may be overwritten at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from fpipe.ir.captured import Unit, Value


def live(
    units: Sequence[Unit],
    written: Mapping[Unit, Collection[int]],
    storage: Mapping[Value, int],
    returned: Iterable[Value],
    kept: Iterable[Value],
) -> list[Unit]:
    """Return the units that lead to `returned` values, or change the memory of these or of `kept` values.

    A unit that neither makes nor changes anything, such as a check, may raise, and so counts as live.
    """
    values = set(returned)
    memory = {storage[value] for value in (*values, *kept)}
    found: list[Unit] = []
    for unit in reversed(units):
        silent = unit.makes or written[unit]
        if silent and values.isdisjoint(unit.makes) and memory.isdisjoint(written[unit]):
            continue
        found.append(unit)
        values.update(unit.reads)
        memory.update(storage[value] for value in (*unit.reads, *unit.makes))
    return found[::-1]
