# SPDX-License-Identifier: Apache-2.0
"""The example of the drop-in module prints the same under python and under torchrun."""

import shlex
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "drop_in.py"
TORCHRUN = shlex.split("-m torch.distributed.run --standalone --nproc-per-node 2")


def run(*arguments):
    command = [sys.executable, *map(str, arguments), EXAMPLE, "--steps", "3"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_one_process_and_two_print_the_same():
    alone = run()
    assert run(*TORCHRUN) == alone
    assert [line.split()[:2] for line in alone.splitlines()[:2]] == [["step", "0"], ["step", "2"]]
    assert alone.endswith("% of the next words are right\n")


def test_the_example_fits_on_a_page():
    assert len(EXAMPLE.read_text().splitlines()) < 100
