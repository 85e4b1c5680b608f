# SPDX-License-Identifier: Apache-2.0
"""The time that an audit adds to steps, and how many actions it runs again.

    python -m benchmarks.audits

Every rank is a process, over Gloo. Blocks of steps with an audit and without take turns, each with an untimed step
first; a block lasts until all ranks are done. The ratio is that of the medians of the blocks' times. The audit is the
default, `fpipe.Audit()`: each rank draws one action in each step.

Two kinds of stages: some that sleep, on more ranks than this machine has cores, and a GPT on as many as it has. Actions
run again in a day are extrapolated from those in the benchmark. A fault that spoils one result in so many is found, on
average, after as many actions have been run again. A flip that happens once is found with the probability with which
its action is run again.

A checksum reads a tensor once: in the caches it takes a few microseconds per MiB, from memory as long as memory takes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
import schedules
from benchmarks.common import ranks
from benchmarks.common.models import cross_entropy, gpt, starts
from benchmarks.common.rows import most, row
from benchmarks.common.sleeping import WIDTH, Times, sleeping_model, weights_may_rest
from fpipe.audits.checksum import checksum

UNIT: Final = 0.010  # seconds
BLOCK, ROUNDS, WARM_UP, DAY = 6, 7, 6, 86400
SLEEPING: Final = ("one_f_one_b", "interleaved_1f1b", "zb_h1", "zb_v")
RANKS, MICROBATCHES, ROWS = 4, 12, 12
GPT: Final[dict[str, int]] = {"blocks": 4, "width": 256, "heads": 8, "words": 512, "length": 128}
GPT_ROWS, GPT_MICROBATCHES = 32, 8

Step = Callable[[Any], object]


def sleeping(name: str) -> tuple[fpipe.Pipeline, Any, Any]:
    """Return a pipeline of sleeping stages, its state, and a batch."""
    how = getattr(schedules, name)(ranks=dist.get_world_size(), microbatches=MICROBATCHES)
    model = sleeping_model([Times(UNIT, UNIT, UNIT)] * how.stages)
    x = torch.randn(ROWS, WIDTH)
    cuts = [str(stage) for stage in range(1, how.stages)]
    pipe = fpipe.pipeline(model, example=(x,), loss=Tensor.mean, schedule=how, cuts=cuts)
    return pipe, pipe.init(model), ((x,), None)


def training(name: str) -> tuple[fpipe.Pipeline, Any, Any]:
    """Return a pipeline of a GPT, its state, and a batch."""
    torch.manual_seed(0)
    model = gpt(**GPT)
    tokens, targets = torch.randint(0, GPT["words"], (2, GPT_ROWS, GPT["length"]))
    how = getattr(schedules, name)(ranks=dist.get_world_size(), microbatches=GPT_MICROBATCHES)
    cuts = [str(layer) for layer in starts(GPT["blocks"], how.stages)]
    pipe = fpipe.pipeline(model, example=(tokens,), targets=targets, loss=cross_entropy, schedule=how, cuts=cuts)
    return pipe, pipe.init(model), ((tokens,), targets)


def timed(step: Callable[[], object]) -> float:
    """Return the seconds of a step on all ranks, from those of a block."""
    step()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(BLOCK):
        step()
    return ranks.makespan(start, time.perf_counter()) / BLOCK


def measured(pipe: fpipe.Pipeline, state: Any, batch: Any) -> dict[str, Any]:
    """Return this rank's seconds per step with an audit and without, by block, and what was drawn."""
    told: list[fpipe.Rerun] = []
    plain, audited = fpipe.value_and_grad(pipe), fpipe.value_and_grad(pipe, audit=fpipe.Audit(report=told.append))
    for _ in range(WARM_UP):
        plain(*state, *batch)
        audited(*state, *batch)
    told.clear()
    times: dict[str, list[float]] = {"plain": [], "audited": []}
    for _ in range(ROUNDS):
        times["plain"].append(timed(lambda: plain(*state, *batch)))
        times["audited"].append(timed(lambda: audited(*state, *batch)))
    actions = len([a for a in pipe.schedule.actions(*pipe.ranks.ranks) if a.kind in "FBIW"])
    steps = ROUNDS * (BLOCK + 1)
    again = Counter(one.action.kind for one in told if one.seconds is not None)
    return {**times, "drawn": len(told), "again": again, "actions": actions, "steps": steps}


def rank(name: str, kind: str) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with weights_may_rest():
        ranks.report(measured(*(sleeping if kind == "sleeping" else training)(name)))
    dist.destroy_process_group()


def show(name: str, kind: str, count: int) -> None:
    """Run the ranks, and print the rows of one schedule."""
    found = ranks.start("benchmarks.audits", count, name, kind)
    plain, audited = (statistics.median(found[0][side]) for side in ("plain", "audited"))
    again = [sum(one["again"].values()) for one in found]
    shares = [n / (one["steps"] * one["actions"]) for n, one in zip(again, found, strict=True)]
    kinds = sum((Counter(one["again"]) for one in found), Counter[str]())
    where = f"{name}, {count} ranks, {kind}"
    print(row(f"a step with an audit over one without, {where}", "ratio", audited / plain, None, most(1.01)))
    print(row(f"a step without an audit, {where}", "ms", plain * 1e3, None))
    print(row(f"a step with an audit, {where}", "ms", audited * 1e3, None))
    drawn = sum(one["drawn"] for one in found)
    print(row(f"drawn actions that were run again, {where}", "%", 100 * sum(again) / max(1, drawn), None))
    print(row(f"actions that were run again, {where}", "%", 100 * statistics.mean(shares), None))
    print(row(f"the same, on the rank with the fewest, {where}", "%", 100 * min(shares), None))
    day = sum(again) / found[0]["steps"] / audited * DAY
    per_action = day / sum(one["actions"] for one in found)
    print(row(f"actions that are run again in a day, {where}", "", day, None))
    print(row(f"the same for each action of a step, {where}", "", per_action, None))
    print(f"<!-- {where}: {dict(kinds)}, by rank {again} -->", flush=True)


def sums() -> None:
    """Print what a checksum takes."""
    torch.set_num_threads(1)
    for mib in (1, 64):
        tensor, times = torch.randn(mib * 2**18), []
        for _ in range(50):
            start = time.perf_counter()
            checksum(tensor)
            times.append(time.perf_counter() - start)
        print(row(f"the checksum of a tensor of {mib} MiB, per MiB", "us", 1e6 * statistics.median(times) / mib, None))


def main() -> None:
    sums()
    for name in sys.argv[1:] or SLEEPING:
        show(name, "sleeping", RANKS)
    show("one_f_one_b", "GPT", 2)


if __name__ == "__main__":
    rank(*sys.argv[1:]) if ranks.inside() else main()
