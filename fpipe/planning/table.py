# SPDX-License-Identifier: Apache-2.0
"""A profile as text: a row for each block, with its times, what it keeps, and what crosses a cut before it.

Runs when a profile is printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fpipe.pipelines.description import format_bytes
from fpipe.planning.ranges import TIMED
from schedules import Link
from schedules.errors import printable

HEADER: Final = (
    *("", "block", "operations", *[f"{kind} ms" for kind in TIMED], "keeps", "after I", "parameters"),
    *("crosses", "back"),
)
FIRST, LAST, WIDEST = 30, 5, 44


def describe_profile(profile: Any) -> str:
    """Return the table of a profile; a long one is cut short in the middle."""
    rows = _rows(profile)
    hidden = len(rows) - FIRST - LAST
    shown = rows if hidden <= 1 else [*rows[:FIRST], ("", f"... {hidden} more"), *rows[-LAST:]]
    fixed = ", ".join(f"{kind} {_ms(time)}" for kind, time in zip(TIMED, profile.fixed, strict=True))
    lines = [
        f"Profile of {profile.model}: {len(profile.blocks)} blocks, differentiated {profile.backward}",
        f"microbatch  {_shorten(profile.microbatch, 84)}",
        f"device      {_shorten(profile.device, 84)}",
        f"an action   takes {fixed} ms, and the sum over the blocks of its stage",
        *([f"a step      takes {_ms(profile.step)} ms besides its actions"] if profile.step else []),
        *([f"a transfer  takes {_describe_link(profile.link)}"] if profile.link != Link() else []),
        "",
    ]
    return "\n".join(map(printable, [*lines, *_align([HEADER, *shown, _total(profile)])]))


def _rows(profile: Any) -> list[tuple[str, ...]]:
    ranges, count = profile.ranges, len(profile.blocks)
    values, cotangents = ranges.crossing
    tables = ranges.activation, ranges.residual, ranges.parameters
    columns = [[table[k, k + 1] for k in range(count)] for table in tables] + [values, cotangents]
    return [
        (
            str(k),
            _shorten(block.name, WIDEST),
            str(block.units),
            *map(_ms, profile.times[k]),
            *[format_bytes(int(column[k])) for column in columns],
        )
        for k, block in enumerate(profile.blocks)
    ]


def _total(profile: Any) -> tuple[str, ...]:
    """Return the row of the uncut model."""
    ranges, count = profile.ranges, len(profile.blocks)
    times = [_ms(float(ranges.sums[kind][-1])) for kind in TIMED]
    sizes = [int(table[0, count]) for table in (ranges.activation, ranges.residual, ranges.parameters)]
    return ("", "all", str(sum(block.units for block in profile.blocks)), *times, *map(format_bytes, sizes))


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines, numbers to the right; a short row lacks its last columns."""
    full = [[*row, *[""] * (len(HEADER) - len(row))] for row in rows]
    wide = [max(map(len, column)) for column in zip(*full, strict=True)]
    return [
        "  ".join(
            f"{cell:<{w}}" if k == 1 else f"{cell:>{w}}" for k, (cell, w) in enumerate(zip(row, wide, strict=True))
        ).rstrip()
        for row in full
    ]


def _describe_link(link: Link) -> str:
    rate = f" and {format_bytes(link.bandwidth)} per second" if link.bandwidth < float("inf") else ""
    slow = (
        f"; {len(link.slow)} pairs of ranks take up to {max(f for _, f in link.slow):.2g} times as long"
        if link.slow
        else ""
    )
    return f"{_ms(link.latency)} ms{rate}{slow}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}"


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
