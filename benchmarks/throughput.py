# SPDX-License-Identifier: Apache-2.0
"""Steps per second over Gloo, compared with torch.distributed.pipelining.

    python -m benchmarks.throughput [SCHEDULE ...]

A GPT, under four schedules on 2 and on 4 ranks, one thread each. Both libraries train the same model on the same batch,
cut into the same stages and microbatches. A step is forward and backward with fresh gradients, from when all ranks are
ready to when all are done. Both must compute the same gradients.

Each runs in separate processes, and they take turns, so that both meet the same other work on the machine. A turn is
two steps, of which the second is timed: the first brings back what the other side has pushed out of the caches. Even
identical processes differ by a few percent, depending on the layout of their memory, so all are started twice; medians
of all six timed steps. From run to run, their ratio varies by up to 5 %.
Freed memory stays with a process: how much would be returned to the system, only to be fetched again a step later, is a
matter of luck.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch
import torch.distributed as dist

from benchmarks.common import ranks
from benchmarks.common.contests import CONTESTS, Contest, Step, Task, incumbents, ours, require_equal, sequence
from benchmarks.common.jobs import taken, turns
from benchmarks.common.models import gpt
from benchmarks.common.rounds import rounds
from benchmarks.common.rows import least, row

BLOCKS, WIDTH, HEADS, WORDS, LENGTH = 8, 256, 8, 256, 64
ROWS, MICROBATCHES, TURNS, STARTS = 16, 8, rounds(3), rounds(2)
FOLDER: Final = "BENCHMARK_GRADIENTS"
KEPT: Final = {"MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_MMAP_THRESHOLD_": str(2**33)}
SIDES: Final[dict[str, Callable[[Contest, Task], Step]]] = {
    "fpipe": ours,
    "incumbent": incumbents,
}


def task() -> Task:
    """Return the task, the same in every process."""
    torch.manual_seed(0)
    model = gpt(BLOCKS, WIDTH, HEADS, WORDS, LENGTH)
    tokens, targets = torch.randint(0, WORDS, (2, ROWS, LENGTH))
    return sequence(model, BLOCKS, tokens, targets, MICROBATCHES)


def timed(step: Step) -> float:
    """Return the seconds of one step on all ranks."""
    dist.barrier()
    start = time.perf_counter()
    step()
    return ranks.makespan(start, time.perf_counter())


def contest(side: str, name: str, work: Task) -> list[float]:
    """Return the seconds of each turn of a side under a schedule, after a first step."""
    step = SIDES[side](CONTESTS[name], work)
    torch.save(step(), where(side, name, dist.get_rank(), os.environ[FOLDER]))
    return take_turns(side, name, TURNS, step)


def take_turns(side: str, name: str, length: int, step: Step) -> list[float]:
    """Return the seconds of a step in each turn of a side, the second in a row."""
    found = []
    for _ in turns(side, name, length):
        step()
        found.append(timed(step))
    return found


def where(side: str, name: str, rank: int, folder: str) -> Path:
    """Return the file of a rank's gradients."""
    return Path(folder) / f"{side}-{name}-{rank}.pt"


def rank(work: Task, side: str, *names: str) -> None:
    """Run one rank of a side."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks.report({name: contest(side, name, work) for name in names})
    dist.destroy_process_group()


def rows(module: str, model: str, names: Sequence[str], starts: int = STARTS) -> Iterator[str]:
    """Run the contests of a model, whose ranks run `python -m module`, and yield a row for each."""
    for count in (2, 4)[: rounds(2)]:
        times = defaultdict[tuple[str, str], list[float]](list)
        for _ in range(starts):
            with TemporaryDirectory() as folder:
                jobs = taken(module, count, [*SIDES], dict.fromkeys(names, TURNS), **KEPT, **{FOLDER: folder})
                for name, one in product(names, range(count)):
                    require_equal(*[torch.load(where(side, name, one, folder)) for side in SIDES])
            for side, found in jobs.items():
                for name in names:
                    times[side, name] += found[0][name]
        speed = {what: 1 / statistics.median(found) for what, found in times.items()}
        for name in names:
            what = f"{CONTESTS[name].title}, {count} ranks, {model}"
            mine, theirs = (speed[side, name] for side in SIDES)
            yield row(what, "steps/s", mine, theirs, least(1.03, of="ratio"))


def main() -> None:
    millions = sum(parameter.numel() for parameter in task().model.parameters()) / 1e6
    for line in rows("benchmarks.throughput", f"GPT of {millions:.1f} million parameters", sys.argv[1:] or [*CONTESTS]):
        print(line, flush=True)


if __name__ == "__main__":
    rank(task(), *sys.argv[1:]) if ranks.inside() else main()
