# SPDX-License-Identifier: Apache-2.0
"""The table that all benchmarks print: `row` returns one of its lines.

>>> print(HEADER, row("a step", "s", 1.0, 2.0, most(0.6, of="ratio")), sep="\\n")
| what | unit | fpipe | torch | fpipe / torch | goal | met |
|---|---|---|---|---|---|---|
| a step | s | 1.00 | 2.00 | 0.500 | ratio <= 0.6 | yes |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

HEADER: Final = "| what | unit | fpipe | torch | fpipe / torch | goal | met |\n|---|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Reach:
    """The goal: a limit for our figure, or for its ratio to torch's."""

    limit: float
    relation: Literal["<=", ">="]
    of: Literal["figure", "ratio"]

    def met(self, figure: float) -> bool:
        """Return whether a figure is within the limit."""
        return figure <= self.limit if self.relation == "<=" else figure >= self.limit

    def __str__(self) -> str:
        return f"{'ratio ' if self.of == 'ratio' else ''}{self.relation} {self.limit:g}"


def most(limit: float, of: Literal["figure", "ratio"] = "figure") -> Reach:
    """Return the goal of at most `limit`."""
    return Reach(limit, "<=", of)


def least(limit: float, of: Literal["figure", "ratio"] = "figure") -> Reach:
    """Return the goal of at least `limit`."""
    return Reach(limit, ">=", of)


def row(what: str, unit: str, ours: float, theirs: float | None, reach: Reach | None = None) -> str:
    """Return a line of the table."""
    ratio = None if theirs is None else ours / theirs
    judged = ours if reach is None or reach.of == "figure" else ratio
    reached = "" if reach is None or judged is None else "yes" if reach.met(judged) else "no"
    cells = (what, unit, figure(ours), figure(theirs), figure(ratio), "" if reach is None else str(reach), reached)
    return f"| {' | '.join(cells)} |"


def missed(table: str) -> list[str]:
    """Return what the rows of a table are about that miss their goal.

    >>> missed(row("a step", "s", 1.0, 2.0, most(0.4, of="ratio")))
    ['a step']
    """
    return [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.endswith("| no |")]


def figure(value: float | None) -> str:
    """Return a number to three digits, or an empty text for `None`."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:#.3g}"
