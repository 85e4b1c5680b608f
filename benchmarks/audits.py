# SPDX-License-Identifier: Apache-2.0
"""The time that an audit adds to steps, and how many actions it runs again.

    python -m benchmarks.audits [SCHEDULE ...]

Every rank is a process, over Gloo. Steps with an audit and without take turns, and between two of them all ranks meet
in a call of fpipe. A step lasts from one meeting to the next. The audit is the default, `fpipe.Audit()`: each rank
draws one action in each step. Audited steps run before those that are timed, until ranks know where they are idle.

Two kinds of stages: some that sleep, on more ranks than this machine has cores, and a GPT on as many as it has. On a
machine with other work, a GPT's ranks are not idle where they wait: others compute there. Then only the time counts
that the audit knows to have added, of all ranks together.

Actions run again in a day are extrapolated from those in the benchmark. A fault that spoils one result in so many is
found, on average, after as many actions have been run again. A flip that happens once is found with the probability
with which its action is run again.

A checksum reads a tensor once: in the caches that takes some ten microseconds per MiB, from memory as long as memory
takes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
import schedules
from benchmarks.common import ranks
from benchmarks.common.models import cross_entropy, gpt, starts
from benchmarks.common.rounds import rounds
from benchmarks.common.rows import Reach, most, row
from benchmarks.common.sleeping import WIDTH, Times, sleeping_model, weights_may_rest
from fpipe.audits.checksum import checksum

UNIT: Final = 0.010  # seconds
TURNS: Final = {"sleeping": rounds(8), "GPT": rounds(32)}
WARM_UP, DAY = 8, 86400
SLEEPING: Final = ("one_f_one_b", "zb_v")
RANKS, MICROBATCHES, ROWS = 4, 12, 12
GPT: Final[dict[str, int]] = {"blocks": 4, "width": 192, "heads": 6, "words": 512, "length": 64}
GPT_ROWS, GPT_MICROBATCHES = 16, 8
SIDES: Final = ("plain", "audited")


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


def timed(pipe: fpipe.Pipeline, step: Callable[[], object]) -> float:
    """Return the seconds of a step, from the last meeting of all ranks to the next."""
    start = time.perf_counter()
    step()
    fpipe.require_same(pipe)
    return time.perf_counter() - start


def measured(turns: int, pipe: fpipe.Pipeline, state: Any, batch: Any) -> dict[str, Any]:
    """Return this rank's seconds of steps with an audit and without, and what was drawn and run again."""
    told: list[fpipe.Rerun] = []
    audited = fpipe.value_and_grad(pipe, audit=fpipe.Audit(report=told.append))
    sides = {"plain": fpipe.value_and_grad(pipe), "audited": audited}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(WARM_UP):
        timed(pipe, partial(audited, *state, *batch))
    for turn in range(turns):
        for name in [*sides][:: (-1) ** turn]:
            times[name].append(timed(pipe, partial(sides[name], *state, *batch)))
    told = [one for one in told if one.number >= WARM_UP]
    again = Counter(one.action.kind for one in told if one.seconds is not None)
    count = len([a for a in pipe.schedule.actions(*pipe.ranks.ranks) if a.kind in "FBIW"])
    return {**times, "drawn": len(told), "again": again, "actions": count, "added": sum(one.added for one in told)}


def rank(kind: str, *names: str) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    make = sleeping if kind == "sleeping" else training
    with weights_may_rest():
        ranks.report({name: measured(TURNS[kind], *make(name)) for name in names})
    dist.destroy_process_group()


def show(name: str, kind: str, count: int, found: list[dict[str, Any]]) -> None:
    """Print the rows of one schedule, of what its ranks have reported."""
    where = f"{name}, {count} ranks, {kind}"
    of = {side: [max(times) for times in zip(*[one[side] for one in found], strict=True)] for side in SIDES}
    plain, audited = (statistics.median(of[side]) for side in SIDES)
    added = sum(one["added"] for one in found) / sum(of["audited"])
    again, drawn = (sum(sum(one["again"].values()) for one in found), sum(one["drawn"] for one in found))
    actions = sum(one["actions"] for one in found)
    day = DAY / audited / TURNS[kind]
    lines: list[tuple[str, str, float, Reach | None]] = [
        ("a step without an audit", "ms", plain * 1e3, None),
        ("a step with one over that", "ratio", audited / plain, most(1.01)),
        ("the same, of the means", "ratio", statistics.mean(of["audited"]) / statistics.mean(of["plain"]), None),
        ("time that it knows to have added, all ranks together", "%", 100 * added, most(1)),
        ("actions that were drawn", "%", 100 * drawn / TURNS[kind] / actions, None),
        ("those that were run again", "%", 100 * again / max(1, drawn), None),
        ("actions run again in a day", "", again * day, None),
        ("the same for each action of a step", "", again * day / actions, None),
    ]
    for what, unit, value, reach in lines:
        print(row(f"{what}, {where}", unit, value, None, reach), flush=True)
    print(f"{where}: " + "; ".join(str(one["again"]) for one in found), file=sys.stderr)


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
    for kind, count, names in (("sleeping", RANKS, sys.argv[1:] or SLEEPING), ("GPT", 2, SLEEPING[:1])):
        found = ranks.start("benchmarks.audits", count, kind, *names)
        for name in names:
            show(name, kind, count, [one[name] for one in found])


if __name__ == "__main__":
    rank(*sys.argv[1:]) if ranks.inside() else main()
