# SPDX-License-Identifier: Apache-2.0
"""The picture of a timeline in lines of text."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice, pairwise
from math import ceil, floor
from sys import maxsize
from typing import NamedTuple

from schedules.actions import Action
from schedules.authoring import Schedule
from schedules.costs import Costs
from schedules.drawing.palette import MARKED, Paint, look, plain
from schedules.drawing.strips import Strip, lanes, strip
from schedules.errors import ScheduleError
from schedules.fitting import Actions, compute_only, placed
from schedules.graph import Graph
from schedules.progress import Progress
from schedules.replay import Span
from schedules.rules import rules_of
from schedules.simulation import spans
from schedules.transforms import transform


def text(
    schedule: Schedule,
    costs: Costs = Costs(),
    graph: Graph | None = None,
    columns: int = maxsize,
    paint: Paint = plain,
    error: ScheduleError | None = None,
) -> str:
    """The simulated timeline, one line per rank; a cell is as wide as the shortest action takes, `.` is idle.

    With one stage per rank a cell reads `F3`, forward of microbatch 3; otherwise `1F3`, on stage 1; `F3.0` is a slice,
    and `F3&` a forward that overlaps with what stands behind it. What takes no time is a small letter behind the cell
    in which it happens, as in `B3 u`. Lines that would be longer than `columns` characters are cut into blocks of time,
    one under the other. Actions of a rank that overlap in time stand in further lines.

    Where the ranks block each other, or at `error` if that is given, the picture ends: with `!` behind the action that
    is wrong, and the reason under it. `paint` is given every label and the colour of its kind.

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
    timeline, error = _simulated(schedule, costs, graph, error)
    drawn = strip(timeline, map(schedule.placement.stages_on, range(schedule.ranks)))
    names, rows, width = _table(drawn, error, paint)
    cells = len(rows[0])
    count = ceil(cells / max(1, (columns - len(names[0]) - 1) // width))
    edges = [ceil(cells * block / count) for block in range(count)] + [cells]
    blocks = (
        "\n".join(f"{name}{''.join(row[first:last])}|" for name, row in zip(names, rows, strict=True))
        for first, last in pairwise(edges)
    )
    return "\n\n".join(blocks) + (f"\n{error}" if error else "")


def _simulated(
    schedule: Schedule, costs: Costs, graph: Graph | None, error: ScheduleError | None
) -> tuple[list[Span], ScheduleError | None]:
    """The timeline up to `error`, or to the one that the simulation meets."""
    if error is None:
        try:
            return list(spans(schedule, costs, graph)), None
        except ScheduleError as met:
            error = met
    timeline: list[Span] = []
    with suppress(ScheduleError):  # the other ranks wait for what never comes: that is as far as they get
        timeline.extend(spans(_before(schedule, error.rank, error.position), costs, graph))
    return timeline, error


@transform
def _before(rank: int, schedule: Schedule, broken: int, position: int) -> Actions:
    """The schedule up to a position on one rank, and on the others up to where they break a rule themselves."""
    book = Progress(schedule, rank)
    actions = placed(schedule, rank, compute_only(schedule, rank, schedule.actions(rank)))
    for rule in rules_of(schedule):
        actions = rule(book, actions)
    with suppress(ScheduleError):
        yield from islice(actions, position if rank == broken else None)


class _Cell(NamedTuple):
    """One cell: its text, its colour, and whether the action ends with it, so that a gap follows."""

    text: str
    colour: str = ""
    ends: bool = True

    def painted(self, paint: Paint) -> str:
        if not self.colour:
            return self.text
        return paint(self.text[:-1], self.colour) + self.text[-1] if self.ends else paint(self.text, self.colour)

    def with_small(self, letter: str) -> _Cell:
        """The cell with a small letter in its last column."""
        return _Cell(self.text[:-1] + letter.lower(), self.colour, True)


def _table(drawn: Strip, error: ScheduleError | None, paint: Paint) -> tuple[list[str], list[list[str]], int]:
    """The names of the lines, their painted cells, and how wide a cell is."""
    flaw = _flaw(drawn, error.action) if error else ""
    width = max(map(len, [flaw, *(drawn.label(span.action) for span in drawn.every)])) + 1
    idle = _Cell("." + " " * (width - 1))
    names, rows = list[str](), list[list[_Cell]]()
    for rank, row in enumerate(drawn.spans):
        lines = _lines(drawn, row, width, idle)
        if error and rank == error.rank:
            lines[0].append(_Cell((flaw + "!").ljust(width), MARKED, ends=False))
        name = f"rank {rank:>{len(str(drawn.ranks - 1))}} |"
        names += [name, *[f"{'|':>{len(name)}}"] * (len(lines) - 1)]
        rows += lines
    cells = max(map(len, rows))
    return names, [[cell.painted(paint) for cell in row + [idle] * (cells - len(row))] for row in rows], width


def _flaw(drawn: Strip, action: object) -> str:
    """The label of what is wrong, which may be no action, or that there is none."""
    return drawn.label(action) if isinstance(action, Action) else str(action or "")


def _lines(drawn: Strip, row: tuple[Span, ...], width: int, idle: _Cell) -> list[list[_Cell]]:
    """The cells of one rank's actions, a line for each lane; no longer than they last."""
    ticks = {span: (_tick(drawn, span.start), _tick(drawn, span.end)) for span in row}
    shown = {span: tick for span, tick in ticks.items() if tick[0] < tick[1]}
    lines: list[list[_Cell]] = [[]]
    for lane, (span, (first, last)) in zip(lanes(shown.values()), shown.items(), strict=True):
        lines += [[] for _ in range(lane + 1 - len(lines))]
        lines[lane] += [idle] * (first - len(lines[lane]))
        body = (drawn.label(span.action) + look(span.action.kind).joint).ljust(width * (last - first))
        ends = range(width, len(body) + 1, width)
        lines[lane] += (_Cell(body[end - width : end], drawn.colour(span), end == len(body)) for end in ends)
    for span in (span for span in row if span not in shown):
        behind = max(0, ticks[span][0] - 1)
        lines[0] += [idle] * (behind + 1 - len(lines[0]))
        lines[0][behind] = lines[0][behind].with_small(look(span.action.kind).letter)
    return lines


def _tick(drawn: Strip, time: float) -> int:
    return floor((time - drawn.begin) / drawn.unit + 0.5)
