# SPDX-License-Identifier: Apache-2.0
"""Ranks as separate processes over Gloo: a script starts itself again as each rank, and reads their reports.

if ranks.inside():
    ranks.report(measure())
else:
    found = ranks.start("benchmarks.script", 4)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import torch.distributed as dist

FOLDER: Final = "BENCHMARK_FOLDER"


class UnfinishedError(RuntimeError):
    """A job failed, or was stopped; `found` are the last reports of its ranks, those that wrote one."""

    def __init__(self, why: str, found: list[Any]) -> None:
        super().__init__(why)
        self.found = found


def start(module: str, count: int, *arguments: object, **environment: str) -> list[Any]:
    """Run `python -m module *arguments` as `count` ranks with one thread each, and return what each has reported.

    The ranks are forks of a process that has imported the module.
    """
    return _fork("warm", module, count, arguments, environment)


def start_fresh(module: str, count: int, *arguments: object, **environment: str) -> list[Any]:
    """Do the same with ranks that import everything by themselves."""
    return _fork("fresh", module, count, arguments, environment)


def start_within(limit: float, module: str, count: int, *arguments: object, **environment: str) -> list[Any]:
    """Do the same under torchrun; raise `UnfinishedError` after `limit` seconds."""
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m", module]
    return _run(limit, command, module, count, arguments, environment)


def _fork(way: str, module: str, count: int, arguments: Iterable[object], environment: Mapping[str, str]) -> list[Any]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as an agent of torchrun holds it
    own = {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port), "WORLD_SIZE": str(count)}
    own |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    command = ["benchmarks.common.forks", way, module, str(count)]
    return _run(None, command, module, count, arguments, {**own, **environment})


def _run(
    limit: float | None,
    command: Sequence[str],
    module: str,
    count: int,
    arguments: Iterable[object],
    environment: Mapping[str, str],
) -> list[Any]:
    """Run a command that starts ranks; raise `UnfinishedError` if a rank fails, or after `limit` seconds."""
    with TemporaryDirectory() as folder:
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", FOLDER: folder}
        why = ""
        with subprocess.Popen(
            [sys.executable, "-m", *command, *map(str, arguments)], env={**os.environ, **own, **environment}
        ) as job:
            try:
                if code := job.wait(limit):
                    why = f"exit code {code}; its output says why"
            except subprocess.TimeoutExpired:
                why = f"not finished after {limit:.0f} s"
            finally:
                job.terminate()  # its ranks stop then, too
        paths = [Path(folder) / f"{rank}.json" for rank in range(count)]
        found = [json.loads(path.read_text()) for path in paths if path.exists()]
    if why:
        raise UnfinishedError(f"{module} with {count} ranks: {why}", found)
    return found


def inside() -> bool:
    """Return whether this process is a rank started by `start`."""
    return FOLDER in os.environ


def report(found: object) -> None:
    """Report a JSON value to the process that started this rank. Every rank must call it, and waits for all others.

    A rank that exits while others still communicate with it may be aborted by its own threads.
    """
    write(found)
    dist.barrier()


def write(found: object) -> None:
    """Report a JSON value, and wait for nobody."""
    (Path(os.environ[FOLDER]) / f"{dist.get_rank()}.json").write_text(json.dumps(found))


def everywhere(value: float) -> list[float]:
    """Return the values of all ranks."""
    found = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([value], dtype=torch.float64))
    return [other.item() for other in found]


def makespan(start: float, end: float) -> float:
    """Return the time from the first start on any rank to the last end; processes on one machine share a clock."""
    return max(everywhere(end)) - min(everywhere(start))


def maxima(found: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the maximum of each figure over the ranks' reports."""
    reports = list(found)
    return {name: max(report[name] for report in reports) for name in reports[0]}
