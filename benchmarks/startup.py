# SPDX-License-Identifier: Apache-2.0
"""How long until the first step is done, beside torch.distributed.pipelining.

    python -m benchmarks.startup

Four fresh processes over Gloo, for each library in turn: from after the imports, `init_process_group` and the making of
the model to the end of the first step of 1F1B, on the rank where it takes longest. That is capture, checks, lowering,
connecting and the step itself. Medians of several starts.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist

from benchmarks.common import ranks
from benchmarks.common.contests import CONTESTS, incumbents, ours
from benchmarks.common.rows import most, row
from benchmarks.throughput import task

RANKS, STARTS = 4, 3
SIDES = {"ours": ours, "theirs": incumbents}


def rank(side: str, schedule: str) -> None:
    """One rank: seconds until the pipeline was built, and until a step was done."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work = task()
    dist.barrier()
    start = time.perf_counter()
    step = SIDES[side](CONTESTS[schedule], work)
    built = time.perf_counter()
    step()
    end = time.perf_counter()
    step()
    ranks.report({"built": built - start, "all": end - start, "second": time.perf_counter() - end})
    dist.destroy_process_group()


def main() -> None:
    schedule = (sys.argv[1:] or ["1F1B"])[0]
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(STARTS):
        for side, starts in found.items():
            starts.append(ranks.maxima(ranks.start("benchmarks.startup", RANKS, side, schedule)))
    medians = {
        side: {part: statistics.median(one[part] for one in starts) for part in starts[0]}
        for side, starts in found.items()
    }
    for part, what in (("all", "first step"), ("built", "of it until there is a step function")):
        reach = most(1, of="ratio") if part == "all" else None
        title = f"{what}, {CONTESTS[schedule].title}, {RANKS} ranks"
        print(row(title, "s", medians["ours"][part], medians["theirs"][part], reach), flush=True)


if __name__ == "__main__":
    rank(*sys.argv[1:]) if ranks.inside() else main()
