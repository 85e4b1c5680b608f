# SPDX-License-Identifier: Apache-2.0
"""Steps per second over Gloo, beside torch.distributed.pipelining in the same run.

    python -m benchmarks.throughput

A GPT, under four schedules on 2 and on 4 ranks, one thread each. Both libraries train the same model on the same batch,
cut into the same stages and microbatches; a step is forward and backward with new gradients, from when all ranks are
ready to when all are done. Both must have computed the same gradients. Ours is measured twice: with stages that
autograd differentiates, which is the default, and with `backward="graph"`.

Each of the three has processes of its own, as it would have in use, in turn: in one process each would find the memory
that the others have left, and where. What is freed stays with a process: else how much of it goes back to the system,
only to be fetched again in the next step, is another share of the time in every start. Medians over all starts of
medians over steps.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.common import ranks
from benchmarks.common.contests import CONTESTS, Step, Task, incumbents, ours
from benchmarks.common.models import gpt
from benchmarks.common.rows import least, row

BLOCKS, WIDTH, HEADS, WORDS, LENGTH = 8, 256, 8, 256, 64
ROWS, MICROBATCHES, WARM_UP, TURNS, STARTS = 16, 8, 2, 7, 2
KEPT: Final = {"MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_MMAP_THRESHOLD_": str(2**33)}
SIDES: Final = {"autograd": ours, "graph": partial(ours, backward="graph"), "incumbent": incumbents}


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


def measured(step: Step) -> dict[str, Any]:
    """The norms of this rank's gradients, and the median seconds of a step."""
    norms = {name: grad.norm().item() for name, grad in step().items()}
    times = [timed(step) for _ in range(WARM_UP + TURNS)]
    return {"norms": norms, "seconds": statistics.median(times[WARM_UP:])}


def rank(side: str, *names: str) -> None:
    """One rank of one side."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work = task()
    ranks.report({name: measured(SIDES[side](CONTESTS[name], work)) for name in names})
    dist.destroy_process_group()


def norms(found: list[Any], name: str) -> dict[str, float]:
    """Those of all gradients, of what ranks have found under a schedule."""
    return {parameter: norm for one in found for parameter, norm in one[name]["norms"].items()}


def require_equal(mine: dict[str, float], others: dict[str, float]) -> None:
    """Fail unless both have computed the same gradients, up to rounding."""
    assert mine.keys() == others.keys(), (sorted(mine), sorted(others))
    different = [name for name, norm in mine.items() if not math.isclose(norm, others[name], rel_tol=1e-3)]
    assert not different, different


def contests(count: int, names: list[str]) -> dict[str, dict[str, float]]:
    """Median seconds of a step on so many ranks, by schedule and side."""
    starts: dict[str, list[list[Any]]] = {side: [] for side in SIDES}
    for _ in range(STARTS):
        for side, found in starts.items():
            found.append(ranks.start("benchmarks.throughput", count, side, *names, **KEPT))
    for name in names:
        for found in starts.values():
            require_equal(norms(found[0], name), norms(starts["incumbent"][0], name))
    return {
        name: {side: statistics.median(one[0][name]["seconds"] for one in found) for side, found in starts.items()}
        for name in names
    }


def main() -> None:
    millions = sum(parameter.numel() for parameter in task().model.parameters()) / 1e6
    for count in (2, 4):
        for name, found in contests(count, sys.argv[1:] or [*CONTESTS]).items():
            for way in ("autograd", "graph"):
                what = f"{CONTESTS[name].title}, {count} ranks, GPT of {millions:.1f} million parameters, {way} stages"
                print(row(what, "steps/s", 1 / found[way], 1 / found["incumbent"], least(1, of="ratio")), flush=True)


if __name__ == "__main__":
    rank(*sys.argv[1:]) if ranks.inside() else main()
