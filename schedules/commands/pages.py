# SPDX-License-Identifier: Apache-2.0
"""Write a page to look at: of one schedule, of two that do the same work, or of what was measured over its prediction.

Two schedules are given the times and sizes of a whole rank, as in `schedules.commands.compare`.
"""

from __future__ import annotations

import argparse
from math import inf
from pathlib import Path

from schedules import drawing
from schedules.analysis.estimation import estimate
from schedules.commands.compare import scale_costs
from schedules.commands.options import costs_of, fit, parse_number, require_effect, sizes_of, subject_of, subjects_of
from schedules.errors import UsageError
from schedules.files.whole import open_whole
from schedules.playing.costs import Costs

MICROSECONDS = 1e6


def add_page(parser: argparse.ArgumentParser) -> None:
    """Add the options of `page`."""
    parser.add_argument("--output", default="schedule.html", metavar="FILE", help="default schedule.html")
    parser.add_argument(
        "--memory", type=parse_number, default=inf, metavar="X", help="the memory limit of a rank, drawn as a line"
    )
    measured = "a trace of a step, written with microseconds=1e6; without times, the prediction uses the measured ones"
    parser.add_argument("--measured", metavar="FILE", help=measured)


def report_page(options: argparse.Namespace) -> int:
    """Write a page to look at: zoom, search, why a rank waits, the critical path, and an editor for the order.

    It is one HTML file that needs no network. Two schedules are put side by side, doing the same work.
    """
    panels = _measure(options) if options.measured else _predict(options)
    require_effect(options, [panel.schedule for panel in panels.values()])
    with open_whole(options.output) as file:
        file.write(drawing.page(panels))
    print(f"wrote {options.output}")
    return 0


def _predict(options: argparse.Namespace) -> dict[str, drawing.Panel]:
    """Return a panel for each schedule on the command line."""
    named, costs, sizes = subjects_of(options), costs_of(options), sizes_of(options)
    made = {subject.title: subject.make() for subject in named}
    panels = dict[str, drawing.Panel]()
    for title, schedule in made.items():
        if len(made) > 1:
            share = schedule.ranks / schedule.stages
            own, held = scale_costs(costs, share), sizes and scale_costs(sizes, share)
        else:
            own, held = fit(costs, schedule), fit(sizes, schedule)
        panels[title] = drawing.Panel(schedule, own, schedule.graph, held, options.memory)
    return panels


def _measure(options: argparse.Namespace) -> dict[str, drawing.Panel]:
    """Return the panel of a measured step, and that of its prediction."""
    schedule = subject_of(options).make()
    found = drawing.read_trace(Path(options.measured).read_text("utf-8"), MICROSECONDS)
    recorded = next(iter(found.values()), ())
    if not recorded:
        raise UsageError(f"got {options.measured} without actions, expected a trace of a step. Pass another file.")
    costs = fit(costs_of(options), schedule)
    costs = estimate(schedule, recorded) if costs == Costs() else costs
    what = schedule, costs, schedule.graph, fit(sizes_of(options), schedule), options.memory
    return {"measured": drawing.Panel(*what, recorded, "s"), "predicted": drawing.Panel(*what, (), "s")}
