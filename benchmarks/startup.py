# SPDX-License-Identifier: Apache-2.0
"""The time until the first step is done, compared with torch.distributed.pipelining.

    python -m benchmarks.startup

Four fresh processes over Gloo, for each side in turn: the time from after the imports, `init_process_group` and
building the model to the end of the first step of 1F1B, on the slowest rank. It covers capture, checks, lowering,
connecting and the step itself, and the processor time of a rank for the same, since ranks may share cores. Also the
time from the start of the processes, imports included. Medians of several starts. Then the processor time to import
fpipe in a process that has imported torch.

Torch is measured twice. With its own front end it does what fpipe does: `pipeline(model, mb_args, split_spec)`
traces an unedited model and splits it at the same blocks; that is the time to beat. With stages cut by hand it traces
nothing; that is the least time that a first step can take. What the goal leaves for a capture stands beside what the
forward of the model takes alone on torch's fake tensors, in a process that has not run it before.

Each process imports one of the libraries, and `torch._dynamo`, which all of them end up importing.
"""

from __future__ import annotations

import compileall
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.func import functional_call

from benchmarks.common import ranks
from benchmarks.common.contests import CONTESTS, Contest, Step, Task, incumbents, ours, traced
from benchmarks.common.rounds import rounds
from benchmarks.common.rows import most, row
from benchmarks.throughput import task

RANKS, STARTS, REACH = 4, rounds(2), 1.2
PIPELINING = "torch.distributed.pipelining"


class Side(NamedTuple):
    """A library and its step; `told` is its label beside fpipe, `captures` is true if it captures the model."""

    library: str
    step: Callable[[Contest, Task], Step]
    told: str = ""
    captures: bool = True


SIDES: Final = {
    "fpipe": Side("fpipe", ours),
    "front end": Side(PIPELINING, traced, "compared with torch's front end"),
    "by hand": Side(PIPELINING, incumbents, "compared with stages cut by hand", captures=False),
}
PARTS = {
    "all": ("first step after start", most(1, of="ratio"), most(REACH, of="ratio")),
    "processor": ("processor time of a rank until then", None, most(REACH, of="ratio")),
    "whole": ("the same from the start of the processes, imports included", None, None),
    "built": ("of it until there is a step function", None, None),
    "second": ("the second step", None, None),
}


def since_start() -> float:
    """Return the seconds since this process started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def rank(side: str, schedule: str) -> None:
    """Run one rank, and report the seconds until the pipeline was built, and until a step was done."""
    torch.set_num_threads(1)
    for name in (SIDES[side].library, "torch._dynamo"):
        import_module(name)
    dist.init_process_group("gloo")
    work = task()
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    step = SIDES[side].step(CONTESTS[schedule], work)
    built = time.perf_counter()
    step()
    end, busy, whole = time.perf_counter(), time.process_time() - busy, since_start()
    step()
    second = time.perf_counter() - end
    found = {"built": built - start, "all": end - start, "processor": busy, "whole": whole, "second": second}
    ranks.report({**found, "fake": fake_forward(work)})
    dist.destroy_process_group()


def fake_forward(work: Task) -> float:
    """Return the processor time of the forward of a microbatch on torch's fake tensors."""
    batch = [one.tensor_split(work.microbatches)[0] for one in (work.tokens, work.targets)]
    state, start, mode = work.model.state_dict(), time.process_time(), FakeTensorMode()
    fake: dict[str, torch.Tensor] = {name: mode.from_tensor(one) for name, one in state.items()}
    tokens, targets = map(mode.from_tensor, batch)
    with mode:
        work.loss(functional_call(work.model, fake, (tokens,)), targets)
    return time.process_time() - start


def importing() -> float:
    """Return the least processor time of several fresh processes to import fpipe after torch."""
    script = (
        "import time, torch, torch.distributed; t = time.process_time(); import fpipe; print(time.process_time() - t)"
    )
    command = [sys.executable, "-c", script]
    return min(float(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(STARTS))


def main() -> None:
    schedule = (sys.argv[1:] or ["1F1B"])[0]
    for package in ("benchmarks", "fpipe", "schedules"):  # installed packages have bytecode, too
        compileall.compile_dir(Path(__file__).parents[1] / package, quiet=1)
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(STARTS):
        for side, starts in found.items():
            starts.append(ranks.maxima(ranks.start_fresh("benchmarks.startup", RANKS, side, schedule)))
    for part, (what, reach, by_hand) in PARTS.items():
        mine, *others = [statistics.median(one[part] for one in starts) for starts in found.values()]
        for rival, other in zip([*SIDES.values()][1:], others, strict=True):
            name = f"{what}, {CONTESTS[schedule].title}, {RANKS} ranks, {rival.told}"
            print(row(name, "s", mine, other, reach if rival.captures else by_hand), flush=True)
    busy, fake = (statistics.median(one[part] for one in found["by hand"]) for part in ("processor", "fake"))
    what = "of it, what the goal leaves for a capture; torch: a forward of that model on its fake tensors"
    print(row(what, "s", (REACH - 1) * busy, fake))
    print(row("processor time to import fpipe, after torch", "s", importing(), None, most(0.3)))


if __name__ == "__main__":
    rank(*sys.argv[1:]) if ranks.inside() else main()
