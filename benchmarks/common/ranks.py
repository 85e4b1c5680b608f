# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes of their own, over Gloo: a script starts itself again, once per rank, and reads what each found.

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
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import torch.distributed as dist

FOLDER: Final = "BENCHMARK_FOLDER"


def start(module: str, count: int, *arguments: object, **environment: str) -> list[Any]:
    """Run `python -m module *arguments` as so many ranks, one thread each; what each has reported."""
    with TemporaryDirectory() as folder:
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        command = [sys.executable, "-m", *torchrun, "-m", module, *map(str, arguments)]
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", FOLDER: folder}
        subprocess.run(command, check=True, env={**os.environ, **own, **environment})
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(count)]


def inside() -> bool:
    """Whether this process is a rank that `start` has started."""
    return FOLDER in os.environ


def report(found: object) -> None:
    """Hand a value, of what JSON has, to the process that started this rank; every rank does, and waits for all.

    Who leaves while others still talk to it may be aborted by its own threads.
    """
    (Path(os.environ[FOLDER]) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()


def everywhere(value: float) -> list[float]:
    """The number that each rank has."""
    found = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([value], dtype=torch.float64))
    return [other.item() for other in found]


def makespan(start: float, end: float) -> float:
    """From the first start on any rank to the last end; the processes of one machine have one clock."""
    return max(everywhere(end)) - min(everywhere(start))


def maxima(found: Iterable[dict[str, float]]) -> dict[str, float]:
    """Of each figure the largest that a rank has reported."""
    reports = list(found)
    return {name: max(report[name] for report in reports) for name in reports[0]}
