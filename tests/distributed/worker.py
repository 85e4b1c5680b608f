# SPDX-License-Identifier: Apache-2.0
"""One rank of a job that runs named cases, one after the other, and records how each went.

    python worker.py REPORT

This is what torchrun starts; ranks that are started by hand call `main`.

Starting a process costs seconds and a case costs a fraction of one, so a job runs many. The cases are in
`tests/distributed/cases`. A case that raises is reported with its traceback, and ends the job, since the other ranks
may then wait for messages that never come.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import fpipe  # noqa: F401  (as in any script: a process that a case spawns imports this file, but needs no cases)

if __name__ != "__mp_main__":
    from tests.distributed.cases import CASES
    from tests.distributed.cases.checks import names

PATIENCE = timedelta(minutes=10)  # ends what hangs, and nothing else, however slow the machine is


def groups() -> set[dist.ProcessGroup]:
    """Return the process groups that exist now."""
    return set(distributed_c10d._world.pg_map)


def end(before: set[dist.ProcessGroup]) -> None:
    """Destroy the channels of a case's pipelines: each has threads, and a thousand slow down all later cases.

    Which of them are left depends on what a rank has collected already, so all ranks meet, whatever is left on one.
    """
    if dist.is_initialized():
        dist.barrier()
        for group in groups() - before:
            if not group.group_desc.startswith(("control group", "mesh_")):  # DTensor keeps meshes for ever
                dist.destroy_process_group(group)


def main(rank: int, count: str, report: str, *chosen: str) -> None:
    """Be one of `count` ranks that were started by hand; see `run`."""
    size = int(count)
    dist.init_process_group("gloo", timeout=PATIENCE, init_method=f"file://{report}/store", rank=rank, world_size=size)
    run(rank, size, report, chosen)


def run(rank: int, size: int, report: str, chosen: Sequence[str] = ()) -> None:
    """Run the chosen cases, or all of a job of this size, and write the results to `report`/`rank`.json."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "The tensor attributes self.*_flat_weights")  # torch's own, of nn.GRU
    os.environ["REPORT"] = report
    results: dict[str, str] = {}
    path = Path(report) / f"{rank}.json"
    try:
        for name in chosen or names(size):
            start, busy, before = time.perf_counter(), time.process_time(), groups()
            torch.manual_seed(0)
            CASES[name].run(rank, size)
            end(before)
            took, busy = time.perf_counter() - start, time.process_time() - busy
            results[name] = f"passed in {took:.2f} s, of which it computed {busy:.2f} s"
            path.write_text(json.dumps(results))
    except BaseException:
        results[name] = traceback.format_exc()
        path.write_text(json.dumps(results))
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=PATIENCE)
    run(dist.get_rank(), dist.get_world_size(), sys.argv[1])
