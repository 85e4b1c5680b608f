# SPDX-License-Identifier: Apache-2.0
"""Compare schedules side by side.

At equal ranks and microbatches, every schedule does the same work: the times are those of a rank's share of the model,
so a schedule with `S` stages on `P` ranks gets `P/S` of them per stage. With a memory limit, only the named schedules
that fit in it are compared; `k=1..4` names four. Columns:

- `makespan`, `bubble`, `idle`: as in `Timeline`, idle time averaged over the ranks.
- `peak memory`: of the rank that holds most.
- `weights`: how many copies of its share of the model a rank holds: two in a bidirectional schedule, and one for each
  version that an asynchronous one keeps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from math import isfinite
from statistics import mean
from typing import NamedTuple, TypeVar

from schedules.analysis.simulation import Timeline, simulate, spans
from schedules.checking.rules import check
from schedules.commands.options import costs_of, require_effect, sizes_of, subjects_of
from schedules.commands.output_files import write_files
from schedules.commands.subjects import Subject
from schedules.commands.terminal import format_table, terminal_width
from schedules.errors import GraphError, ScheduleError, SizeError, UsageError
from schedules.language.schedule import Schedule
from schedules.playing.costs import ROUNDING, Costs, Sizes

Amounts = TypeVar("Amounts", Costs, Sizes)
NO_WORK = ("comm", "jitter", "seed", "microbatches", "slices")
HEAD = ["", "stages", "makespan", "", "bubble", "idle", "peak memory", "", "weights"]


class Entry(NamedTuple):
    """A schedule to compare, with the costs of its stages and its simulated totals."""

    schedule: Schedule
    costs: Costs
    timeline: Timeline


def report_comparison(options: argparse.Namespace) -> int:
    """Print a line for each schedule, relative to the first, and say why others are left out.

    All do the same work: the times and sizes are those of a whole rank, and are divided among its stages.
    """
    costs, sizes = costs_of(options), sizes_of(options)
    found = {subject.title: _examine(subject, costs, sizes, options.memory) for subject in subjects_of(options)}
    entries = {title: entry for title, entry in found.items() if isinstance(entry, Entry)}
    require_effect(options, [entry.schedule for entry in entries.values()])
    if entries:
        first = next(iter(entries.values()))
        _require_equal(entries)
        print(f"{first.schedule.ranks} ranks, {first.schedule.microbatches} microbatches\n")
        rows = [[title, *_format_cells(entry, first)] for title, entry in entries.items()]
        print(format_table([HEAD, *rows], terminal_width(sys.maxsize)))
    left_out = [f"{title} is left out: {reason}" for title, reason in found.items() if isinstance(reason, str)]
    if left_out:
        print("\n" + "\n".join(left_out))
    timelines = {title: partial(spans, one.schedule, one.costs) for title, one in entries.items()}
    write_files(options, timelines, sizes=sizes, memory=True)
    return 0


def _examine(subject: Subject, costs: Costs, sizes: Sizes | None, memory: float) -> Entry | str:
    """Return the schedule with its simulated totals, or the reason to leave it out."""
    try:
        schedule = subject.make()
        check(schedule)
    except (SizeError, GraphError, ScheduleError) as reason:
        return str(reason)
    share = schedule.ranks / schedule.stages
    own, held = scale_costs(costs, share), sizes and scale_costs(sizes, share)
    timeline = simulate(schedule, own, sizes=held)
    peak = max(timeline.peak_memory)
    if peak > memory * (1 + ROUNDING):
        return f"it holds {peak:g} on rank {timeline.peak_memory.index(peak)}, more than {memory:g}."
    return Entry(schedule, own, timeline)


def scale_costs(costs: Amounts, share: float) -> Amounts:
    """Return the costs of a stage that is this share of a rank's part of the model."""
    values = {field.name: getattr(costs, field.name) for field in fields(costs) if field.name not in NO_WORK}
    for name, value in values.items():
        if isinstance(value, tuple):
            raise UsageError(
                f"got {name}={value}, expected one number for a whole rank: the schedules differ in their stages. "
                "Give the sum."
            )
    if isinstance(costs, Costs) and costs.B is None:  # each half takes 1 unless given
        values |= {half: 1 if values[half] is None else values[half] for half in "IW"}
    return replace(costs, **{name: value * share for name, value in values.items() if value is not None})


def _require_equal(entries: Mapping[str, Entry]) -> None:
    """Raise `UsageError` unless all have as many ranks and microbatches as the first."""
    (first, one), *others = entries.items()
    for title, other in others:
        for size in ("ranks", "microbatches"):
            expected, got = getattr(one.schedule, size), getattr(other.schedule, size)
            if got != expected:
                raise UsageError(
                    f"got {title} with {got} {size} and {first} with {expected}, expected the same number. "
                    f"Choose --{size}."
                )


def _format_cells(entry: Entry, first: Entry) -> Iterator[str]:
    schedule, timeline = entry.schedule, entry.timeline
    peak, makespan = max(timeline.peak_memory), timeline.makespan
    yield f"{schedule.stages}"
    yield f"{makespan:g}"
    yield _format_change(makespan, first.timeline.makespan)
    yield f"{timeline.bubble:.4f}"
    yield f"{mean(timeline.idle):g}"
    yield f"{peak:g}"
    yield _format_change(peak, max(first.timeline.peak_memory))
    yield f"{max(_count_weight_copies(schedule, rank) for rank in range(schedule.ranks)):g}"


def _count_weight_copies(schedule: Schedule, rank: int) -> float:
    """Return how many copies of its share of the model the rank holds."""
    versions = schedule.versions(rank)
    held = len(schedule.placement.stages_on(rank)) * schedule.ranks / schedule.stages
    return held * versions if isfinite(versions) else held


def _format_change(value: float, reference: float) -> str:
    return f"{100 * (value / reference - 1):+.0f}%" if reference else ""
