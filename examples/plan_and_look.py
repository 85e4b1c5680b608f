# SPDX-License-Identifier: Apache-2.0
"""Plan a pipeline, run the plan, and compare the measured timeline with the prediction.

    torchrun --standalone --nproc-per-node 2 examples/plan_and_look.py    # one process per rank, over Gloo
    python examples/plan_and_look.py                                      # both ranks in this process

The layers are uneven, so stages with the same number of layers are not the best. The script saves the plan, and a page
for a browser that shows the measured step above its prediction. In one process the ranks take turns, so a step takes
longer there.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fpipe
from schedules import Span, critical_path, drawing, simulate, spans, summarize

WIDTHS, ROWS = (256, 256, 256, 256, 256, 1024), 1024
RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def build_model() -> nn.Module:
    """Return layers of unequal width; the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64)) for width in WIDTHS])


def make_plan(x: Tensor, y: Tensor, seconds: float, path: Path) -> fpipe.Plan:
    """Measure the model and the links between ranks, search, and return the first rank's plan, which it saves."""
    limits = {"ranks": max(2, SIZE), "memory": "100MB", "microbatches": 8, "seconds": seconds}
    plan = fpipe.plan(build_model(), (x,), y, loss=mse_loss, **limits)
    if RANK == 0:
        path.mkdir(parents=True, exist_ok=True)
        plan.save(path / "plan.json")
    if SIZE > 1:
        dist.barrier()  # ranks that run out of time may have found other plans
    return fpipe.Plan.read(path / "plan.json")


def run(pipe: fpipe.Pipeline, x: Tensor, y: Tensor, steps: int) -> list[fpipe.MeasuredTimeline]:
    """Run steps, and return their timelines, on one clock for all ranks."""
    recorded, timelines = list[Span](), list[fpipe.MeasuredTimeline]()
    step, given = fpipe.value_and_grad(pipe, record=recorded.append), pipe.init(build_model())
    for _ in range(steps):
        recorded.clear()
        step(*given, (x,), y)
        timelines.append(fpipe.timeline(pipe, recorded))
    return timelines[1:]  # the first step also connects the ranks


def look(pipe: fpipe.Pipeline, timelines: list[fpipe.MeasuredTimeline], page: Path) -> list[str]:
    """Return the shortest step and its simulation with measured costs, as text; write the step as a page."""
    how, graph, costs = pipe.schedule, pipe.program.graph, fpipe.costs(pipe, *timelines)
    shortest = min(timelines, key=lambda timeline: max(span.end for span in timeline))
    shortest.page(page)
    measured, predicted = summarize(shortest, how), simulate(how, costs, graph)
    shown = {"simulated with measured costs": spans(how, costs, graph)}
    return [
        drawing.texts(shown, columns=shutil.get_terminal_size((120, 40)).columns),
        f"idle: {measured.bubble:.0%} measured, {predicted.bubble:.0%} predicted",
        f"step: {measured.makespan * 1e3:.1f} ms measured, {predicted.makespan * 1e3:.1f} ms predicted, of which are",
        *[f"{one.time / predicted.makespan:4.0%} {one.what}" for one in critical_path(how, costs, graph).shares],
    ]


def main() -> None:
    """Plan, run and look, alone or as one rank of several."""
    parser = argparse.ArgumentParser(description="Plan a pipeline for uneven layers, run it, and look at a step.")
    parser.add_argument("--seconds", type=float, default=5, help="for the search")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--path", type=Path, default=Path("run"), help="where the plan and the page are saved")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if SIZE > 1:
        dist.init_process_group("gloo")
    x, y = torch.randn(2, ROWS, 64, generator=torch.Generator().manual_seed(0))
    plan = make_plan(x, y, options.seconds, options.path)
    pipe = fpipe.pipeline(build_model(), example=(x,), targets=y, loss=mse_loss, plan=plan)
    found = fpipe.verify(pipe, build_model(), (x,), y)
    timelines = run(pipe, x, y, options.steps)
    if RANK == 0:
        print(plan, *look(pipe, timelines, options.path / "step.html"), sep="\n")
        print(f"{found.reference} tensors equal those of one device, bit for bit")
    if SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
