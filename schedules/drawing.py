# SPDX-License-Identifier: Apache-2.0
"""Pictures of timelines."""

from __future__ import annotations

from sys import maxsize

from schedules.authoring import Schedule
from schedules.costs import Costs
from schedules.errors import ScheduleError
from schedules.graph import Graph
from schedules.replay import Span
from schedules.simulation import spans


def text(schedule: Schedule, costs: Costs = Costs(), graph: Graph | None = None, columns: int = maxsize) -> str:
    """The simulated timeline, one line per rank; a cell is as wide as the shortest action takes, `.` is idle.

    With one stage per rank a cell reads `F3`, forward of microbatch 3; otherwise `1F3`, on stage 1. Lines that would be
    longer than `columns` characters are cut into blocks of time, one under the other. Where the ranks block each other,
    the picture ends there, and the reason stands under it.

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
    timeline, reason = _timeline(schedule, costs, graph)
    rows = _cells(schedule, timeline)
    names = [f"rank {rank:>{len(str(schedule.ranks - 1))}} |" for rank in range(schedule.ranks)]
    width = len(rows[0][0]) if rows[0] else 1
    room = max(1, (columns - len(names[0]) - 1) // width)
    blocks = [
        "\n".join(f"{name}{''.join(row[first : first + room])}|" for name, row in zip(names, rows, strict=True))
        for first in range(0, len(rows[0]), room)
    ]
    return "\n\n".join(blocks) + reason


def _timeline(schedule: Schedule, costs: Costs, graph: Graph | None) -> tuple[list[Span], str]:
    timeline: list[Span] = []
    try:
        timeline.extend(spans(schedule, costs, graph))  # what came before an error stays
    except ScheduleError as error:
        return timeline, ("\n" if timeline else "") + str(error)
    return timeline, ""


def _cells(schedule: Schedule, timeline: list[Span]) -> list[list[str]]:
    """Per rank its cells, all of one width: an action's label, blank while it lasts, a dot where there is none."""
    unit = min((span.end - span.start for span in timeline if span.end > span.start), default=1.0)
    single = schedule.stages == schedule.ranks
    labels = [str(span.action)[len(str(span.action.stage)) * single :] for span in timeline]
    width = max(map(len, labels), default=0) + 1
    cells = round(max((span.end for span in timeline), default=0) / unit)
    rows = [["." + " " * (width - 1)] * cells for _ in range(schedule.ranks)]
    for span, label in zip(timeline, labels, strict=True):
        first, last = round(span.start / unit), round(span.end / unit)
        rows[span.rank][first:last] = [label.ljust(width), *[" " * width] * (last - first - 1)][: last - first]
    return rows
