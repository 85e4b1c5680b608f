# SPDX-License-Identifier: Apache-2.0
"""Write timelines as a page to look at: one HTML file that needs no network, with an editor for the order.

Problem. Printed timelines end where schedules get interesting: with a hundred ranks, nobody can read a picture that
cannot be zoomed, searched, or asked why a rank is idle.

Idea. This module makes one JSON value per timeline: every rank's actions with their times, what passes from action to
action, and the memory that each takes. `page.js` computes the rest: layout, causes and the critical path; `order.js`,
after an edit, the verdict of the checker and the makespan.

Invariant: for an order of the same actions, the page says what `schedules.check` says, and where.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf, isfinite
from pathlib import Path
from typing import Any, Final, TypeAlias

from schedules.analysis.bounds.lower_bound import Bound, bound, rough_bound
from schedules.analysis.simulation import simulate, spans, weight_memory
from schedules.arguments import each, is_number, require_types
from schedules.drawing.palette import LOOKS, MARKED, WAIT, look_of
from schedules.errors import ArgumentError, ScheduleError, SizeError, TimelineError, quote
from schedules.language.actions import KINDS, parse
from schedules.language.graph import Graph, chain
from schedules.language.membership import require_compute_only, require_placed
from schedules.language.schedule import Schedule, completes_gradient, graph_of
from schedules.own_kinds import OwnKind
from schedules.playing.costs import ROUNDING, UNITS, Costs, Sizes
from schedules.playing.dependencies import Dependency, GradientArrival, list_dependencies
from schedules.playing.engine import Span
from schedules.playing.problem import Problem
from schedules.playing.timelines import read_spans
from schedules.transforms.connect import format_graph

Document: TypeAlias = dict[str, Any]
MOST_BOUNDED: Final = 2**14
"""Forwards up to which the fine bound is found; beyond, the rough one, which takes no time."""
DIGITS: Final = 10


@dataclass(frozen=True)
class Panel:
    """One timeline of a page: that of `schedule`, simulated with `costs`, or measured, if it has `recorded` spans.

    - `graph`: the stage graph, by default that of the schedule. `sizes`: the memory of stages; without, activations of
      one rank for one microbatch are counted.
    - `memory`: the most that a rank may hold, one number or one per rank, in the units of `Timeline.peak_memory`.
    - `recorded`: what was measured, as `fpipe.timeline` returns it, each action once.
    - `time`, `size`: the units of times and of sizes, such as `"s"` and `"B"`, for those who read the page.

    Raise `SizeError` for memory that is no number of at least 0, or not one for each rank.
    """

    schedule: Schedule
    costs: Costs = Costs()
    graph: Graph | None = None
    sizes: Sizes | None = None
    memory: float | tuple[float, ...] = inf
    recorded: tuple[Span, ...] = ()
    time: str = ""
    size: str = ""

    def __post_init__(self) -> None:
        require_types(Panel.__init__, {name: one for name, one in vars(self).items() if name != "memory"})
        if len(self.caps) != self.schedule.ranks or not all(is_number(cap) and cap >= 0 for cap in self.caps):
            expected = f"a number of at least 0, or a tuple of {self.schedule.ranks}: one for each rank"
            raise SizeError.of("Panel", "memory", self.memory, expected, "Correct memory.")

    @property
    def caps(self) -> tuple[float, ...]:
        """The most that each rank may hold."""
        return self.memory if isinstance(self.memory, tuple) else (self.memory,) * self.schedule.ranks


def page(panels: Mapping[str, Panel]) -> str:
    """Return a page of timelines, keyed by name, on one time axis: an HTML document that needs no network.

    It shows every rank's actions, transfers and memory, why each gap exists, the critical path, and the lower bound;
    it can be searched and zoomed. The order of what was simulated can be edited: an action is dragged along its row,
    and the page says whether the order is correct, as `schedules.check` does, and how long it takes. It exports the
    order as a table (`schedules.files.read_csv`) or as Python. Two timelines are compared action by action.

    Raise what `schedules.simulate` raises, and `TimelineError` for recorded spans that are no timeline, of more than
    one step, or not of the panel's schedule.

    >>> from schedules import gpipe
    >>> document = page({"gpipe": Panel(gpipe(ranks=2, microbatches=2))})
    >>> document[:15], "https://" in document
    ('<!DOCTYPE html>', False)
    """
    require_types(page, locals())
    names = each("names", panels, str, ArgumentError)
    given = zip(names, each("panels", panels.values(), Panel, ArgumentError), strict=True)
    made = [_describe_panel(name, panel) for name, panel in given]
    title = ", ".join(panels)
    return write_document(title, {"title": title, "kinds": _describe_kinds(), **_COLORS, "panels": made})


def write_document(title: str, data: Document) -> str:
    """Return the page of `data`, with the script and the style in it; nothing in `data` is taken for HTML."""
    import json  # rarely needed, and slow to import
    from html import escape

    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "TITLE": escape(title).encode("utf-8", "replace").decode(),
        "DATA": text,
        "SCRIPT": read_part("order.js") + read_part("page.js"),
    }
    first, *rest = read_part("page.html").split("{{")
    return first + "".join(parts[name] + after for name, _, after in (piece.partition("}}") for piece in rest))


@cache
def read_part(name: str) -> str:
    """Return a file that lies beside this module."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


_COLORS: Final = {"marked": MARKED, "wait": WAIT.color}


def _describe_kinds() -> Document:
    """Return the vocabulary: the letter, color and name of each kind, and what it does to a unit and to others."""
    return {
        kind: {
            "letter": look.letter,
            "color": look.color,
            "name": look.name,
            "before": word.before,
            "after": word.after,
            "crosses": word.crosses,
            "reads": word.reads,
            "holds": UNITS.growth(kind, 0),
        }
        for kind, word in sorted(KINDS.items(), key=lambda row: [*LOOKS, row[0]].index(row[0]))
        if not word.does and (look := look_of(kind))
    }


def _describe_panel(name: str, panel: Panel) -> Document:
    """Return all that the page needs to know of a timeline."""
    schedule, graph = panel.schedule, graph_of(panel.schedule, panel.graph)
    own = [a for rank in range(schedule.ranks) for a in schedule.actions(rank) if isinstance(a.kind, OwnKind)]
    if own:
        raise TimelineError(
            f"{name!r}: got {own[0]} in {quote(schedule)}, expected actions of the kinds in schedules.KINDS: a page "
            "judges edits, and knows no others. Draw it as text or SVG."
        )
    if any(action.kind in ("OFFLOAD", "RELOAD") for rank in range(schedule.ranks) for action in schedule.actions(rank)):
        raise TimelineError(
            f"{name!r}: got {quote(schedule)}, which moves memory off the device, expected one that does not: a page "
            "does not show moves. Draw it with svg or trace."
        )
    totals = simulate(schedule, panel.costs, graph, panel.sizes)
    every = tuple(read_spans(panel.recorded or spans(schedule, panel.costs, graph)))
    fits = all(held <= cap + ROUNDING for held, cap in zip(totals.peak_memory, panel.caps, strict=True))
    found = _find_bound(panel, graph, fits)
    return {
        "name": name,
        "measured": bool(panel.recorded),
        **_describe_shape(schedule),
        "graph": format_graph(graph),
        "call": {"placement": repr(schedule.placement), "graph": repr(graph)},
        "chain": graph == chain(graph.stages),
        "edges": [_describe_edge(panel, route, one) for route, one in list_dependencies(schedule, graph)],
        **_describe_rows(every, schedule),
        "growth": _describe_growth(panel),
        "weights": [weight_memory(schedule, rank, panel.sizes or UNITS) for rank in range(schedule.ranks)],
        "caps": list(map(_finite, panel.caps)),
        "bound": found and {"time": found.makespan, "because": found.because},
        "time": panel.time,
        "size": panel.size,
    }


def _describe_shape(schedule: Schedule) -> Document:
    version, ranks = schedule.version, range(schedule.ranks)
    return {
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "slices": schedule.slices,
        "backward": schedule.backward,
        "routes": schedule.placement.routes,
        "memory": None if schedule.limits.memory is None else [_finite(schedule.memory(rank)) for rank in ranks],
        "versions": [_finite(schedule.versions(rank)) for rank in ranks],
        "uses": None if version is None else list(map(version, range(schedule.microbatches))),
    }


def _describe_edge(panel: Panel, route: int, one: Dependency) -> list[Any]:
    """Return what is made, by which stage, for which, on which route, the two ranks, and the time of the transfer.

    For a gradient, also how many actions add to it, and which kind of them.
    """
    delay = panel.costs.transfer(one.what, one.source, one.producer, one.consumer)
    count, maker = 0, ""
    if isinstance(one.arrived, GradientArrival):
        count = one.arrived.count
        tied = one.source != one.target
        maker = completes_gradient(panel.schedule, one.source, one.producer) if tied else "done"
    return [one.what, one.source, one.target, route, one.producer, one.consumer, delay, count, maker]


def _describe_rows(timeline: Iterable[Span], schedule: Schedule) -> Document:
    """Return each rank's actions in order, with their times, and its waits.

    Raise `TimelineError` for two of a name, and for what the schedule cannot have.
    """
    ranks = schedule.ranks
    rows: list[dict[str, None]] = [{} for _ in range(ranks)]
    starts, ends = ([list[float]() for _ in range(ranks)] for _ in "ab")
    waits: list[list[Any]] = [[] for _ in range(ranks)]
    for span in timeline:
        rank, action, start, end = span
        if rank >= ranks:
            raise TimelineError(
                f"got {action} of rank {rank}, expected ranks below {ranks}. Pass the schedule that ran."
            )
        if span.waits:
            waits[rank].append([str(action), start, end])
            continue
        if (name := str(action)) in rows[rank]:
            raise TimelineError(f"rank {rank}: got {name} twice, expected one step. Pass the spans of one step.")
        rows[rank][name] = None
        starts[rank].append(_shorten(start))
        ends[rank].append(_shorten(end))
    _require_own(rows, schedule)
    return {"rows": list(map(" ".join, rows)), "starts": starts, "ends": ends, "waits": waits}


def _require_own(rows: list[dict[str, None]], schedule: Schedule) -> None:
    """Raise `TimelineError` for an action that no order of the schedule can have."""
    for rank, row in enumerate(rows):
        try:
            for _ in require_placed(schedule, rank, require_compute_only(schedule, rank, map(parse, row))):
                pass
        except ScheduleError as error:
            raise TimelineError(f"{error} Pass the schedule that ran.") from error


def _describe_growth(panel: Panel) -> dict[str, list[float]]:
    """Return, per kind and stage, how the memory of the stage's rank changes, in the units of the timeline's peak."""
    schedule, sizes = panel.schedule, panel.sizes or UNITS
    share = schedule.slices * (schedule.stages / schedule.ranks if panel.sizes is None else 1)
    grown = {
        kind: [sizes.growth(kind, s, schedule.backward) / (share if word.after else 1) for s in range(schedule.stages)]
        for kind, word in KINDS.items()
        if not word.does
    }
    return {kind: row for kind, row in grown.items() if any(row)}


def _find_bound(panel: Panel, graph: Graph, fits: bool) -> Bound | None:
    """Return the bound on every order of the schedule's actions; `None` if there is none for actions such as these."""
    schedule, costs = panel.schedule, panel.costs
    if schedule.slices > 1 or costs.microbatches:
        return None
    used = {action.kind for rank in range(schedule.ranks) for action in schedule.actions(rank)}
    memory = panel.memory if fits and "C" not in used else inf
    problem = Problem(
        replace(costs, slices=()),
        schedule.placement,
        schedule.microbatches,
        memory,
        panel.sizes,
        graph,
        split="I" in used,
        backward=schedule.backward,
    )
    passes = schedule.stages * schedule.microbatches
    return bound(problem) if passes <= MOST_BOUNDED else rough_bound(problem)


def _finite(number: float) -> float | None:
    return number if isfinite(number) else None


def _shorten(time: float) -> float:
    """Return a time with as many digits as a page needs; whole numbers as integers, which are shorter."""
    near = float(f"{time:.{DIGITS}g}")
    return int(near) if near == int(near) else near
