# SPDX-License-Identifier: Apache-2.0
"""Show schedules and timelines in a notebook: one small picture, inline, as wide as a notebook's column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from schedules.analysis.simulation import spans
from schedules.drawing.vector import svg
from schedules.errors import PipelineError
from schedules.language.schedule import Schedule, notebook_picture
from schedules.playing.costs import Costs
from schedules.playing.engine import Span

MOST_ACTIONS: Final = 4000
"""More actions than a small picture can show."""
COLUMN: Final = 900


def sketch(title: str, timelines: Mapping[str, Iterable[Span]]) -> str:
    """Return a title and a small picture of timelines as HTML; only the title if there are too many actions to see.

    >>> from schedules import Costs, gpipe, spans
    >>> picture = sketch("a < b", {"gpipe": spans(gpipe(ranks=2, microbatches=2), Costs())})
    >>> picture[:32], picture.count("<title>")
    ('<div><code>a &lt; b</code><br><s', 8)
    """
    from html import escape  # rarely needed, and slow to import

    drawn = {name: tuple(each) for name, each in timelines.items()}
    count = sum(map(len, drawn.values()))
    picture = f"{count} actions" if count > MOST_ACTIONS else svg(drawn, width=COLUMN) if count else ""
    return f"<div><code>{escape(title)}</code><br>{picture}</div>"


@notebook_picture.register
def _sketch_schedule(schedule: Schedule) -> str:
    try:
        timeline = tuple(spans(schedule, Costs()))
    except PipelineError as error:
        return sketch(f"{schedule!r}: {error}", {})
    return sketch(repr(schedule), {"": timeline})
