# SPDX-License-Identifier: Apache-2.0
"""Run several Python processes at once: ranks started by hand, or by torchrun."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from tests.common import ranks

T = TypeVar("T")
FORKS = ranks.__file__
LIMIT = 1800  # seconds; a job that hangs is ended long before by the timeout of its group
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node {} --max-restarts {}"


def finish(command: Sequence[object], log: Path, limit: float = LIMIT) -> int:
    """Run a command, whose output goes to `log`, and return its exit code.

    After `limit` seconds, it is killed with its children.
    """
    with log.open("w") as out:
        command = [sys.executable, "-W", "error", *map(str, command)]
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=ENVIRONMENT, start_new_session=True
        )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def finish_ranks(module: str, count: int, folder: Path, *arguments: object) -> tuple[list[int], list[str]]:
    """Run `main(rank, *arguments)` of a module in `count` processes; return their exit codes and outputs."""
    code = finish((FORKS, module, count, folder, *arguments), folder / "log")
    ends, logs = folder / "codes.json", sorted(folder.glob("log-*"))
    codes = json.loads(ends.read_text()) if ends.exists() else [code] * count
    return codes, [log.read_text() for log in logs or [folder / "log"]]


def once(factory: pytest.TempPathFactory, name: str, start: Callable[[Path], T]) -> T:
    """Return what `start(folder)` returns, a value of JSON; only the first process of this session to ask runs it."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = folder / "returned.json"
        if not found.exists():
            found.write_text(json.dumps(start(folder)))
        value: T = json.loads(found.read_text())
        return value


def run_under_torchrun(script: Path, *options: object, ranks: int = 2, restarts: int = 0) -> tuple[int, str, str]:
    """Run a script with one process per rank; return its exit code and what it printed."""
    command = [sys.executable, *shlex.split(TORCHRUN.format(ranks, restarts)), script, *options]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=900, check=False, env=ENVIRONMENT
    )
    return done.returncode, done.stdout, done.stderr
