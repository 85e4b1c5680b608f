# SPDX-License-Identifier: Apache-2.0
"""What is printed: columns, colours, tables."""

from __future__ import annotations

import os
import shutil
import sys

from schedules import drawing
from schedules.drawing.palette import Paint


def table(rows: list[list[str]]) -> str:
    """Columns to the right, but for the first.

    >>> print(table([["rank", "busy"], ["0", "12"]]))
    rank  busy
    0       12
    """
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{wide[0]}}" if at == 0 else f"{cell:>{wide[at]}}" for at, cell in enumerate(row)).rstrip()
        for row in rows
    )


def columns(otherwise: int) -> int:
    """How wide the terminal is, if there is one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else otherwise


def paint() -> Paint:
    """Colours, if there is a terminal that has them and nobody asked for none (no-color.org)."""
    wanted = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return drawing.ansi if wanted else drawing.plain
