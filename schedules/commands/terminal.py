# SPDX-License-Identifier: Apache-2.0
"""Terminal output: columns, colors, tables."""

from __future__ import annotations

import os
import shutil
import sys

from schedules import drawing
from schedules.drawing.palette import Paint


def format_table(rows: list[list[str]]) -> str:
    """Return the rows in columns, aligned to the right except the first.

    >>> print(format_table([["rank", "busy"], ["0", "12"]]))
    rank  busy
    0       12
    """
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{wide[0]}}" if at == 0 else f"{cell:>{wide[at]}}" for at, cell in enumerate(row)).rstrip()
        for row in rows
    )


def terminal_width(otherwise: int) -> int:
    """Return the width of the terminal, or `otherwise` if there is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else otherwise


def choose_paint() -> Paint:
    """Return how to paint: in color if the terminal supports it and `NO_COLOR` is not set (no-color.org)."""
    wanted = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return drawing.ansi if wanted else drawing.plain
