# SPDX-License-Identifier: Apache-2.0
"""Search for a faster order than that of a schedule, and show it."""

from __future__ import annotations

import argparse

from schedules import drawing
from schedules.analysis.simulation import simulate, spans
from schedules.commands.options import costs_of, fit, parse_number, sizes_of, subject_of
from schedules.commands.output_files import write_files
from schedules.commands.terminal import choose_paint
from schedules.errors import SizeError
from schedules.language.schedule import Schedule
from schedules.playing.problem import Problem
from schedules.searching.search import TRIES, SearchProgress, search
from schedules.searching.solver import cp_sat
from schedules.status import say, showing


def add_search(parser: argparse.ArgumentParser) -> None:
    """Add the options for `report_search`."""
    limits = parser.add_argument_group("search")
    memory = "the memory limit of a rank, in the units of `peak memory`; default: the peak of the schedule"
    limits.add_argument("--memory", type=parse_number, metavar="X", help=memory)
    limits.add_argument("--whole", action="store_true", help="do not split backwards")
    limits.add_argument("--seconds", type=parse_number, default=60.0, metavar="X", help="default 60")
    limits.add_argument("--tries", type=int, default=TRIES, metavar="N", help=f"default {TRIES}")
    limits.add_argument("--solver", action="store_true", help="improve and prove the result with OR-Tools")


def report_search(options: argparse.Namespace) -> int:
    """Search for the fastest order of the stages that a schedule places, in the memory that it holds, and draw it.

    Ctrl-C ends the search with the best so far.
    """
    schedule = subject_of(options).make()
    _require_comparable(schedule)
    costs, sizes = fit(costs_of(options), schedule), fit(sizes_of(options), schedule)
    timeline = simulate(schedule, costs, sizes=sizes)
    with showing("search"):
        memory = timeline.peak_memory if options.memory is None else options.memory
        what = costs, schedule.placement, schedule.microbatches, memory, sizes, schedule.graph
        found = search(
            Problem(*what, split=not options.whole, backward=schedule.backward),
            seconds=options.seconds,
            tries=options.tries,
            seed=options.seed,
            solver=cp_sat if options.solver else None,
            progress=_say_progress,
        )
    print(found)
    print(f"{schedule!r} takes {timeline.makespan:g}\n")
    timelines = {str(found.origin): lambda: spans(found.schedule, costs)}
    if not write_files(options, timelines, found.schedule.graph, found.schedule, sizes):
        print(drawing.text(found.schedule, costs, paint=choose_paint()))
    return 0


def _require_comparable(schedule: Schedule) -> None:
    """Raise `SizeError` for a schedule with slices or recomputation: what is found could not be compared with it."""
    kinds = {action.kind for rank in range(schedule.ranks) for action in schedule.actions(rank)}
    if schedule.slices > 1 or "R" in kinds:
        expected = "one without slices and recomputation, which the search and its bound do not support"
        raise SizeError.of("search", "NAME", schedule, expected, "Leave them out, and pass the memory: --memory X.")


def _say_progress(progress: SearchProgress) -> None:
    say(f"best {progress.best:g}, no less than {progress.bound:g}", progress.share)
