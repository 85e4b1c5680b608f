# SPDX-License-Identifier: Apache-2.0
"""How well the simulator predicts the time of a step: measured over simulated, for every schedule.

    python -m benchmarks.prediction                      # 4 and 8 ranks
    python -m benchmarks.prediction 8 zb_v dualpipe      # some

Every rank is a process, over Gloo. Two cores cannot compute for eight ranks, so stages sleep: each function of a stage
of Linear(8, 8) lasts exactly as long as its action costs, including its computation and the lateness of sleeps, which
is measured first. For the same reason ranks have real-time priority, if the system grants it, so that a rank that wakes
up runs immediately, as it would on its own core. Program, executor and transport are those of any step. The simulation
uses these costs and, as `comm`, the time of a transfer while all ranks send one, as they do in a step. A step lasts
from the first start on any rank to the last end. One step before it, whose stages do not sleep, is not timed.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fpipe
import schedules
from benchmarks.common import ranks
from benchmarks.common.rounds import rounds
from benchmarks.common.rows import most, row
from fpipe.pipelines.inputs import scatter
from fpipe.record.variant import TRAINING
from fpipe.runtime.executor import Execution
from fpipe.runtime.instructions import link
from fpipe.runtime.transport import Transport
from fpipe.stages.stage import ModelStage
from schedules import Costs, Schedule, simulate

UNIT: Final = 0.020  # seconds
COSTS: Final[dict[str, Any]] = {"F": UNIT, "B": 2 * UNIT, "I": UNIT, "W": UNIT}
WIDTH, PINGS = 8, rounds(50)
FAMILIES: Final = (
    *("gpipe", "one_f_one_b", "eager_1f1b", "kfkb", "interleaved_1f1b", "breadth_first", "interleaved_zero_bubble"),
    *("zb_h1", "zb_h2", "zb_auto", "zb_v", "v_half", "v_min", "v_schedule", "v_1f1b", "dualpipe_v", "dualpipe"),
    *("chimera", "hanayo"),
)


class Sleeping:
    """A stage whose functions last as long as their actions cost, given that sleeps are `late` seconds too long."""

    def __init__(self, stage: ModelStage, late: float) -> None:
        self.stage = stage
        self.forward = lasting(COSTS["F"] - late, stage.forward)
        self.backward = lasting(COSTS["B"] - late, stage.backward)
        self.backward_input = lasting(COSTS["I"] - late, stage.backward_input)
        self.backward_weight = lasting(COSTS["W"] - late, stage.backward_weight)

    def __getattr__(self, name: str) -> Any:
        """Forward everything else to the stage."""
        return getattr(self.stage, name)


def lasting(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` followed by a sleep until `seconds` after the call."""

    def slow(*args: Any) -> Any:
        end = time.perf_counter() + seconds
        result = function(*args)
        time.sleep(max(0.0, end - time.perf_counter()))
        return result

    return slow


def hurry() -> None:
    """Give this process and the threads it starts real-time priority, if the system grants it."""
    with suppress(AttributeError, PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def lateness() -> float:
    """Return the median seconds by which a sleep is too long, while the other ranks sleep too."""
    times = []
    for _ in range(PINGS):
        start = time.perf_counter()
        time.sleep(UNIT)
        times.append(time.perf_counter() - start - UNIT)
    return statistics.median(times)


def steps_of(how: Schedule, late: float) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return one step of this rank whose stages do not sleep, and one with sleeping stages."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(how.stages)])
    x = torch.randn(how.microbatches, WIDTH)
    cuts = [str(stage) for stage in range(1, how.stages)]
    pipe = fpipe.pipeline(model, example=(x,), loss=Tensor.mean, schedule=how, cuts=cuts)
    plan, (rank,) = pipe.training, pipe.ranks.ranks
    awake = {s: pipe.stages[s] for s in how.placement.stages_on(rank)}
    inputs = scatter(plan, *pipe.init(model), pipe.batch(TRAINING, (x,), None), None)

    def run(stages: Mapping[int, Any]) -> Callable[[], object]:
        linked = link(plan.program.actions(rank), stages, how.placement)

        def execution(rank: int, transport: Transport) -> Execution:
            return Execution(rank, linked, transport, inputs)

        def step() -> object:
            with pipe.ranks.enter_call("a step"):
                return pipe.ranks.run([execution])

        return step

    return run(awake), run({s: Sleeping(stage, late) for s, stage in awake.items()})


def measured(how: Schedule, late: float) -> float:
    """Return the seconds of a step, after one that is not timed."""
    warm, step = steps_of(how, late)
    warm()
    dist.barrier()
    start = time.perf_counter()
    step()
    return ranks.makespan(start, time.perf_counter())


def transfer() -> float:
    """Return the median seconds from a send, just after waking up, to its arrival, with all ranks sending at once.

    Processes on one machine share a clock.
    """
    rank, count = dist.get_rank(), dist.get_world_size()
    sent, got = torch.zeros(2, 1, dtype=torch.float64)
    times = []
    for _ in range(PINGS):
        begin = max(ranks.everywhere(time.perf_counter())) + UNIT
        arriving: Any = dist.irecv(got, (rank - 1) % count)
        time.sleep(max(0.0, begin - time.perf_counter()))
        leaving: Any = dist.isend(sent.fill_(time.perf_counter()), (rank + 1) % count)
        arriving.wait()
        times.append(time.perf_counter() - got.item())
        leaving.wait()
    return statistics.median(ranks.everywhere(statistics.median(times)))


def rank(*names: str) -> None:
    """Run one rank, and report the measured and simulated seconds of each schedule."""
    hurry()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    count, found, comm, late = dist.get_world_size(), {}, transfer(), lateness()
    for name in names:
        how = getattr(schedules, name)(ranks=count, microbatches=2 * count)
        simulated = simulate(how, Costs(**COSTS, comm=comm)).makespan
        found[name] = measured(how, late), simulated
    ranks.report({"comm": comm, "found": found})
    dist.destroy_process_group()


def main() -> None:
    counts = [int(word) for word in sys.argv[1:] if word.isdigit()] or [4, 8][: rounds(2)]
    names = [word for word in sys.argv[1:] if not word.isdigit()] or [*FAMILIES][: rounds(len(FAMILIES))]
    reports = {count: ranks.start("benchmarks.prediction", count, *names)[0] for count in counts}
    for count, report in reports.items():
        ratios = {name: step / simulated for name, (step, simulated) in report["found"].items()}
        worst = max(ratios, key=ratios.__getitem__)
        what = f"measured / simulated step, sleeping stages, {count} ranks, the worst of {len(ratios)}: `{worst}`"
        print(row(what, "", ratios[worst], None, most(1.03)))
        median = statistics.median(ratios.values())
        print(row(f"the same, the median of {len(ratios)}", "", median, None, most(1.03)))
    print("\n## Measured and simulated step\n")
    unit = f"F = I = W = {UNIT * 1e3:g} ms, B = {2 * UNIT * 1e3:g} ms"
    comms = ", ".join(f"{report['comm'] * 1e6:.0f} us on {count} ranks" for count, report in reports.items())
    print(f"{unit}; twice as many microbatches as ranks. A transfer, measured: {comms}. Milliseconds.\n")
    print("| schedule |" + "".join(f" {count} ranks: measured | simulated | ratio |" for count in counts))
    print("|---|" + "---|---|---|" * len(counts))
    for name in names:
        cells = [report["found"][name] for report in reports.values()]
        print(f"| `{name}` |" + "".join(f" {a * 1e3:.1f} | {b * 1e3:.1f} | {a / b:.3f} |" for a, b in cells))


if __name__ == "__main__":
    rank(*[word for word in sys.argv[1:] if not word.isdigit()]) if ranks.inside() else main()
