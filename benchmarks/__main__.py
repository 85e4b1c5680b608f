# SPDX-License-Identifier: Apache-2.0
"""Run all benchmarks and write one table of their measurements, with date, machine and versions.

    python -m benchmarks                        # all, into docs/benchmarks.md
    python -m benchmarks splitting throughput   # some, printed
    python -m benchmarks --quick                # all, with fewer rounds, printed: rough figures in a few minutes

Each is a separate program that prints rows of the table, and may print more tables under a heading. Its docstring says
what it measures. If one fails, the others still run; the table says so, and the run ends with an error.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.common.machine import machine
from benchmarks.common.rounds import QUICK
from benchmarks.common.rows import HEADER, missed, most, row

FOLDER: Final = Path(__file__).parent
PAGE: Final = FOLDER.parent / "docs" / "benchmarks.md"
NAMES: Final = (
    "splitting",
    "overhead",
    "parameters",
    "loading",
    "saving",
    "throughput",
    "meshes",
    "llama",
    "prediction",
    "startup",
    "building",
    "memory",
    "crossings",
    "planning",
    "certificates",
    "searching",
    "profiling",
    "proving",
    "agreement",
    "loops",
    "updates",
    "streams",
    "slices",
    "generation",
    "audits",
)
ARGUMENTS: Final = {
    "searching": ("--seconds", "1", "--ranks", "8"),
    "certificates": ("256", "1024"),
    "proving": ("31",),
    "memory": ("safetensors", "whole model"),
    "generation": ("graph",),
    "audits": ("one_f_one_b",),
}
"""The arguments of those that would take too long for the page without."""
MINUTES: Final = 15


class Found(NamedTuple):
    """The output of a benchmark: its rows, what comes below the table, and the `seconds` it ran."""

    name: str
    rows: str
    details: str
    failed: bool
    seconds: float


def run(name: str) -> Found:
    """Run one benchmark."""
    start = time.perf_counter()
    command, here = [sys.executable, "-m", f"benchmarks.{name}", *ARGUMENTS.get(name, ())], FOLDER.parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=here, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    rows, _, details = done.stdout.partition("\n## ")
    failed = done.returncode != 0
    rows = rows.strip() or f"| {name}: failed | | | | | | |"
    return Found(name, rows, f"## {details.strip()}" if details else "", failed, time.perf_counter() - start)


def notes(one: Found) -> str:
    """Return the docstring of a benchmark under a heading; its command, being indented, shows as code."""
    text = ast.get_docstring(ast.parse((FOLDER / f"{one.name}.py").read_text())) or ""
    return f"### `benchmarks/{one.name}.py`, {one.seconds:.0f} s\n\n{text}"


def page(found: list[Found]) -> str:
    """Return the whole page."""
    minutes = sum(one.seconds for one in found) / 60
    head = (
        "# Benchmarks\n\n`make bench` writes this page. The column `torch` is `torch.distributed.pipelining` "
        "of the same version, measured in the same run; it is empty if torch has nothing comparable. One thread per "
        "process."
        f"\n\n{machine()}."
    )
    took = row("all benchmarks of this page", "minutes", minutes, None, most(MINUTES))
    table = "\n".join([HEADER, *(one.rows for one in found), took])
    behind = missed(table)
    goals = f"Goals not met, {len(behind)}: {'; '.join(behind)}." if behind else "All goals are met."
    parts = [head, goals, table, *[one.details for one in found if one.details], "## What was measured"]
    return "\n\n".join([*parts, *map(notes, found)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="the benchmarks to run; by default, all")
    parser.add_argument("--quick", action="store_true", help="run fewer rounds")
    options = parser.parse_args()
    if options.quick:
        os.environ[QUICK] = "1"
    found = []
    for name in options.names or NAMES:
        found.append(run(name))
        print(f"{name}: {found[-1].seconds:.0f} s", *found[-1][1:3], sep="\n", flush=True)
    if not (options.names or options.quick):
        PAGE.write_text(page(found))
        print(f"written to {PAGE}")
    return max(one.failed for one in found)


if __name__ == "__main__":
    sys.exit(main())
