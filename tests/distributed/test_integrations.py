# SPDX-License-Identifier: Apache-2.0
"""Accelerate, Lightning and the Trainer of transformers train a drop-in module on two ranks with the bits of one
device. Each test needs its library, from `pip install fpipe[integrations]`."""

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "integration_worker.py"
TORCHRUN = shlex.split("-m torch.distributed.run --standalone --nproc-per-node 2")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize("library", ["accelerate", "lightning", "transformers"])
def test_two_ranks_train_as_one_device(library, tmp_path):
    for needed in {"accelerate" if library == "transformers" else library, library}:
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    command = [sys.executable, *TORCHRUN, WORKER, library, tmp_path]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=600, env=ENVIRONMENT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("passed") == 2
