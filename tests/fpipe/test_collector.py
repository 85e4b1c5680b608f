# SPDX-License-Identifier: Apache-2.0
"""Importing fpipe makes nobody wait for the garbage collector, and leaves it as it was."""

import subprocess
import sys

import pytest

SCRIPT = """
import gc
import torch
import torch.distributed

found = []
gc.callbacks.append(lambda phase, info: found.append(info["generation"]))
gc.{0}()
import fpipe.api
assert len(found) <= 2 * gc.isenabled() and 2 not in found, found  # one young generation, at the end
assert gc.isenabled() is ("{0}" == "enable")
"""


@pytest.mark.parametrize("before", ["enable", "disable"])
def test_an_import_is_not_interrupted_by_the_collector(before):
    subprocess.run([sys.executable, "-c", SCRIPT.format(before)], check=True)
