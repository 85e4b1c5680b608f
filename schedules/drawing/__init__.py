# SPDX-License-Identifier: Apache-2.0
"""Pictures of timelines: text for terminals, SVG, and trace files for Perfetto and `chrome://tracing`."""

from schedules.drawing.events import trace
from schedules.drawing.lines import text, texts
from schedules.drawing.pages import Panel, page
from schedules.drawing.palette import ansi, legend, plain
from schedules.drawing.vector import svg

__all__ = ["Panel", "ansi", "legend", "page", "plain", "svg", "text", "texts", "trace"]
