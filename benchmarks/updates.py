# SPDX-License-Identifier: Apache-2.0
"""The time that updates within the step save: a step that updates each stage early, over a step and then its update.

    python -m benchmarks.updates                 # 4 ranks
    python -m benchmarks.updates 8 zb_v          # more, some

Sleeping stages, ranks, transport and executor are those of `benchmarks/prediction.py`; an update sleeps, too. Both ways
end with one collective of all ranks, the norm. After a step, each rank then updates all of its stages; within it, each
stage is updated once its gradient is complete (`schedules.update_weights`). Three kinds of models: every stage's update
takes as long as two forwards; the first stage is frozen; the last one, with a large head, takes four times as long as
the others. Both ways take turns; medians.

The rank that finishes last can't hide its update. So equal stages gain nothing; otherwise the gain is the difference
between the longest update and that of the rank that finishes last.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fpipe
import schedules
from benchmarks.common import ranks
from benchmarks.common.rounds import rounds
from benchmarks.common.rows import most, row
from benchmarks.prediction import COSTS, UNIT, WIDTH, Sleeping, hurry, lateness
from fpipe.pipelines.inputs import scatter
from fpipe.record.variant import TRAINING
from fpipe.runtime.executor import Execution
from fpipe.runtime.instructions import link
from fpipe.runtime.transport import Transport
from schedules import Costs, Program, Schedule, simulate, update_weights

ROUNDS: Final = rounds(2)
FAMILIES: Final = ("one_f_one_b", "zb_v", "dualpipe")
Times = tuple[float, ...]


def profiles(stages: int) -> dict[str, Times]:
    """Return the seconds of each stage's update, by kind of model."""
    usual = 2 * UNIT
    return {
        "equal updates": (usual,) * stages,
        "first stage frozen": (0.0, *[usual] * (stages - 1)),
        "last stage four times": (*[usual] * (stages - 1), 4 * usual),
    }


def spend(seconds: float) -> None:
    """Sleep, unless there is nothing to do."""
    if seconds > 0:
        time.sleep(seconds)


class Ways:
    """A step of this rank that updates within, and a step and then its update, for each kind of model."""

    def __init__(self, how: Schedule, late: float) -> None:
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(how.stages)])
        x = torch.randn(how.microbatches, WIDTH)
        cuts = [str(stage) for stage in range(1, how.stages)]
        pipe = fpipe.pipeline(model, example=(x,), loss=Tensor.mean, schedule=how, cuts=cuts)
        self.pipe, self.how, self.late, (self.rank,) = pipe, how, late, pipe.ranks.ranks
        self.homes = how.placement.stages_on(self.rank)
        self.inputs = scatter(pipe.training, *pipe.init(model), pipe.batch(TRAINING, (x,), None), None)
        awake = {s: pipe.stages[s] for s in self.homes}
        for program in (pipe.training.program, pipe.training.updating.program):
            self.run(program, awake, (0.0,) * how.stages)()

    def run(self, program: Program, stages: Mapping[int, Any], times: Times) -> Callable[[], object]:
        """Return a step of some stages, whose updates take so long."""
        linked = link(program.actions(self.rank), stages, self.how.placement)
        inputs = self.inputs._replace(update=lambda s, *_: spend(times[s] - self.late))

        def execution(rank: int, transport: Transport) -> Execution:
            return Execution(rank, linked, transport, inputs)

        def step() -> object:
            with self.pipe.ranks.enter_call("a step"):
                return self.pipe.ranks.run([execution]), ranks.everywhere(0.0)

        return step

    def both(self, times: Times) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return both ways, with sleeping stages."""
        plan = self.pipe.training
        stages = {s: Sleeping(self.pipe.stages[s], self.late) for s in self.homes}
        backward = self.run(plan.program, stages, times)

        def after() -> None:
            backward()
            spend(sum(times[s] for s in self.homes) - self.late)

        return self.run(plan.updating.program, stages, times), after


def measured(steps: Sequence[Callable[[], object]]) -> list[float]:
    """Return the median seconds of each step; they take turns."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(ROUNDS):
        for step, found in zip(steps, times, strict=True):
            dist.barrier()
            start = time.perf_counter()
            step()
            found.append(ranks.makespan(start, time.perf_counter()))
    return [statistics.median(found) for found in times]


def simulated(how: Schedule, times: Times) -> tuple[float, float]:
    """Return the seconds of both ways in the simulator, without transfers."""
    longest = max(sum(times[s] for s in how.placement.stages_on(rank)) for rank in range(how.ranks))
    within = simulate(update_weights(how), Costs(**COSTS, U=times)).makespan
    return within, simulate(how, Costs(**COSTS)).makespan + longest


def rank(*names: str) -> None:
    """Run one rank, and report the measured and simulated seconds of both ways, for each schedule and kind of model."""
    hurry()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    count, late, found = dist.get_world_size(), lateness(), dict[str, Any]()
    for name in names or FAMILIES:
        how = getattr(schedules, name)(ranks=count, microbatches=2 * count)
        ways = Ways(how, late)
        for kind, times in profiles(how.stages).items():
            found[f"{name}, {kind}"] = *measured(ways.both(times)), *simulated(how, times)
    ranks.report(found)
    dist.destroy_process_group()


def main() -> None:
    count = next((int(word) for word in sys.argv[1:] if word.isdigit()), 4)
    report = ranks.start("benchmarks.updates", count, *[word for word in sys.argv[1:] if not word.isdigit()])[0]
    ratios = {name: within / after for name, (within, after, _, _) in report.items()}
    for kind in profiles(1):
        same = {name: ratio for name, ratio in ratios.items() if name.endswith(kind)}
        best = min(same, key=same.__getitem__)
        what = f"a step that updates early / a step and then its update, sleeping stages, {count} ranks"
        print(row(f"{what}, {kind}, the best of {len(same)}: `{best.partition(',')[0]}`", "", same[best], None))
        print(row("the same, the worst", "", max(same.values()), None, most(1.02)))
    print("\n## Updates within the step\n")
    unit = f"F = I = W = {UNIT * 1e3:g} ms, B = {2 * UNIT * 1e3:g} ms, U = {2 * UNIT * 1e3:g} ms"
    print(f"{unit}; {count} ranks, twice as many microbatches. Milliseconds; simulated without transfers.\n")
    print("| schedule, model | within the step | simulated | after the step | simulated | saved |")
    print("|---|---|---|---|---|---|")
    for name, (within, after, soon, late) in report.items():
        cells = " | ".join(f"{seconds * 1e3:.1f}" for seconds in (within, soon, after, late))
        print(f"| {name} | {cells} | {(after - within) * 1e3:.1f} |")


if __name__ == "__main__":
    rank(*[word for word in sys.argv[1:] if not word.isdigit()]) if ranks.inside() else main()
