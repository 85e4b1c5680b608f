# SPDX-License-Identifier: Apache-2.0
"""Steps per second over Gloo, beside torch.distributed.pipelining in the same processes.

    python -m benchmarks.throughput

A GPT, under four schedules on 2 and on 4 ranks, one thread each. Both libraries train the same model on the same batch,
cut into the same stages and microbatches, and take turns; a step is forward and backward with new gradients, from when
all ranks are ready to when all are done. Medians. Both must have computed the same gradients. Ours is measured twice:
with stages that autograd differentiates, which is the default, and with `backward="graph"`.

What is freed stays with a process. Else each would find the memory that the others have left, and where; and how much
of it goes back to the system, only to be fetched again a step later, depends on who runs before whom.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Final

import torch
import torch.distributed as dist

from benchmarks.common import ranks
from benchmarks.common.contests import CONTESTS, Contest, Step, Task, incumbents, ours, require_equal
from benchmarks.common.models import gpt
from benchmarks.common.rows import least, row

BLOCKS, WIDTH, HEADS, WORDS, LENGTH = 8, 256, 8, 256, 64
ROWS, MICROBATCHES, WARM_UP, TURNS = 16, 8, 2, 9
KEPT: Final = {"MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_MMAP_THRESHOLD_": str(2**33)}


def task() -> Task:
    """The same in every process."""
    torch.manual_seed(0)
    model = gpt(BLOCKS, WIDTH, HEADS, WORDS, LENGTH)
    tokens, targets = torch.randint(0, WORDS, (2, ROWS, LENGTH))
    return Task(model, BLOCKS, tokens, targets, MICROBATCHES)


def timed(step: Step) -> float:
    """Seconds of one step on all ranks."""
    dist.barrier()
    start = time.perf_counter()
    step()
    return ranks.makespan(start, time.perf_counter())


def contest(of: Contest, work: Task) -> dict[str, float]:
    """Median seconds of all."""
    steps = {
        "autograd": ours(of, work),
        "graph": ours(of, work, backward="graph"),
        "incumbent": incumbents(of, work),
    }
    expected = steps["incumbent"]()
    for step in steps.values():
        require_equal(step(), expected)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM_UP + TURNS):
        for name, step in steps.items():
            times[name] += [timed(step)] * (turn >= WARM_UP)
    return {name: statistics.median(found) for name, found in times.items()}


def rank(*names: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work = task()
    ranks.report({name: contest(CONTESTS[name], work) for name in names or CONTESTS})
    dist.destroy_process_group()


def main() -> None:
    millions = sum(parameter.numel() for parameter in task().model.parameters()) / 1e6
    for count in (2, 4):
        for name, found in ranks.start("benchmarks.throughput", count, *sys.argv[1:], **KEPT)[0].items():
            for way in ("autograd", "graph"):
                what = f"{CONTESTS[name].title}, {count} ranks, GPT of {millions:.1f} million parameters, {way} stages"
                print(row(what, "steps/s", 1 / found[way], 1 / found["incumbent"], least(1, of="ratio")), flush=True)


if __name__ == "__main__":
    rank(*sys.argv[1:]) if ranks.inside() else main()
