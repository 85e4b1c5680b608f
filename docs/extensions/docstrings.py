# SPDX-License-Identifier: Apache-2.0
"""Turn the docstrings of this repository into reStructuredText, so that autodoc can show them.

Our docstrings are written for people at a prompt: paragraphs, `code` in single backticks, bullets, doctests, and
indented examples. Sphinx wants double backticks, escaped stars, and `::` before an example. Full names, such as
`fpipe.verify`, become links.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PUBLIC = re.compile(r"(fpipe|schedules)\.[\w.]+")
CODE = re.compile(r"`([^`]+)`")
SPECIAL = re.compile(r"(?<!\w)(\*\w+\*)(?!\w)|([*|]|_\b)")  # emphasis, and what would begin a substitution or a link


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the hooks."""
    app.connect("autodoc-process-docstring", lambda app, kind, name, value, options, lines: convert(lines))
    app.connect("autodoc-process-signature", lambda app, kind, name, value, options, *texts: tidy(*texts))
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True}


def skip(app: Sphinx, kind: str, name: str, value: object, skipped: bool, options: object) -> bool | None:
    """Leave out the fields of named tuples that have no docstring but Python's own."""
    return True if (getattr(value, "__doc__", None) or "").startswith("Alias for field number") else None


def tidy(arguments: str | None, returned: str | None) -> tuple[str, str | None] | None:
    """Return a signature that Sphinx can parse: names for defaults without a literal, nothing for a protocol."""
    if not arguments:
        return None  # it stays as it is
    arguments = "" if arguments == "(*args, **kwargs)" else arguments
    return re.sub(r"<function (\w+)>", r"\1", arguments).replace("<factory>", "..."), returned


def convert(lines: list[str]) -> None:
    """Replace the lines of a docstring by the same in reStructuredText."""
    groups = groupby(lines, key=lambda line: bool(line.strip()))
    lines[:] = [line for filled, group in groups if filled for line in (*paragraph(list(group)), "")]


def paragraph(lines: list[str]) -> Iterator[str]:
    """Yield one paragraph: a doctest, an indented example, or text that may contain bullets."""
    if lines[0].lstrip().startswith(">>>"):
        yield from lines
    elif all(line.startswith("    ") for line in lines):
        yield from ("::", "", *lines)
    else:
        for number, line in enumerate(lines):
            if number and line.startswith("- ") and not any(earlier.startswith("- ") for earlier in lines[:number]):
                yield ""
            yield escape(line)


def escape(line: str) -> str:
    """Return a line of text with its code marked and everything else taken literally."""
    parts = CODE.split(line)  # text and code in turn
    return "".join(mark(part) if k % 2 else literal(part) for k, part in enumerate(parts))


def literal(text: str) -> str:
    """Return text without code; only emphasis keeps its meaning."""
    return SPECIAL.sub(lambda found: found[1] or f"\\{found[2]}", text)


def mark(code: str) -> str:
    """Return code in double backticks, and a full name as a link."""
    return f":py:obj:`{code}`" if PUBLIC.fullmatch(code) else f"``{code}``"
