# SPDX-License-Identifier: Apache-2.0
"""The example of generation prints the same tokens on one process and on two."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "generate.py"
TINY = shlex.split("--layers 2 --width 16 --prompts 4 --groups 2 --context 4 --count 4")
TORCHRUN = shlex.split("-m torch.distributed.run --standalone --nproc-per-node 2")


def test_one_process_and_two_print_the_same_tokens():
    commands = [[sys.executable, *start, str(EXAMPLE), *TINY] for start in ([], TORCHRUN)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    printed = [process.communicate(timeout=600)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    alone, pair = (re.findall(r"^(?:likeliest|drawn) .*$", text, re.MULTILINE) for text in printed)
    assert len(alone) == 2
    assert alone == pair
    assert all("all 16 tokens are those of the plain loop" in text for text in printed)


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 100
