# SPDX-License-Identifier: Apache-2.0
"""Draw timelines as SVG."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from math import floor, inf, log10
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from schedules.arguments import require_types
from schedules.drawing.palette import LOOKS, MARKED, WAIT, look_of
from schedules.drawing.strips import Strip, lanes_of, make_strip
from schedules.errors import SizeError
from schedules.playing.costs import Sizes
from schedules.playing.engine import Span

LEFT, RIGHT, TITLE, ROW, CURVE, GAP, AXIS = 64, 48, 24, 22, 16, 4, 26  # pixels, as are all sizes here
SHORTEST = 1e-300  # shorter times count as zero: their inverse is not finite
CELL, NARROW, WIDE, WIDEST = 26, 640, 2400, 8000
FONTS, GLYPH = (11, 9, 7.5), 0.62  # label sizes (the largest that fits is used); character width relative to them
IDLE, HELD, INK, FAINT = "#f1f1f1", "#c9c2d8", "#202020", "#808080"
BORDER = 'stroke="white" stroke-width="0.6"'
Size: TypeAlias = float
Curves: TypeAlias = tuple[list[tuple[float, float]], ...]  # memory over time, by rank


def svg(
    timelines: Mapping[str, Iterable[Span]],
    memory: bool = False,
    sizes: Sizes | None = None,
    width: float | None = None,
    marked: Mapping[str, Collection[Span]] = MappingProxyType({}),
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
    if width is not None and not 0 < width < inf:
        raise SizeError.of("svg", "width", width, "a number of pixels above 0", "Leave it out for one that fits.")
    strips = {name: make_strip(spans) for name, spans in timelines.items()}
    duration = max((drawn.duration for drawn in strips.values()), default=0)
    duration = duration if duration > SHORTEST else 1
    room = max(width - LEFT - RIGHT, 1) if width else _choose_width(list(strips.values()), duration)

    framed = frozenset(span for spans in marked.values() for span in spans)

    def levels(drawn: Strip) -> Curves:
        return tuple(drawn.memory_levels(rank, sizes) for rank in range(drawn.ranks if memory else 0))

    panels = [_Panel(name, drawn, room / duration, levels(drawn), framed) for name, drawn in strips.items()]
    body, y = list[str](), 0.0
    for panel in panels:
        body.append(f'<g transform="translate({LEFT},{y:.2f})">\n{"".join(panel.draw(duration))}</g>\n')
        y += panel.height
    key, high = _draw_legend(list(strips.values()), memory, marked, room + RIGHT)
    body.append(f'<g transform="translate({LEFT},{y + 8:.2f})">\n{key}</g>\n')
    w, h = LEFT + room + RIGHT, y + 8 + high
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{w:.2f}" height="{h:.2f}" viewBox="0 0 {w:.2f} {h:.2f}" '
        f'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="11" fill="{INK}">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{"".join(body)}</svg>\n'
    )


def _choose_width(strips: list[Strip], duration: float) -> Size:
    """Return a width that fits all labels, or at least the microbatches, limited to one or a few screens."""
    full = max((CELL * duration / drawn.unit for drawn in strips), default=0)
    brief = max((drawn.longest_microbatch * GLYPH * FONTS[-1] * duration / drawn.unit for drawn in strips), default=0)
    return min(max(full, NARROW), max(WIDE, 1.15 * brief if brief <= WIDEST else 0))


class _Panel(NamedTuple):
    """One timeline: a title, a row for each rank, and the time axis."""

    name: str
    drawn: Strip
    scale: Size
    memory: Curves
    marked: frozenset[Span]

    @property
    def pitch(self) -> Size:
        """The distance from one row to the next."""
        return ROW + GAP + (CURVE if self.memory else 0)

    @property
    def height(self) -> Size:
        return TITLE + self.pitch * self.drawn.ranks + AXIS

    def draw(self, duration: float) -> Iterator[str]:
        yield _text(0, TITLE - 8, self.name, 'font-weight="bold"')
        for rank in range(self.drawn.ranks):
            y = TITLE + rank * self.pitch
            yield _text(-8, y + ROW / 2 + 4, f"rank {rank}", 'text-anchor="end"')
            yield _rect(0, y, self.drawn.duration * self.scale, ROW, IDLE)
            yield from self._draw_row(self.drawn.spans[rank], y)
            if self.memory:
                yield from self._draw_memory(self.memory[rank], y + ROW + 1)
        yield from _draw_axis(duration, self.scale, TITLE + self.drawn.ranks * self.pitch)

    def _draw_row(self, row: tuple[Span, ...], y: Size) -> Iterator[str]:
        places = lanes_of([span.action.kind for span in row], [(span.start, span.end) for span in row])
        high = ROW / (max(places, default=0) + 1)
        # Draw marked spans and those of zero duration last, so that their neighbors do not cover them.
        for span, lane in sorted(zip(row, places, strict=True), key=lambda place: self._is_on_top(place[0])):
            yield self._draw_cell(span, y + lane * high, high)

    def _is_on_top(self, span: Span) -> bool:
        return span in self.marked or span.start == span.end

    def _draw_cell(self, span: Span, y: Size, high: Size) -> str:
        x, wide = self._x(span.start), (span.end - span.start) * self.scale
        what = f"{span.action} on rank {span.rank}, {span.start:g} to {span.end:g}: {look_of(span.action.kind).name}"
        frame = f'stroke="{MARKED}" stroke-width="{min(2, wide / 5):.2g}"' if span in self.marked else BORDER
        if span.waits:
            frame = ""
        elif not wide:
            x, wide, frame = x - 1, 2, ""
        cell = _rect(x, y, wide, high, self.drawn.color(span), frame, f"<title>{_escape(what)}</title>")
        label, font = self._fit_label(span, wide, high)
        style = f'text-anchor="middle" font-size="{font:g}" pointer-events="none"'
        return cell + (_text(x + wide / 2, y + high / 2 + font * 0.36, label, style) if label else "")

    def _fit_label(self, span: Span, wide: Size, high: Size) -> tuple[str, float]:
        """Return the label that fits a cell and its font size; cells of equal size get the same kind of label."""
        if span.waits:
            return "", 0
        for label, longest in (
            (self.drawn.label(span.action), self.drawn.longest),
            (str(span.action.microbatch), self.drawn.longest_microbatch),
        ):
            for font in FONTS:
                if longest * GLYPH * font <= wide and font <= high:
                    return label, font
        return "", 0

    def _draw_memory(self, levels: list[tuple[float, float]], y: Size) -> Iterator[str]:
        top = max((level for row in self.memory for _, level in row), default=0) or 1
        path = "".join(f"H{self._x(time):.2f}V{y + CURVE * (1 - max(level, 0) / top):.2f}" for time, level in levels)
        end, peak = self.drawn.duration * self.scale, max((level for _, level in levels), default=0)
        yield f'<path d="M0,{y + CURVE:.2f}{path}H{end:.2f}V{y + CURVE:.2f}Z" fill="{HELD}"/>\n'
        yield _text(end + 5, y + CURVE - 3, f"{peak:.3g}", f'font-size="9" fill="{FAINT}"')

    def _x(self, time: float) -> Size:
        return (time - self.drawn.begin) * self.scale


def _draw_axis(duration: float, scale: Size, y: Size) -> Iterator[str]:
    """Yield the time axis, with ticks at round numbers at least 50 pixels apart."""
    least = 50 / scale
    ten = 10.0 ** floor(log10(least))
    step = ten * next(factor for factor in (1, 2, 5, 10) if factor * ten >= least)
    yield f'<path d="M0,{y:.2f}H{duration * scale:.2f}" stroke="{FAINT}"/>\n'
    for count in range(floor(duration / step * (1 + 1e-9)) + 1):
        x = count * step * scale
        yield f'<path d="M{x:.2f},{y:.2f}v4" stroke="{FAINT}"/>\n'
        yield _text(x, y + 15, f"{count * step:g}", f'text-anchor="middle" font-size="9" fill="{FAINT}"')


def _draw_legend(strips: list[Strip], memory: bool, framed: Iterable[str], room: Size) -> tuple[str, Size]:
    """Return the legend of the colors, in as many lines as it takes, and its height."""
    used = set[str]().union(*(drawn.kinds for drawn in strips))
    entries = [
        (look_of(kind).color, "", f"{look_of(kind).letter} {look_of(kind).name}") for kind in LOOKS if kind in used
    ]
    entries += [(WAIT.color, "", WAIT.name)] * any(look_of(kind) is WAIT for kind in used)
    entries += [(IDLE, "", "idle"), *((IDLE, f'stroke="{MARKED}"', name) for name in framed)]
    if any(len(stages) > 1 for drawn in strips for stages in drawn.stages):
        entries.append(("none", "", "lighter: a later stage of the rank"))
    if memory:
        entries.append((HELD, "", "memory held, and the most of it"))
    x, y, drawn = 0.0, 0.0, list[str]()
    for color, style, words in entries:
        wide = 18 + 24 + len(words) * GLYPH * 11
        if x and x + wide > room:
            x, y = 0, y + 20
        drawn.append(_rect(x, y, 12, 12, color, style) + _text(x + 18, y + 10, words))
        x += wide
    return "".join(drawn), y + 20


def _rect(x: Size, y: Size, wide: Size, high: Size, color: str, style: str = "", inside: str = "") -> str:
    end = f">{inside}</rect>\n" if inside else "/>\n"
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{wide:.2f}" height="{high:.2f}" fill="{color}" {style}{end}'


def _text(x: Size, y: Size, words: str, style: str = "") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" {style}>{_escape(words)}</text>\n'


def _escape(words: str) -> str:
    """Return `words` escaped, with characters that XML does not allow replaced."""
    from html import escape  # rarely needed, and slow to import

    return escape(re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", words))
