# SPDX-License-Identifier: Apache-2.0
"""Estimate costs from measured timelines, so that what was measured can be simulated and compared.

Problem. A simulation is only as good as its costs, and the best way to know an action's cost is to run it.

Idea. The time of an action is the median over microbatches and steps, so a few disturbed ones do not count. The time of
a transfer is visible only if its receiver was already waiting when the value was made: it lasted from then to the end
of the wait. Otherwise it was hidden by compute, which gives only an upper bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from schedules.arguments import require_types
from schedules.errors import TimelineError
from schedules.language.actions import BESIDE, KINDS
from schedules.language.schedule import Schedule
from schedules.playing.costs import Costs
from schedules.playing.engine import Span
from schedules.playing.timelines import read_spans

Times: TypeAlias = Mapping[str, float]
"""The times of one stage, by kind."""


def estimate(schedule: Schedule, *timelines: Iterable[Span]) -> Costs:
    """Return the costs seen in one or more measured timelines of `schedule`, each of all ranks on one clock.

    For each kind and stage, that is the median for a whole microbatch; for transfers between ranks, the median too, or
    0 if no rank was waiting for one before it was sent. If only the halves were measured, `B` is their sum; if only `B`
    was, each half is half of it. A kind measured on no stage costs the default in `Costs`.

    Raise `TimelineError` for a stage without a forward, or without a backward if the schedule has backwards.

    >>> from schedules import B, F, gpipe, parse
    >>> times = {F(0, 0): (0, 1), F(1, 0): (3, 5), B(1, 0): (5, 9), B(0, 0): (10, 12)}
    >>> measured = [Span(action.stage, action, *ends) for action, ends in times.items()]
    >>> waited = [Span(1, parse("1RECV_F0<0"), 0, 3), Span(0, parse("0RECV_B0<1"), 1, 10)]
    >>> costs = estimate(gpipe(ranks=2, microbatches=1), [*measured, *waited])
    >>> costs.F, costs.B, costs.comm
    ((1, 2), (2, 4), 1.5)
    """
    require_types(estimate, locals())
    from statistics import median  # rarely needed, and slow to import

    found, transfers = defaultdict[tuple[str, int], list[float]](list), list[float]()
    for timeline in map(list, map(read_spans, timelines)):
        transfers += _measure_transfers(timeline)
        for _, action, start, end in (span for span in timeline if not span.waits):
            share = schedule.slices if KINDS[action.kind].after else 1
            found[action.kind, action.stage].append((end - start) * share)
    medians = {key: median(times) for key, times in found.items()}
    stages = [{kind: time for (kind, s), time in medians.items() if s == stage} for stage in range(schedule.stages)]
    whole = [_complete_times(stage, times, schedule.backward) for stage, times in enumerate(stages)]
    costs: dict[str, Any] = {
        kind: tuple(times.get(kind, times["F"] if KINDS[kind].after and kind not in BESIDE else 0.0) for times in whole)
        for kind in sorted(set[str]().union(*whole) - {"RESHARD"})
    }
    return Costs(comm=median(transfers) if transfers else 0.0, **costs)


def _complete_times(stage: int, times: Times, backward: bool) -> Times:
    """Return the times of one stage, with those of `F`, `B`, `I` and `W` derived from others if missing."""
    forward = next((times[kind] for kind in ("F", "C", "OVERLAP_F", "R") if kind in times), None)
    halves = times["I"] + times["W"] if {"I", "W"} <= times.keys() else None
    whole = times.get("B", halves)
    if forward is None or (whole is None and backward):
        raise TimelineError(
            f"stage {stage}: got spans of {sorted(times) or 'nothing'}, expected a "
            f"forward{' and a backward' if backward else ''} of every stage. Pass one timeline of all ranks, as "
            "returned by fpipe.timeline."
        )
    if whole is None:
        return {"F": forward, **times}
    return {"F": forward, "B": whole, "I": whole / 2, "W": whole / 2, **times}


def _measure_transfers(timeline: Iterable[Span]) -> Iterator[float]:
    """Yield the times of transfers whose receiver was waiting before they were sent; a fused pair sends at its end."""
    made, waits = defaultdict[tuple[str, int, int, int | None], list[float]](list), list[Span]()
    for span in timeline:
        kind, stage, i, _, part = span.action
        if KINDS[kind].does == "RECV":
            waits.append(span)
        elif KINDS[kind].crosses and kind != "OVERLAP_F":
            made[KINDS[kind].crosses, stage, i, part].append(span.end)
    for _, (kind, _, i, source, part), start, end in waits:
        assert source is not None, "a transfer has a peer stage"
        sent = max(
            (time for time in made.get((KINDS[kind].carries, source, i, part), ()) if time <= end), default=start
        )
        if sent > start:
            yield end - sent
