# SPDX-License-Identifier: Apache-2.0
"""Audit a schedule that others run: is it right, how far is it from the bound, and which of ours would be faster.

The schedule is a table of `torch.distributed.pipelining`, or anything else that the other commands take; or a layout of
Megatron-LM, with its schedule.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

from schedules.analysis.simulation import simulate
from schedules.certification import certify
from schedules.checking.rules import check
from schedules.commands.options import costs_of, fit, sizes_of, subject_of
from schedules.commands.subjects import Subject, built_in
from schedules.commands.terminal import format_table, terminal_width
from schedules.errors import PipelineError, ScheduleError, UsageError
from schedules.files.megatron import layout_schedule, read_layout
from schedules.language.schedule import Schedule
from schedules.lowering.program import Program, lower
from schedules.playing.costs import ROUNDING, UNITS, Costs

MOST_SHOWN = 8


def add_audit(parser: argparse.ArgumentParser) -> None:
    """Add the options of `audit`."""
    parser.add_argument("--layout", metavar="TEXT", help='a layout of Megatron-LM, such as "Et*3|(tt|)*2,m|L"')
    parser.add_argument("--embedding", type=float, default=0.0, metavar="X", help="the time of E, in layers")
    parser.add_argument("--loss", type=float, default=0.0, metavar="X", help="the time of L, in layers")
    parser.add_argument("--save", metavar="FILE", help="write the certificate")


def report_audit(options: argparse.Namespace) -> int:
    """Say what is wrong with a schedule; if nothing is, what holds of it, and what would be faster in its memory.

    What holds is a certificate, which schedules/certificate.py checks on its own. If a certificate does not cover its
    kinds of actions, the schedule is checked and timed only.
    """
    one, costs = _read(options)
    schedule = one.make()
    costs = fit(costs, schedule)
    try:
        check(one.program or schedule)
    except ScheduleError as violation:
        print(f"wrong: {violation}")
        return 1
    program = one.program if isinstance(one.program, Program) else lower(schedule, schedule.graph)
    print(f"right: {_describe_device(one, schedule)}\n")
    try:
        found = certify(program, costs, sizes_of(options) or UNITS)
        print(found)
        if options.save:
            found.save(options.save)
    except PipelineError as error:
        print(f"no certificate: {error}")
    rows = [*_find_faster(schedule, costs)][:MOST_SHOWN]
    if rows:
        head = ["faster in the same memory", "makespan", "", "bubble", "peak memory"]
        print("\n" + format_table([head, *rows], terminal_width(sys.maxsize)))
    else:
        print("\nnothing built in is faster in the same memory")
    return 0


def _read(options: argparse.Namespace) -> tuple[Subject, Costs]:
    """Return the schedule, and the costs of its stages."""
    costs = costs_of(options)
    if options.layout is None:
        if not options.words:
            raise UsageError("got no schedule, expected a name, a table or --layout. Name one.")
        return subject_of(options), costs
    if options.words:
        raise UsageError(f"got {options.words[0]} besides --layout, expected one of them. Drop one.")
    stages = read_layout(options.layout)
    ranks, microbatches = options.ranks or len(stages), options.microbatches or 8
    schedule = layout_schedule(options.layout, ranks, microbatches)
    own = {"E": options.embedding, "L": options.loss}
    layers = [sum(own.get(layer, 1.0) for layer in stage) for stage in stages]
    plain: dict[str, Any] = {kind: tuple(costs.time(kind, 0) * layer for layer in layers) for kind in "FBIW"}
    print(f"{len(stages)} stages: {' | '.join(stages)}")
    return Subject(repr(schedule), lambda: schedule), replace(costs, **plain)


def _describe_device(one: Subject, schedule: Schedule) -> str:
    try:
        check(one.program or lower(schedule, schedule.graph), device=True)
    except ScheduleError as violation:
        return f"correct, but it may hang on an accelerator: {violation}"
    return "correct, and it can't hang on an accelerator"


def _find_faster(schedule: Schedule, costs: Costs) -> Iterator[list[str]]:
    """Yield a row for each built-in schedule of as many stages that takes less time and no more memory."""
    theirs = simulate(schedule, costs, schedule.graph)
    limit = max(theirs.peak_memory) * (1 + ROUNDING)
    found = []
    for ours in _list_ours(schedule):
        try:
            timeline = simulate(ours, costs)
        except PipelineError:
            continue
        if timeline.makespan < theirs.makespan * (1 - ROUNDING) and max(timeline.peak_memory) <= limit:
            found.append((timeline.makespan, repr(ours), timeline))
    for makespan, name, timeline in sorted(found, key=lambda row: row[:2]):
        change = f"{100 * (makespan / theirs.makespan - 1):+.1f}%"
        yield [name, f"{makespan:g}", change, f"{timeline.bubble:.4f}", f"{max(timeline.peak_memory):g}"]


def _list_ours(schedule: Schedule) -> Iterator[Schedule]:
    """Yield the built-in schedules of as many ranks, microbatches and stages, each stage once, that don't lag."""
    chunks = schedule.stages // schedule.ranks
    for factory in built_in().values():
        more = {"chunks": chunks} if "chunks" in factory.signature.parameters else {}
        try:
            ours = factory(ranks=schedule.ranks, microbatches=schedule.microbatches, **more)
            check(ours)
        except (PipelineError, TypeError):
            continue
        alike = ours.stages == schedule.stages and ours.backward == schedule.backward and ours.slices == 1
        if alike and len(ours.placement.routes) == 1 and ours.versions(0) == inf:
            yield ours
