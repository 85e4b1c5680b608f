# SPDX-License-Identifier: Apache-2.0
"""Draw timelines as lines of text."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from math import ceil, floor
from shutil import get_terminal_size
from typing import Final, NamedTuple, TypeAlias

from schedules.analysis.simulation import spans
from schedules.arguments import require_types
from schedules.checking.progress import Progress
from schedules.checking.rules import rules_of
from schedules.drawing.palette import MARKED, Paint, look_of, plain
from schedules.drawing.strips import Strip, lanes_of, make_strip
from schedules.errors import ScheduleError, SizeError, TimelineError, printable
from schedules.language.actions import Action
from schedules.language.graph import Graph
from schedules.language.membership import require_compute_only, require_placed
from schedules.language.schedule import Actions, Schedule, picture
from schedules.lowering.program import Program
from schedules.playing.costs import Costs
from schedules.playing.engine import Span
from schedules.transforms.transform import transform

MOST_CELLS: Final = 2**24


def text(
    schedule: Schedule,
    costs: Costs = Costs(),
    graph: Graph | None = None,
    columns: int | None = None,
    paint: Paint = plain,
    error: ScheduleError | None = None,
) -> str:
    """Return the simulated timeline, one line per rank; a cell is the time of the shortest action, `.` is idle.

    With one stage per rank, a cell reads `F3`, forward of microbatch 3; otherwise `1F3`, on stage 1. `F3.0` is a slice,
    and `F3&` a forward that overlaps with the action after it. An action that takes no time is a lowercase letter at
    the end of the cell in which it happens, as in `B3 u`. Lines longer than `columns` characters, by default those of
    the terminal if the output goes to one, are broken into blocks of time, one below the other. Actions of a rank that
    overlap in time take extra lines, and so do its collectives.

    If the ranks deadlock, or at `error` if that is given, the picture ends with `!` after the offending action and the
    reason below. Ranks that deadlock along a chain may not do so along the schedule's actual stage graph: pass it, or
    `connect` it. `paint` is called with every label and the color of its kind.

    >>> from schedules import gpipe
    >>> print(text(gpipe(ranks=2, microbatches=2)))
    rank 0 |F0 F1 .  .  .  B0    B1    |
    rank 1 |.  F0 F1 B0    B1    .  .  |
    >>> print(text(gpipe(ranks=2, microbatches=2), columns=24))
    rank 0 |F0 F1 .  .  .  |
    rank 1 |.  F0 F1 B0    |
    <BLANKLINE>
    rank 0 |B0    B1    |
    rank 1 |B1    .  .  |
    """
    require_types(text, locals())
    columns = _choose_columns("text", columns)
    given = error
    timeline, error = _simulate_until_error(schedule, costs, graph, error)
    drawn = make_strip(timeline, map(schedule.placement.stages_on, range(schedule.ranks)))
    labels = [_label_error(drawn, error.action)] if error else []
    grid = _Grid(drawn.unit, 1 + max(map(len, [*labels, *_labels(drawn)]), default=0))
    return (
        _fold({"": _draw_timeline(drawn, grid, error)}, grid, columns, paint)
        + (f"\n{error}" if error else "")
        + (_CHAIN if error and not given and error.rule == "ordered" and graph is schedule.graph is None else "")
    )


_CHAIN = "\nThis is for a chain of stages. For another stage graph, print connect(schedule, graph)."


def texts(timelines: Mapping[str, Iterable[Span]], columns: int | None = None, paint: Paint = plain) -> str:
    """Return the pictures of `timelines`, keyed by name, one below the other on a common time scale.

    They look like those of `text`. Every timeline begins at 0, a cell is the time of the shortest action in any of
    them, and `-` is a wait for a transfer. Anything shorter than half a cell may be invisible. Raise `TimelineError`
    for invalid times.

    >>> from schedules import B, F, parse
    >>> made = [Span(0, F(0, 0), 0, 1), Span(0, parse("0RECV_B0<1"), 1, 3.8), Span(0, B(0, 0), 4, 6)]
    >>> print(texts({"rank 0, as simulated": [made[0], made[2]], "as measured": made}))
    rank 0, as simulated
    rank 0 |F0 .  .  .  B0    |
    as measured
    rank 0 |F0 -  -  -  B0    |
    """
    require_types(texts, locals())
    columns = _choose_columns("texts", columns)
    strips = {name: make_strip(spans) for name, spans in timelines.items()}
    units = [drawn.unit for drawn in strips.values() if drawn.compute_spans]
    labels = [label for drawn in strips.values() for label in _labels(drawn)]
    grid = _Grid(min(units, default=1.0), 1 + max(map(len, labels), default=0))
    return _fold({name: _draw_timeline(drawn, grid, None) for name, drawn in strips.items()}, grid, columns, paint)


def _choose_columns(function: str, columns: int | None) -> int:
    if columns is None:
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        return max(1, get_terminal_size().columns) if is_terminal else sys.maxsize
    if columns < 1:
        raise SizeError.of(
            function, "columns", columns, "an integer of at least 1", "Leave it out to use the width that fits."
        )
    return columns


def _simulate_until_error(
    schedule: Schedule, costs: Costs, graph: Graph | None, error: ScheduleError | None
) -> tuple[list[Span], ScheduleError | None]:
    """Return the timeline up to `error`, or up to the one the simulation raises, and that error."""
    if error is None:
        try:
            return list(spans(schedule, costs, graph)), None
        except ScheduleError as met:
            error = met
    timeline: list[Span] = []
    with suppress(ScheduleError):  # the other ranks run until they wait for what never comes
        timeline.extend(spans(_cut_before(schedule, error.rank, error.position), costs, graph))
    return timeline, error


@transform
def _cut_before(rank: int, schedule: Schedule, broken: int, position: int) -> Actions:
    """Cut the schedule at `position` on rank `broken`, and on other ranks where they break a rule themselves."""
    book = Progress(schedule, rank)
    actions = require_placed(schedule, rank, require_compute_only(schedule, rank, schedule.actions(rank)))
    for rule in rules_of(schedule):
        actions = rule(book, actions)
    with suppress(ScheduleError):
        yield from islice(actions, position if rank == broken else None)


class _Cell(NamedTuple):
    """One cell: its text, its color, and whether it is the action's last, so that a gap follows."""

    text: str
    color: str = ""
    ends: bool = True

    def paint_with(self, paint: Paint) -> str:
        if not self.color:
            return self.text
        return paint(self.text[:-1], self.color) + self.text[-1] if self.ends else paint(self.text, self.color)

    def with_letter(self, letter: str) -> _Cell:
        """Return the cell with a lowercase letter in its last column."""
        return _Cell(self.text[:-1] + letter.lower(), self.color, True)


_Line: TypeAlias = tuple[str, list[_Cell]]
"""The name of a line, and its cells."""


class _Grid(NamedTuple):
    """The time that a cell covers, and its width in characters."""

    unit: float
    width: int

    @property
    def idle(self) -> _Cell:
        return _Cell(".".ljust(self.width))

    @property
    def waits(self) -> _Cell:
        return _Cell("-".ljust(self.width))

    def ticks(self, drawn: Strip, span: Span) -> tuple[int, int]:
        """Return the first cell of a span, and the one after its last."""
        first, last = (floor((time - drawn.begin) / self.unit + 0.5) for time in (span.start, span.end))
        return first, last


def _labels(drawn: Strip) -> list[str]:
    return [drawn.label(span.action) for span in drawn.compute_spans]


def _draw_timeline(drawn: Strip, grid: _Grid, error: ScheduleError | None) -> list[_Line]:
    """Return the lines of one timeline, which may differ in length."""
    rows, cells = list[_Line](), drawn.ranks * drawn.duration / grid.unit
    if cells > MOST_CELLS:
        raise TimelineError(
            f"got a timeline of {drawn.duration / grid.unit:g} cells for each of {drawn.ranks} ranks, expected at most "
            f"{MOST_CELLS} in all. Choose costs of the same order of magnitude, or draw an SVG."
        )
    for rank, row in enumerate(drawn.spans):
        lines = _draw_rank(drawn, row, grid)
        if error and rank == error.rank:
            flaw = _label_error(drawn, error.action) + "!"
            lines[0].append(_Cell(flaw.ljust(grid.width), MARKED, ends=False))
        name = f"rank {rank:>{len(str(drawn.ranks - 1))}} |"
        names = [name, *[f"{'|':>{len(name)}}"] * (len(lines) - 1)]
        rows += zip(names, lines, strict=True)
    return rows


def _fold(sections: Mapping[str, Sequence[_Line]], grid: _Grid, columns: int, paint: Paint) -> str:
    """Return the lines padded to equal length and broken into blocks of time at most `columns` wide, if a cell fits."""
    rows = [row for section in sections.values() for row in section]
    gutter, cells = (max(map(len, column), default=0) for column in (zip(*rows, strict=True) if rows else ((), ())))
    count = ceil(cells / max(1, (columns - gutter - 1) // grid.width))
    edges = [ceil(cells * block / count) for block in range(count)] + [cells]
    lines = list[tuple[str, list[str]]]()
    for title, section in sections.items():
        lines += [(printable(title), [])] * bool(title)
        lines += [
            (name, [cell.paint_with(paint) for cell in [*row, *[grid.idle] * (cells - len(row))]])
            for name, row in section
        ]
    blocks = (
        "\n".join(f"{name}{''.join(line[first:last])}|" if line else name for name, line in lines)
        for first, last in pairwise(edges)
    )
    return "\n\n".join(blocks)


def _label_error(drawn: Strip, action: object) -> str:
    """Return the label of the offending action, which may be missing or a text."""
    return drawn.label(action) if isinstance(action, Action) else str(action or "")


def _draw_rank(drawn: Strip, row: tuple[Span, ...], grid: _Grid) -> list[list[_Cell]]:
    """Return one rank's cells up to the end of its last span: a line for each lane, with waits in the first."""
    width, idle, waits = grid.width, grid.idle, grid.waits
    ticks = {span: grid.ticks(drawn, span) for span in row if not span.waits}
    shown = {span: tick for span, tick in ticks.items() if tick[0] < tick[1]}
    places = lanes_of([span.action.kind for span in shown], list(shown.values()))
    lines: list[list[_Cell]] = [[]]
    for lane, (span, (first, last)) in zip(places, shown.items(), strict=True):
        lines += [[] for _ in range(lane + 1 - len(lines))]
        lines[lane] += [idle] * (first - len(lines[lane]))
        body = (drawn.label(span.action) + look_of(span.action.kind).joint).ljust(width * (last - first))
        ends = range(width, len(body) + 1, width)
        lines[lane] += (_Cell(body[end - width : end], drawn.color(span), end == len(body)) for end in ends)
    for span in (span for span in ticks if span not in shown):
        at = max(0, ticks[span][0] - 1)
        lines[0] += [idle] * (at + 1 - len(lines[0]))
        lines[0][at] = lines[0][at].with_letter(look_of(span.action.kind).letter)
    for first, last in (grid.ticks(drawn, span) for span in row if span.waits):
        lines[0] += [idle] * (last - len(lines[0]))
        lines[0][first:last] = [waits if cell is idle else cell for cell in lines[0][first:last]]
    return lines


@picture.register
def _draw_schedule(schedule: Schedule) -> str:
    return text(schedule)


@picture.register
def _draw_program(program: Program) -> str:
    return text(program.schedule, graph=program.graph)
