# SPDX-License-Identifier: Apache-2.0
"""The parts that all pictures of a timeline share: stages per rank, labels, lanes, and memory over time.

Spans may be simulated or measured, and may overlap on a rank; the only assumption is that start and end are finite.
Spans of transfers are waits: they have no label, and do not affect the width of cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from schedules.analysis.simulation import levels
from schedules.drawing.palette import WAIT, look_of, shade
from schedules.language.actions import BESIDE, COLLECTIVES, Action
from schedules.playing.costs import UNITS, Sizes
from schedules.playing.engine import Span
from schedules.playing.timelines import read_spans


@dataclass(frozen=True)
class Strip:
    """One complete timeline: its spans by rank, in time order, and the stages that each rank holds."""

    spans: tuple[tuple[Span, ...], ...]
    stages: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.stages)

    @cached_property
    def all_spans(self) -> tuple[Span, ...]:
        """The spans of all ranks, rank by rank."""
        return tuple(span for row in self.spans for span in row)

    @cached_property
    def compute_spans(self) -> tuple[Span, ...]:
        """The spans that are not waits."""
        return tuple(span for span in self.all_spans if not span.waits)

    @cached_property
    def begin(self) -> float:
        """The time at which the first span starts."""
        return min((span.start for span in self.all_spans), default=0.0)

    @cached_property
    def duration(self) -> float:
        """The time from the first start to the last end."""
        return max((span.end for span in self.all_spans), default=0.0) - self.begin

    @cached_property
    def unit(self) -> float:
        """The time that one cell covers: that of the shortest action, but at least a quarter of the median."""
        times = sorted(span.end - span.start for span in self.compute_spans if span.end > span.start)
        return max(times[0], times[len(times) // 2] / 4) if times else 1.0

    @cached_property
    def kinds(self) -> set[str]:
        """The kinds of action that occur, including those of waits."""
        return {span.action.kind for span in self.all_spans}

    def label(self, action: Action) -> str:
        """Return `F3` for the forward of microbatch 3; `1F3` if any rank holds several stages; `F3.0` for a slice."""
        stage = str(action.stage) if self._has_several_stages else ""
        part = "" if action.slice is None else f".{action.slice}"
        return f"{stage}{look_of(action.kind).letter}{action.microbatch}{part}"

    @cached_property
    def _has_several_stages(self) -> bool:
        return any(len(held) > 1 for held in self.stages)

    @cached_property
    def longest(self) -> int:
        """The length of the longest label."""
        return max((len(self.label(span.action)) for span in self.compute_spans), default=0)

    @cached_property
    def longest_microbatch(self) -> int:
        """The number of digits of the longest microbatch number."""
        return max((len(str(span.action.microbatch)) for span in self.compute_spans), default=0)

    def memory_levels(self, rank: int, sizes: Sizes | None) -> list[tuple[float, float]]:
        """Return the memory of `rank` over time: it rises when an action starts and falls when one ends.

        Without `sizes`, the unit is one rank's activations for one microbatch.

        >>> from schedules import B, F
        >>> make_strip([Span(0, F(0, 0), 0, 1), Span(0, B(0, 0), 1, 3)]).memory_levels(0, None)
        [(0, 1.0), (3, 0.0)]
        """
        slices = 1 + max((span.action.slice or 0 for span in self.all_spans), default=0)
        share = slices if sizes else slices * len(set[int]().union(*self.stages)) / self.ranks
        grown = ((span, (sizes or UNITS).growth(span.action.kind, span.action.stage)) for span in self.spans[rank])
        changes = [
            (span.start if growth > 0 else span.end, growth / (1 if span.action.kind in COLLECTIVES else share))
            for span, growth in grown
            if growth
        ]
        return list(levels(sorted(changes, key=lambda change: change[0])))  # stable: at equal times, in span order

    def color(self, span: Span) -> str:
        """Return the color of the span's kind, lighter for later stages of the rank."""
        if span.waits:
            return WAIT.color
        held = self.stages[span.rank]
        return shade(span.action.kind, held.index(span.action.stage) / max(1, len(held) - 1))


def make_strip(spans: Iterable[Span], stages: Iterable[tuple[int, ...]] = ()) -> Strip:
    """Return the timeline of `spans`; pass the `stages` of each rank if some of them may not occur in `spans`.

    Raise `TimelineError` for a span that ends before it starts, or whose start or end is not finite.
    """
    given = tuple(read_spans(spans))
    held = dict(enumerate(map(set, stages)))
    for span in given:
        held.setdefault(span.rank, set()).add(span.action.stage)
    rows: list[list[Span]] = [[] for _ in range(max(held, default=-1) + 1)]
    for span in given:
        rows[span.rank].append(span)
    ordered = (tuple(sorted(row, key=lambda span: (span.start, span.end))) for row in rows)
    return Strip(tuple(ordered), tuple(tuple(sorted(held.get(rank, ()))) for rank in range(len(rows))))


def lanes_of(kinds: Sequence[str], intervals: Sequence[tuple[float, float]]) -> list[int]:
    """Return the lane of each interval, given the kinds of its actions: what goes on beside is below the others.

    >>> lanes_of(["F", "UNSHARD", "F"], [(0, 2), (1, 5), (2, 4)])
    [0, 1, 0]
    """
    apart = [kind in BESIDE for kind in kinds]
    first = list(lanes(one for one, below in zip(intervals, apart, strict=True) if not below))
    second = lanes(one for one, below in zip(intervals, apart, strict=True) if below)
    above, top = iter(first), 1 + max(first, default=-1)
    return [top + next(second) if below else next(above) for below in apart]


def lanes(intervals: Iterable[tuple[float, float]]) -> Iterator[int]:
    """Yield, for each interval in start order, the first lane that is free by its start.

    >>> list(lanes([(0, 2), (1, 3), (2, 4)]))
    [0, 1, 0]
    """
    ends: list[float] = []
    for start, end in intervals:
        lane = next((lane for lane, free in enumerate(ends) if free <= start), len(ends))
        ends[lane : lane + 1] = [end]
        yield lane
