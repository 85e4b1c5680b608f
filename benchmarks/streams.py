# SPDX-License-Identifier: Apache-2.0
"""The time that a stream saves: batches under a schedule that updates in flight, over steps that drain the pipeline.

    python -m benchmarks.streams                 # 4 and 8 ranks
    python -m benchmarks.streams 4               # fewer

Sleeping layers (`benchmarks/common/sleeping.py`), one per rank, in processes over Gloo, and the public functions:
`train_stream` under PipeDream and 2BW, `train_step` under 1F1B with as many microbatches per update as 2BW. Seconds per
microbatch, after the pipeline has filled, beside those of the simulator, whose costs are measured in the same run: how
long a sleep lasts, an update, and a message.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fpipe
from benchmarks.common import ranks
from benchmarks.common.rows import most, row
from benchmarks.common.sleeping import WIDTH, Times, sleeping_model
from benchmarks.prediction import hurry
from schedules import Costs, Schedule, one_f_one_b, pipedream, pipedream_2bw, simulate, update_weights
from schedules.endless import lengthen

UNIT: Final = 0.03
MICROBATCHES: Final = 48
SGD: Final = fpipe.optimizer(torch.optim.SGD, lr=1e-3)


def schedules_of(count: int) -> dict[str, Schedule]:
    """Return the schedule of one batch, by name."""
    return {
        "steps": one_f_one_b(count, count),
        "pipedream": pipedream(count, 1),
        "pipedream_2bw": pipedream_2bw(count, count, accumulate=count),
    }


def measure_costs(how: Schedule) -> Costs:
    """Return what forwards, backwards, updates and messages take, on average over the ranks."""
    pipe, model, _ = build(how)
    with pipe.ranks.enter_call("measuring"):
        comm = pipe.ranks.measure_transfers([4 * WIDTH])[:, 3].mean().item()
    params, _ = pipe.init(model)
    grads, state, times = {name: p.detach() for name, p in params.items()}, SGD.init(params), list[float]()
    for _ in range(20):
        start = time.perf_counter()
        SGD.update(grads, state, params)
        times.append(time.perf_counter() - start)
    layer = model.get_submodule("0")
    (forward, first), (_, other) = (time_layer(layer, needs_input) for needs_input in (False, True))
    backwards = (first, *[other] * (how.stages - 1))
    return Costs(F=forward, B=backwards, U=statistics.median(times), comm=comm)


def time_layer(layer: nn.Module, needs_input: bool) -> tuple[float, float]:
    """Return the seconds of a forward and of a backward; the first layer has no gradient of its input to compute."""
    forwards, backwards = list[float](), list[float]()
    for _ in range(10):
        dist.barrier()
        start = time.perf_counter()
        y = layer(torch.randn(1, WIDTH, requires_grad=needs_input))
        forwards.append(time.perf_counter() - start)
        y.mean().backward()
        backwards.append(time.perf_counter() - start - forwards[-1])
    return statistics.median(forwards), statistics.median(backwards)


def simulated(name: str, how: Schedule, costs: Costs) -> float:
    """Return the seconds per microbatch in the simulator, once the pipeline is full."""
    if name == "steps":
        return simulate(update_weights(how), costs).makespan / how.microbatches
    some, more = (simulate(lengthen(how, k * how.ranks), costs).makespan for k in (2, 4))
    return (more - some) / (2 * how.ranks * how.microbatches)


def build(how: Schedule) -> tuple[fpipe.Pipeline, nn.Module, Tensor]:
    """Return the pipeline of sleeping layers under a schedule, its model and a batch."""
    model, x = sleeping_model([Times(UNIT, UNIT, UNIT)] * how.ranks), torch.randn(how.microbatches, WIDTH)
    cuts = [str(s) for s in range(1, how.stages)]
    return fpipe.pipeline(model, example=(x,), loss=Tensor.mean, schedule=how, cuts=cuts), model, x


def measured(name: str, how: Schedule) -> float:
    """Return this rank's seconds per microbatch, once the pipeline is full."""
    pipe, model, x = build(how)
    params, buffers = pipe.init(model)
    batches, state, marks = MICROBATCHES // how.microbatches, SGD.init(params), list[float]()
    dist.barrier()
    if name != "steps":
        for _ in fpipe.train_stream(pipe, SGD)(params, buffers, state, [((x,), None)] * batches):
            marks.append(time.perf_counter())
    else:
        step = fpipe.train_step(pipe, SGD)
        for _ in range(batches):
            _, params, state, _ = step(params, buffers, state, (x,))
            marks.append(time.perf_counter())
    first, last = len(marks) // 4, len(marks) - 1 - (how.ranks if name == "pipedream" else 1) * (name != "steps")
    return (marks[last] - marks[first]) / (last - first) / how.microbatches


def rank() -> None:
    """Run one rank, and report seconds per microbatch, measured and simulated."""
    hurry()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    made = schedules_of(dist.get_world_size())
    costs = measure_costs(made["steps"])
    found: dict[str, Any] = {name: (measured(name, how), simulated(name, how, costs)) for name, how in made.items()}
    ranks.report(found)
    dist.destroy_process_group()


def lines(count: int) -> Iterator[str]:
    """Yield the rows of the table for so many ranks."""
    report = ranks.start("benchmarks.streams", count)[0]
    step, soon = report.pop("steps")
    for name, (took, alone) in report.items():
        what = f"a microbatch of a stream under {name} / of a step under 1F1B, sleeping stages, {count} ranks"
        yield row(f"{what} (simulated {alone / soon:.3f})", "", took / step, None, most(1.03 * alone / soon))


def main() -> None:
    for count in [int(word) for word in sys.argv[1:]] or (4, 8):
        for line in lines(count):
            print(line, flush=True)


if __name__ == "__main__":
    rank() if ranks.inside() else main()
