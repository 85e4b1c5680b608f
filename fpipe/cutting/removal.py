# SPDX-License-Identifier: Apache-2.0
"""Find the units that need not run in the stage where they belong, because stages repeat them before their forwards.

Invariant values that other stages make themselves are made once in a step there, too. Other units are removed only if
nothing in their stage reads what they make. A unit stays if others stay that write the same memory, or that are in the
same whole call, and if hooks run in that call.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from fpipe.cutting.purity import Purity
from fpipe.record.captured import Call, Value


def find_absent(purity: Purity, repeated: Collection[Value], leaving: Iterable[Value]) -> frozenset[int]:
    """Return the units to remove from their stages, if other stages make the values `repeated` themselves.

    The values `leaving` must still be made.
    """
    captured = purity.captured
    whole = [*_whole_calls(captured.calls, purity)]
    groups = [*purity.written_groups, *({*range(call.start, call.stop)} for call in whole)]
    hooked = {k for call in whole if call.has_hooks for k in range(call.start, call.stop)}
    kept = {*leaving, *purity.results, *captured.reassigned.values()}
    early = {v for v in repeated if purity.makers[v] in purity.invariant and _is_local(purity, v)}
    absent = {k for k in purity.history(repeated) if kept.isdisjoint(captured.units[k].makes)} - hooked
    while True:
        before = len(absent)
        absent -= _makers_of_reads(purity, absent, early)
        for group in groups:
            absent -= group if not group <= absent else set()
        if len(absent) == before:
            return frozenset(absent)


def _makers_of_reads(purity: Purity, absent: Collection[int], early: Collection[Value]) -> set[int]:
    """Return those of the `absent` units that make values which others in the stage read, except the `early` ones."""
    makers, found = purity.makers, set[int]()
    for k, unit in enumerate(purity.captured.units):
        if k not in absent:
            made = [makers[v] for v in unit.reads if v not in early and makers.get(v) in absent]
            found.update(maker for maker in made if purity.stage_of(maker) == purity.stage_of(k))
    return found


def _is_local(purity: Purity, value: Value) -> bool:
    """Return whether everything that a value was computed from is made in the stage that makes it."""
    first, last = purity.history((value,))[0], purity.makers[value]
    return purity.stage_of(first) == purity.stage_of(last)


def _whole_calls(calls: Iterable[Call], purity: Purity) -> Iterator[Call]:
    """Yield the outermost calls that run as a whole: those inside one stage."""
    last = 0
    for call in calls:
        inside = purity.stage_of(call.start) == purity.stage_of(call.stop - 1)
        if inside and call.whole and last <= call.start < call.stop:
            last = call.stop
            yield call
