# SPDX-License-Identifier: Apache-2.0
"""Run several Python processes at once: ranks started by hand, or by torchrun."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIMIT = 1800  # seconds; a job that hangs is ended long before by the timeout of its group
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node {} --max-restarts {}"


def finish(commands: Sequence[Sequence[object]], folder: Path, limit: float = LIMIT) -> tuple[list[int], list[str]]:
    """Run these commands at the same time; return their exit codes and outputs.

    A process that runs longer than `limit` seconds, or 600 seconds after another failed, is killed with its children.
    """
    logs = [folder / f"log-{k}" for k in range(len(commands))]
    processes = [begin(command, log) for command, log in zip(commands, logs, strict=True)]
    deadline = time.monotonic() + limit
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + 600)
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return [process.wait() for process in processes], [log.read_text() for log in logs]


def begin(command: Sequence[object], log: Path) -> subprocess.Popen[Any]:
    """Start a command; its output goes to `log`."""
    with log.open("w") as out:
        return subprocess.Popen(
            [sys.executable, "-W", "error", *map(str, command)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT,
            start_new_session=True,
        )


def finish_workers(worker: Path, count: int, folder: Path) -> None:
    """Run `worker RANK STORE FOLDER` as so many ranks; raise unless each ends with `passed`."""
    codes, printed = finish([(worker, rank, folder / "store", folder) for rank in range(count)], folder)
    assert not any(codes), "\n".join(printed)
    assert all(text.endswith("passed\n") for text in printed), "\n".join(printed)


def run_under_torchrun(script: Path, *options: object, ranks: int = 2, restarts: int = 0) -> tuple[int, str, str]:
    """Run a script with one process per rank; return its exit code and what it printed."""
    command = [sys.executable, *shlex.split(TORCHRUN.format(ranks, restarts)), script, *options]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=900, check=False, env=ENVIRONMENT
    )
    return done.returncode, done.stdout, done.stderr
