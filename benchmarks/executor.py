# SPDX-License-Identifier: Apache-2.0
"""The executor's own time per compute action, of this version and of an earlier one.

    python -m benchmarks.executor REVISION
    python -m benchmarks.executor REVISION --instructions

All ranks of 1F1B are in one process, and stages do nothing (`benchmarks.common.empty_stages`). Two processes, one per
version, take turns; what is compared is their processor time, so that other work on the machine disturbs both alike.
With `--instructions`, valgrind counts instructions instead, which no other work disturbs.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
ROUNDS, STEPS = 400, 20
COUNTED = (50, 150)
"""Numbers of steps; the difference of their instructions is that of the steps in between."""


def unpack(revision: str, folder: Path) -> Path:
    """Write the sources of a revision to a folder; return it."""
    packed = subprocess.run(
        ["git", "archive", revision, "fpipe", "schedules"], cwd=HERE.parent, check=True, capture_output=True
    )
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def time_versions(folders: Sequence[Path]) -> list[list[float]]:
    """Return the nanoseconds per action of each version, round by round."""
    command = [sys.executable, str(HERE / "common" / "empty_stages.py")]
    sides = [
        subprocess.Popen([*command, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for folder in folders
    ]
    found: list[list[float]] = [[] for _ in sides]
    for _ in range(ROUNDS):
        for side, times in zip(sides, found, strict=True):
            assert side.stdin is not None
            assert side.stdout is not None
            side.stdin.write(f"{STEPS}\n")
            side.stdin.flush()
            times.append(float(side.stdout.readline()))
    for side in sides:
        side.communicate()
    return found


def count_instructions(folder: Path) -> float:
    """Return the machine instructions of an action."""
    totals = []
    for steps in COUNTED:
        command = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null", sys.executable]
        command += [str(HERE / "common" / "empty_stages.py"), str(folder)]
        done = subprocess.run(command, input=f"{steps}\n", check=True, capture_output=True, text=True)
        (count,) = re.findall(r"I\s+refs:\s+([\d,]+)", done.stderr)
        totals.append(int(count.replace(",", "")))
    return (totals[1] - totals[0]) / (COUNTED[1] - COUNTED[0]) / 256


def main() -> None:
    """Compare the versions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("revision", help="the earlier version, as git names it")
    parser.add_argument("--instructions", action="store_true", help="count instructions with valgrind")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        folders = [unpack(options.revision, Path(scratch)), HERE.parent]
        if options.instructions:
            before, now = map(count_instructions, folders)
            print(f"instructions per action: {before:.0f} then, {now:.0f} now, {now / before - 1:+.1%}")
            return
        then, after = time_versions(folders)
    ratio = median(b / a for a, b in zip(then, after, strict=True))
    print(f"nanoseconds per action, least (median): {min(then):.0f} ({median(then):.0f}) then, ", end="")
    print(f"{min(after):.0f} ({median(after):.0f}) now; {ratio:.3f} times as long in the median of rounds")


if __name__ == "__main__":
    main()
