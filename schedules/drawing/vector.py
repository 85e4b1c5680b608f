# SPDX-License-Identifier: Apache-2.0
"""Draw timelines as pictures: SVG for screens, PDF and TikZ for print."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor, inf, log10
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias

from schedules.arguments import require_types
from schedules.drawing.palette import LOOKS, MARKED, WAIT, gray_of, look_of
from schedules.drawing.shapes import (
    GLYPH,
    Box,
    Curve,
    Drawn,
    Picture,
    Point,
    Size,
    Words,
)
from schedules.drawing.strips import Strip, lanes_of, make_strip
from schedules.errors import ArgumentError, SizeError
from schedules.playing.costs import Sizes
from schedules.playing.engine import Span

LEFT, RIGHT, TITLE, ROW, CURVE, GAP, AXIS = 64, 48, 24, 22, 16, 4, 26  # pixels, as are all sizes here
SHORTEST = 1e-300  # shorter times count as zero: their inverse is not finite
CELL, NARROW, WIDE, WIDEST = 26, 640, 2400, 8000
FONTS = (11, 9, 7.5)  # label sizes: the largest that fits is used
IDLE, HELD, FAINT, BLACK = "#f1f1f1", "#c9c2d8", "#808080", "#000000"
Curves: TypeAlias = tuple[list[tuple[float, float]], ...]  # memory over time, by rank


@dataclass(frozen=True)
class Style:
    """The style of a picture.

    - `window`: the begin and the end of the time that is shown; every timeline begins at 0.
    - `labels`: `"full"`, such as `1F3` where ranks hold several stages; `"microbatch"`, its number alone; or `"none"`.
    - `palette`: `"color"`, or `"gray"` for print in black: kinds differ in gray and letter, and each later stage of a
      rank has a longer bar below.

    >>> Style(window=(0, 8), palette="gray").labels
    'full'
    """

    window: tuple[float, float] = (0.0, inf)
    labels: Literal["full", "microbatch", "none"] = "full"
    palette: Literal["color", "gray"] = "color"

    def __post_init__(self) -> None:
        require_types(Style.__init__, vars(self))
        begin, end = self.window
        if not 0 <= begin < end:
            raise ArgumentError(
                f"Style: got window={self.window}, expected a begin of at least 0, and a later end. Swap them."
            )


COLORED: Final = Style()


def svg(
    timelines: Mapping[str, Iterable[Span]],
    memory: bool = False,
    sizes: Sizes | None = None,
    width: float | None = None,
    marked: Mapping[str, Collection[Span]] = MappingProxyType({}),
    style: Style = COLORED,
) -> str:
    """Return one picture of `timelines`, keyed by name, stacked on a common time scale; a row for each rank.

    Every timeline begins at 0. Waits are light. Labels that do not fit their cells are shortened to the microbatch, or
    left out; viewers show them in full on hover. With `memory`, a graph below each row shows the rank's memory, by
    `sizes`, or in units of one rank's activations for one microbatch; the number after it is the peak. The spans in
    `marked` get a frame, and the legend shows their key. `width` is in pixels; by default, it is wide enough for the
    labels, up to the size of a screen. Raise `TimelineError` for invalid times.

    >>> from schedules import Costs, gpipe, spans
    >>> picture = svg({"gpipe": spans(gpipe(ranks=2, microbatches=2), Costs())})
    >>> picture[:4], picture.count("<title>"), "rank 1" in picture
    ('<svg', 8, True)
    """
    require_types(svg, locals())
    return draw(timelines, memory, sizes, width, marked, style).svg()


def draw(
    timelines: Mapping[str, Iterable[Span]],
    memory: bool = False,
    sizes: Sizes | None = None,
    width: float | None = None,
    marked: Mapping[str, Collection[Span]] = MappingProxyType({}),
    style: Style = COLORED,
) -> Picture:
    """Return the picture that `svg` draws, which also has the forms `pdf()` and `tikz()`, for print.

    >>> from schedules import Costs, gpipe, spans
    >>> drawn = draw({"gpipe": spans(gpipe(ranks=2, microbatches=2), Costs())}, width=240)
    >>> drawn.pdf()[:5], drawn.tikz().splitlines()[-1]
    (b'%PDF-', '\\\\end{tikzpicture}')
    """
    require_types(draw, locals())
    if width is not None and not 0 < width < inf:
        raise SizeError.of(
            "draw", "width", width, "a number of pixels above 0", "Leave it out to use a width that fits."
        )
    strips = {name: make_strip(spans) for name, spans in timelines.items()}
    begin, end = style.window
    duration = min(end, max((drawn.duration for drawn in strips.values()), default=0)) - begin
    duration = duration if duration > SHORTEST else 1
    room = max(width - LEFT - RIGHT, 1) if width else _choose_width(list(strips.values()), duration)
    framed = frozenset(span for spans in marked.values() for span in spans)

    def levels(drawn: Strip) -> Curves:
        return tuple(drawn.memory_levels(rank, sizes) for rank in range(drawn.ranks if memory else 0))

    shapes, y = list[Drawn](), 0.0
    for name, drawn in strips.items():
        panel = _Panel(name, drawn, room / duration, (begin, begin + duration), levels(drawn), framed, style)
        shapes += (_shift(shape, LEFT, y) for shape in panel.draw())
        y += panel.height
    key, high = _draw_legend(list(strips.values()), memory, marked, room + RIGHT, style)
    shapes += (_shift(shape, LEFT, y + 8) for shape in key)
    return Picture(LEFT + room + RIGHT, y + 8 + high, shapes)


def _shift(shape: Drawn, x: Size, y: Size) -> Drawn:
    """Return a shape at another place."""
    if isinstance(shape, Curve):
        return shape._replace(points=[(a + x, b + y) for a, b in shape.points])
    return shape._replace(x=shape.x + x, y=shape.y + y)


def _choose_width(strips: list[Strip], duration: float) -> Size:
    """Return a width that fits all labels, or at least the microbatches, limited to one or a few screens."""
    full = max((CELL * duration / drawn.unit for drawn in strips), default=0)
    brief = max((drawn.longest_microbatch * GLYPH * FONTS[-1] * duration / drawn.unit for drawn in strips), default=0)
    return min(max(full, NARROW), max(WIDE, 1.15 * brief if brief <= WIDEST else 0))


class _Panel(NamedTuple):
    """One timeline: a title, a row for each rank, and the time axis, between the times of `window`."""

    name: str
    drawn: Strip
    scale: Size
    window: tuple[float, float]
    memory: Curves
    marked: frozenset[Span]
    style: Style

    @property
    def pitch(self) -> Size:
        """The distance from one row to the next."""
        return ROW + GAP + (CURVE if self.memory else 0)

    @property
    def height(self) -> Size:
        return TITLE + self.pitch * self.drawn.ranks + AXIS

    def draw(self) -> Iterator[Drawn]:
        yield Words(0, TITLE - 8, self.name, bold=True)
        for rank in range(self.drawn.ranks):
            y = TITLE + rank * self.pitch
            yield Words(-8, y + ROW / 2 + 4, f"rank {rank}", anchor="end")
            yield Box(0, y, self._x(self.drawn.begin + self.drawn.duration), ROW, IDLE)
            yield from self._draw_row(self.drawn.spans[rank], y)
            if self.memory:
                yield from self._draw_memory(self.memory[rank], y + ROW + 1)
        yield from _draw_axis(self.window, self.scale, TITLE + self.drawn.ranks * self.pitch)

    def _draw_row(self, row: tuple[Span, ...], y: Size) -> Iterator[Drawn]:
        places = lanes_of([span.action.kind for span in row], [(span.start, span.end) for span in row])
        high = ROW / (max(places, default=0) + 1)
        # Draw marked spans and those of zero duration last, so that their neighbors do not cover them.
        for span, lane in sorted(zip(row, places, strict=True), key=lambda place: self._is_on_top(place[0])):
            first, last = span.start - self.drawn.begin, span.end - self.drawn.begin
            begin, end = self.window
            if (first < end and last > begin) or begin <= first == last <= end:
                yield from self._draw_cell(span, y + lane * high, high)

    def _is_on_top(self, span: Span) -> bool:
        return span in self.marked or span.start == span.end

    def _draw_cell(self, span: Span, y: Size, high: Size) -> Iterator[Drawn]:
        x = self._x(span.start)
        wide = self._x(span.end) - x
        what = f"{span.action} on rank {span.rank}, {span.start:g} to {span.end:g}: {look_of(span.action.kind).name}"
        frame = (MARKED, min(2, wide / 5)) if span in self.marked else self._border
        if span.waits:
            frame = "", 0
        elif not wide:
            x, wide, frame = x - 1, 2, ("", 0)
        yield Box(x, y, wide, high, self._color(span), *frame, what)
        if self.style.palette == "gray" and not span.waits:
            held = self.drawn.stages[span.rank]
            later = held.index(span.action.stage) / max(1, len(held) - 1)
            yield from [Box(x, y + high - 2, wide * later, 2, BLACK)] * (later > 0)
        label, font = self._fit_label(span, wide, high)
        if label:
            yield Words(x + wide / 2, y + high / 2 + font * 0.36, label, font, "middle", inside=True)

    @property
    def _border(self) -> tuple[str, Size]:
        return ("#ffffff", 0.6) if self.style.palette == "color" else (BLACK, 0.4)

    def _color(self, span: Span) -> str:
        return self.drawn.color(span) if self.style.palette == "color" else gray_of(span.action.kind)

    def _fit_label(self, span: Span, wide: Size, high: Size) -> tuple[str, float]:
        """Return the label that fits a cell and its font size; cells of equal size get the same kind of label."""
        choices = [
            (self.drawn.label(span.action), self.drawn.longest),
            (str(span.action.microbatch), self.drawn.longest_microbatch),
        ]
        first = {"full": 0, "microbatch": 1, "none": 2}[self.style.labels]
        for label, longest in [] if span.waits else choices[first:]:
            for font in FONTS:
                if longest * GLYPH * font <= wide and font <= high:
                    return label, font
        return "", 0

    def _draw_memory(self, levels: list[tuple[float, float]], y: Size) -> Iterator[Drawn]:
        top = max((level for row in self.memory for _, level in row), default=0) or 1
        points: list[Point] = [(0, y + CURVE)]
        for time, level in levels:
            x = self._x(time)
            points += [(x, points[-1][1]), (x, y + CURVE * (1 - max(level, 0) / top))]
        end, peak = self._x(self.drawn.begin + self.drawn.duration), max((level for _, level in levels), default=0)
        yield Curve([*points, (end, points[-1][1]), (end, y + CURVE)], HELD, filled=True)
        yield Words(end + 5, y + CURVE - 3, f"{peak:.3g}", 9, color=FAINT)

    def _x(self, time: float) -> Size:
        begin, end = self.window
        return (min(max(time - self.drawn.begin, begin), end) - begin) * self.scale


def _draw_axis(window: tuple[float, float], scale: Size, y: Size) -> Iterator[Drawn]:
    """Yield the time axis, with ticks at round numbers at least 50 pixels apart."""
    (begin, end), least = window, 50 / scale
    ten = 10.0 ** floor(log10(least))
    step = ten * next(factor for factor in (1, 2, 5, 10) if factor * ten >= least)
    yield Curve([(0, y), ((end - begin) * scale, y)], FAINT)
    for count in range(-floor(-begin / step * (1 - 1e-9)), floor(end / step * (1 + 1e-9)) + 1):
        x = (count * step - begin) * scale
        yield Curve([(x, y), (x, y + 4)], FAINT)
        yield Words(x, y + 15, f"{count * step:g}", 9, "middle", FAINT)


def _draw_legend(
    strips: Sequence[Strip], memory: bool, framed: Iterable[str], room: Size, style: Style
) -> tuple[list[Drawn], Size]:
    """Return the legend of the colors, in as many lines as it takes, and its height."""
    used, gray = set[str]().union(*(drawn.kinds for drawn in strips)), style.palette == "gray"
    border = (BLACK, 0.4) if gray else ("", 0)
    entries: list[tuple[str, tuple[str, float], str]] = [
        (gray_of(kind) if gray else look_of(kind).color, border, f"{look_of(kind).letter} {look_of(kind).name}")
        for kind in LOOKS
        if kind in used
    ]
    entries += [(WAIT.color, ("", 0), WAIT.name)] * any(look_of(kind) is WAIT for kind in used)
    entries += [(IDLE, ("", 0), "idle"), *((IDLE, (MARKED, 1.0), name) for name in framed)]
    if any(len(stages) > 1 for drawn in strips for stages in drawn.stages):
        entries.append(("", ("", 0), f"{'longer bar' if gray else 'lighter'}: a later stage of the rank"))
    if memory:
        entries.append((HELD, ("", 0), "memory held, and its peak"))
    x, y, drawn = 0.0, 0.0, list[Drawn]()
    for color, frame, words in entries:
        wide = 18 + 24 + len(words) * GLYPH * 11
        if x and x + wide > room:
            x, y = 0, y + 20
        drawn += [Box(x, y, 12, 12, color, *frame), Words(x + 18, y + 10, words)]
        x += wide
    return drawn, y + 20
