# SPDX-License-Identifier: Apache-2.0
"""The example of generation prints the same tokens on one process and on two."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.common.sizes import NIGHTLY

EXAMPLE = Path(__file__).parents[2] / "examples" / "generate.py"
TINY = shlex.split("--layers 2 --width 16 --prompts 4 --groups 2 --context 4 --count 4")
TORCHRUN = shlex.split("-m torch.distributed.run --standalone --nproc-per-node 2")


def test_one_process_and_two_print_the_same_tokens():
    """By day one process, compared with the plain loop; by night two more."""
    starts = ([], TORCHRUN) if NIGHTLY else ([],)
    commands = [[sys.executable, *start, str(EXAMPLE), *TINY] for start in starts]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    printed = [process.communicate(timeout=600)[0] for process in running]
    assert not any(process.returncode for process in running)
    found = [re.findall(r"^(?:likeliest|drawn) .*$", text, re.MULTILINE) for text in printed]
    assert len(found[0]) == 2
    assert all(one == found[0] for one in found)
    assert all("all 16 tokens are those of the plain loop" in text for text in printed)


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 100
