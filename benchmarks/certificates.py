# SPDX-License-Identifier: Apache-2.0
"""The time and memory that certificates take, by the number of ranks.

    python -m benchmarks.certificates [RANKS ...]

1F1B of 64 microbatches. `certify` lowers the schedule, makes the certificate and writes the file; then
`schedules/certificate.py` checks it, alone. Each runs in a process of its own; times are those of the processor, and
memory is the most that the process had.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from benchmarks.common.rows import row
from schedules import certificate

MICROBATCHES: Final = 64
COUNTS: Final = ("256", "4096")
MAKER: Final = (
    "from schedules import Costs, certify, one_f_one_b\n"
    "certify(one_f_one_b(ranks={}, microbatches={}), Costs(F=1, B=2, comm=0.125)).save({!r})"
)


class Usage(NamedTuple):
    """The processor time and the most memory of a process."""

    seconds: float
    mib: float


def measure(*arguments: str) -> Usage:
    """Run Python with these arguments, and return what it used."""
    child = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"got exit code {child.returncode} of {arguments}, expected 0")
    return Usage(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def main() -> None:
    for ranks in map(int, sys.argv[1:] or COUNTS):
        with TemporaryDirectory() as folder:
            path = str(Path(folder) / "plan.json")
            made = measure("-c", MAKER.format(ranks, MICROBATCHES, path))
            checked = measure(certificate.__file__, path)
            size = Path(path).stat().st_size / 2**20
        of = f"1F1B of {ranks:,} ranks x {MICROBATCHES} microbatches"
        actions = 2 * MICROBATCHES * (ranks + 3 * (ranks - 1))
        print(row(f"certify {of}, {actions:,} actions with transfers", "s", made.seconds, None))
        print(row("the same, memory", "MiB", made.mib, None))
        print(row("check the file, alone", "s", checked.seconds, None))
        print(row("the same, memory", "MiB", checked.mib, None))
        print(row("the file", "MiB", size, None), flush=True)


if __name__ == "__main__":
    main()
