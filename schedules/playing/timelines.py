# SPDX-License-Identifier: Apache-2.0
"""Timelines as they come from users, from clocks and from files: spans, each checked before it is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Final

from schedules.arguments import MOST_STAGES, is_number, is_size
from schedules.errors import TimelineError, quote
from schedules.language.actions import KINDS, Action, is_own
from schedules.playing.engine import Span

MOST_SPANS: Final = 2**22
"""More spans than a timeline in memory has; an iterator that yields more does not end."""


def read_spans(timeline: Iterable[Span]) -> Iterator[Span]:
    """Yield the spans of a timeline.

    Raise `TimelineError` for what is no timeline, a span of an unknown action or rank, one that ends before it starts,
    or whose start or end is not finite, and if there is no end of them.
    """
    if not isinstance(timeline, Iterable):
        raise TimelineError(f"got {quote(timeline)}, expected the spans of a timeline. Pass a list of Span.")
    for position, span in enumerate(timeline):
        if not isinstance(span, Span) or not isinstance(span.action, Action) or not is_size(span.rank, 0):
            raise TimelineError(
                f"span {position}: got {quote(span)}, expected a Span of an Action on a rank below {MOST_STAGES}. Pass "
                "what schedules.spans yields, or what record= was called with."
            )
        start, end = span.start, span.end
        if not (is_number(start) and is_number(end) and isfinite(start) and isfinite(end) and start <= end):
            raise TimelineError(
                f"rank {span.rank}, {span.action}: got start {start} and end {end}, expected finite numbers, "
                "the end not before the start. Check the costs or the clock that it was made with."
            )
        is_known = span.action.kind in KINDS or is_own(span.action.kind)
        if not is_known or position == MOST_SPANS:
            expected = f"a known kind of action, in a timeline of at most {MOST_SPANS} spans"
            raise TimelineError(f"span {position}: got {quote(span)}, expected {expected}. Correct the timeline.")
        yield span
