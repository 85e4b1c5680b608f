# SPDX-License-Identifier: Apache-2.0
"""The commands: functions of the options that print and return the exit code."""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from itertools import islice

from schedules import drawing
from schedules.analysis.critical_path import CriticalPath, critical_path
from schedules.analysis.simulation import simulate, spans
from schedules.checking.rules import check
from schedules.commands.options import costs_of, fit, require_effect, sizes_of, subject_of
from schedules.commands.output_files import write_files
from schedules.commands.subjects import Subject, built_in, parameters, transforms
from schedules.commands.terminal import choose_paint, format_table, is_terminal, terminal_width, wrap_paragraphs
from schedules.errors import ScheduleError
from schedules.files.csv import Listing
from schedules.language.schedule import Factory, Schedule
from schedules.playing.costs import Costs
from schedules.playing.engine import Span

PAGE, SHARES, LONG = 120, 6, 100


def print_names(options: argparse.Namespace) -> int:
    """Print the names of all schedules and transforms, with their parameters."""
    print("schedules (each takes ranks and microbatches)")
    _print_factories(built_in())
    print("\ntransforms (write them after a schedule)")
    _print_factories(transforms())
    return 0


def _print_factories(factories: Mapping[str, Factory[...]]) -> None:
    takes = {name: " ".join([name, *_own_parameters(factory)]) for name, factory in factories.items()}
    texts = {name: (inspect.getdoc(factory) or "").partition("\n")[0] for name, factory in factories.items()}
    wide, width = max(map(len, takes.values())), terminal_width(sys.maxsize)
    if any(2 + wide + 2 + len(text) > width for text in texts.values()):
        for name, text in texts.items():
            print(wrap_paragraphs(takes[name], width, "  "))
            print(wrap_paragraphs(text, width, " " * 6))
        return
    for name, text in texts.items():
        print(f"  {takes[name]:{wide}}  {text}")


def _own_parameters(factory: Factory[...]) -> Iterator[str]:
    for name, one in parameters(factory).items():
        if name not in ("ranks", "microbatches"):
            shown = one.default if isinstance(one.default, int | float | str) else "..."
            yield name if one.default is one.empty else f"{name}={shown}"


def draw_timeline(options: argparse.Namespace) -> int:
    """Draw the timeline."""
    one = subject_of(options)
    schedule = one.make()
    costs = fit(costs_of(options), schedule)
    require_effect(options, [schedule])
    timelines = {one.title: lambda: spans(schedule, costs)}
    if write_files(options, timelines, schedule.graph, schedule, fit(sizes_of(options), schedule)):
        return 0
    print(drawing.text(schedule, costs, paint=choose_paint()))
    if is_terminal():
        kinds = {action.kind for rank in range(schedule.ranks) for action in schedule.actions(rank)}
        print(f"\n{drawing.legend(kinds, choose_paint())}")
    return 0


def report_check(options: argparse.Namespace) -> int:
    """Report whether the schedule is correct. If it is not, draw what leads to the violation."""
    one = subject_of(options)
    schedule = one.make()
    try:
        check(one.program or schedule, device=options.device)
    except ScheduleError as violation:
        print(_draw_around(violation, schedule, one) + str(violation))
        return 1
    actions = sum(1 for rank in range(schedule.ranks) for _ in schedule.actions(rank))
    print(
        f"ok: {schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} microbatches, {actions} actions"
    )
    return 0


def _draw_around(violation: ScheduleError, schedule: Schedule, one: Subject) -> str:
    """Return the picture of the time around the violation."""
    met = _locate_in_schedule(one.program, violation) if one.program else violation
    picture = drawing.text(schedule, Costs(), None, terminal_width(PAGE), choose_paint(), met).removesuffix(str(met))
    blocks = picture.split("\n\n")
    at = next(number for number, block in enumerate(blocks) if "!" in block)
    return "\n\n".join(blocks[max(0, at - 1) : at + 2]).rstrip("\n") + "\n"


def _locate_in_schedule(program: Listing, error: ScheduleError) -> ScheduleError:
    """Return a program's error with its position among the compute actions alone."""
    before = islice(program.actions(error.rank), error.position)
    position = sum(1 for action in before if action.peer is None)
    return ScheduleError(error.rule, error.rank, position, error.action, error.problem, error.repair)


def report_simulation(options: argparse.Namespace) -> int:
    """Report how long a step takes, what each rank does and holds, and what to shorten first."""
    one = subject_of(options)
    schedule = one.make()
    costs, sizes = fit(costs_of(options), schedule), fit(sizes_of(options), schedule)
    require_effect(options, [schedule])
    timeline = simulate(schedule, costs, sizes=sizes)
    print(f"makespan  {timeline.makespan:g}")
    print(f"span      {timeline.span:g}, the longest of one rank")
    print(f"bubble    {timeline.bubble:.4f} of all ranks, {timeline.bubble_of_busiest:.4f} of the busiest\n")
    ranks = zip(range(schedule.ranks), timeline.busy, timeline.idle, timeline.peak_memory, strict=True)
    print(format_table([["rank", "busy", "idle", "peak memory"], *([f"{cell:g}" for cell in row] for row in ranks)]))
    path = () if options.brief else _print_path(critical_path(schedule, costs), timeline.makespan)
    timelines = {one.title: lambda: spans(schedule, costs)}
    write_files(options, timelines, schedule.graph, schedule, sizes, memory=True, marked={"critical path": path})
    return 0


def _print_path(path: CriticalPath, makespan: float) -> tuple[Span, ...]:
    """Print what takes most of the critical path, and its actions; return their spans."""
    rows = [
        [one.what, f"{one.time:g}", _format_percent(one.time, makespan), f"{one.passes}"]
        for one in path.shares[:SHARES]
    ]
    print("\n" + format_table([["shorten first", "time", "", "passes"], *rows]))
    print(f"\n{_summarize_kinds(path, makespan)}")
    found = tuple(stretch.span for stretch in path.stretches)
    actions = [str(span.action) for span in found]
    if len(actions) > LONG:
        actions[LONG // 2 : -LONG // 2] = [f"({len(actions) - LONG} more)"]
    print(textwrap.fill(f"critical path: {' '.join(actions)}", terminal_width(PAGE)))
    return found


def _summarize_kinds(path: CriticalPath, makespan: float) -> str:
    times: dict[str, float] = {}
    for share in path.shares:
        kind = share.what.partition(" ")[0]
        times[kind] = times.get(kind, 0) + share.time
    return "in all: " + ", ".join(
        f"{kind} {time:g} ({_format_percent(time, makespan)})" for kind, time in times.items()
    )


def _format_percent(time: float, whole: float) -> str:
    return f"{100 * time / whole:.0f}%" if whole else ""
