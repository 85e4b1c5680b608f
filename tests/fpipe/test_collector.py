# SPDX-License-Identifier: Apache-2.0
"""Importing fpipe makes nobody wait for the garbage collector, and leaves it as it was."""

import subprocess
import sys

import pytest

SCRIPT = """
import gc, os, sys
import torch
import torch.distributed

for before in ("enable", "disable"):  # each in a fork: torch is imported once
    child = os.fork()
    if not child:
        found = []
        gc.callbacks.append(lambda phase, info: found.append(info["generation"]))
        getattr(gc, before)()
        import fpipe.api
        young = len(found) <= 2 * gc.isenabled() and 2 not in found  # one young generation, at the end
        print(before, "did not interrupt" if young else found, "and is now", gc.isenabled(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def said():
    return subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(("before", "after"), [("enable", True), ("disable", False)])
def test_an_import_is_not_interrupted_by_the_collector(before, after, said):
    assert f"{before} did not interrupt and is now {after}\n" in said
