# SPDX-License-Identifier: Apache-2.0
"""Terminal output: columns, colors, tables."""

from __future__ import annotations

import os
import shutil
import sys
from textwrap import fill

from schedules import drawing
from schedules.drawing.palette import Paint


def format_table(rows: list[list[str]], width: int = sys.maxsize) -> str:
    """Return the rows in columns, aligned to the right except the first.

    If that is wider than `width`, the first cell of each row goes on a line of its own, above the others.

    >>> print(format_table([["rank", "busy"], ["0", "12"]]))
    rank  busy
    0       12
    """
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if sum(wide) + 2 * (len(wide) - 1) > width:
        rest = format_table([["", *row[1:]] for row in rows]).split("\n")
        return "\n".join(line for row, cells in zip(rows, rest, strict=True) for line in (row[0], cells) if line)
    return "\n".join(
        "  ".join(f"{cell:<{wide[0]}}" if at == 0 else f"{cell:>{wide[at]}}" for at, cell in enumerate(row)).rstrip()
        for row in rows
    )


def wrap_paragraphs(text: str, width: int, indent: str = "") -> str:
    """Return the paragraphs of a text, each broken into lines of at most `width` characters.

    >>> print(wrap_paragraphs("one two three\\n\\nfour", 8, "  "))
      one
      two
      three
    <BLANKLINE>
      four
    """
    paragraphs = (" ".join(one.split()) for one in text.split("\n\n"))
    return "\n\n".join(fill(one, max(width, 20), initial_indent=indent, subsequent_indent=indent) for one in paragraphs)


def terminal_width(otherwise: int) -> int:
    """Return the width of the terminal, at least 1, or `otherwise` if there is none."""
    return max(1, shutil.get_terminal_size().columns) if is_terminal() else otherwise


def is_terminal() -> bool:
    """Return whether the output goes to a terminal; it may be closed."""
    return sys.stdout is not None and sys.stdout.isatty()


def choose_paint() -> Paint:
    """Return how to paint: in color if the terminal supports it and `NO_COLOR` is not set (no-color.org)."""
    wanted = is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return drawing.ansi if wanted else drawing.plain
