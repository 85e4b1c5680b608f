# SPDX-License-Identifier: Apache-2.0
"""Four real processes train as one does, bit for bit, in pipelines of two and of four, and refuse together."""

import os
import subprocess
import sys
from pathlib import Path

from tests.distributed import training_worker

WORKER = Path(training_worker.__file__)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def test_four_processes_train_as_one_does(tmp_path):
    commands = [[sys.executable, "-W", "error", WORKER, str(rank), tmp_path / "store", tmp_path] for rank in range(4)]
    processes = [
        subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        printed = [process.communicate(timeout=1800)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(text.endswith("passed\n") for text in printed), "\n".join(printed)
