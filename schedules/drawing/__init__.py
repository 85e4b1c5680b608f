# SPDX-License-Identifier: Apache-2.0
"""Pictures of timelines: text for terminals, SVG, PDF and TikZ, pages to look at, and trace files for Perfetto."""

from schedules.drawing.events import read_trace, trace
from schedules.drawing.lines import text, texts
from schedules.drawing.notebooks import sketch
from schedules.drawing.pages import Panel, page
from schedules.drawing.palette import ansi, legend, plain
from schedules.drawing.shapes import Picture
from schedules.drawing.vector import Style, draw, svg

__all__ = [
    "Panel",
    "Picture",
    "Style",
    "ansi",
    "draw",
    "legend",
    "page",
    "plain",
    "read_trace",
    "sketch",
    "svg",
    "text",
    "texts",
    "trace",
]
