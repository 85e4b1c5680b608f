# SPDX-License-Identifier: Apache-2.0
"""Pictures of timelines."""

from __future__ import annotations

from schedules.authoring import Schedule
from schedules.graph import Graph
from schedules.simulation import Costs, spans


def text(schedule: Schedule, costs: Costs = Costs(), graph: Graph | None = None) -> str:
    """The simulated timeline, one line per rank; a cell is as wide as the shortest action takes, `.` is idle.

    With one stage per rank a cell reads `F3`, forward of microbatch 3; otherwise `1F3`, on stage 1.

    >>> from schedules import gpipe
    >>> print(text(gpipe(ranks=2, microbatches=2)))
    rank 0 |F0 F1 .  .  .  B0    B1    |
    rank 1 |.  F0 F1 B0    B1    .  .  |
    """
    timeline = list(spans(schedule, costs, graph))
    unit = min((span.end - span.start for span in timeline if span.end > span.start), default=1.0)
    single = schedule.stages == schedule.ranks
    labels = [str(span.action)[len(str(span.action.stage)) * single :] for span in timeline]
    width = max(map(len, labels)) + 1
    cells = round(max(span.end for span in timeline) / unit)
    rows = [["." + " " * (width - 1)] * cells for _ in range(schedule.ranks)]
    for span, label in zip(timeline, labels, strict=True):
        first, last = round(span.start / unit), round(span.end / unit)
        rows[span.rank][first:last] = [label.ljust(width), *[" " * width] * (last - first - 1)][: last - first]
    gutter = len(str(schedule.ranks - 1))
    return "\n".join(f"rank {rank:>{gutter}} |{''.join(row)}|" for rank, row in enumerate(rows))
