# SPDX-License-Identifier: Apache-2.0
"""The cost of recording a timeline: a step that records over one that does not, and that over a build that cannot.

    python -m benchmarks.profiling

A GPT under 1F1B, in one process and on two Gloo ranks. Three steps of the same pipeline alternate: `without` is one
that cannot record, `off` is the step without `record`, and `on` the one with `record=spans.append`. A ratio is the
median over turns of the ratio within a turn: of CPU times in one process, of the times from the first start to the last
end on two ranks. Also the time that recording adds to an action of a stage of Linear(8, 8).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fpipe
from benchmarks.common import ranks
from benchmarks.common.models import cross_entropy, gpt, starts
from benchmarks.common.rounds import rounds
from benchmarks.common.rows import most, row
from benchmarks.common.turns import timed, without_collection
from fpipe.audits.auditor import Auditor
from fpipe.network.recording import RecordSpan
from fpipe.pipelines.inputs import scatter
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.step import run_plan
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.variant import TRAINING
from fpipe.runtime.executor import Execution, Inputs, Outcome
from fpipe.runtime.transport import Transport
from fpipe.tensors import random
from schedules import Span, one_f_one_b

BLOCKS, WIDTH, HEADS, WORDS, LENGTH = 4, 256, 8, 256, 64
ROWS, WARM_UP, TURNS = 16, 1, rounds(14)
OFF, ON = 1.02, 1.05  # upper limits
Step = Callable[[], object]


def run_unrecorded(
    pipe: Pipeline, plan: StepPlan, inputs: Mapping[int, Inputs], *recorders: RecordSpan | Auditor | None
) -> dict[int, dict[int, Outcome]]:
    """Run a plan as `run_copies` would if it could not record."""
    assert not any(recorders)
    ((copy, own),) = inputs.items()

    def execution(rank: int, transport: Transport) -> Execution:
        return Execution(rank, plan.programs[rank], transport, own)

    with random.preserve_generators(plan.generators), plan.context():
        (outcomes,) = pipe.ranks.run([execution])
    return {copy: outcomes}


def variants(
    layers: nn.Sequential, batch: tuple[Tensor, Tensor], cuts: list[int], loss: Any, count: int
) -> tuple[Pipeline, dict[str, Step]]:
    """Return the pipeline, and the three steps: `without`, `off` and `on`."""
    how = one_f_one_b(ranks=count, microbatches=len(batch[0]) // 2)  # of two rows
    named = [str(cut) for cut in cuts]
    pipes = [
        fpipe.pipeline(layers, example=batch[:1], targets=batch[1], loss=loss, schedule=how, cuts=named)
        for _ in range(2)
    ]
    spans: list[Span] = []
    steps = {
        "without": fpipe.value_and_grad(pipes[0]),
        "off": fpipe.value_and_grad(pipes[1]),
        "on": fpipe.value_and_grad(pipes[1], record=spans.append),
    }
    state = pipes[1].init(layers)

    def runner(name: str) -> Step:
        def run() -> None:
            spans.clear()
            with patch("fpipe.pipelines.step.run_copies", run_unrecorded) if name == "without" else nullcontext():
                steps[name](*state, batch[:1], batch[1])

        return run

    return pipes[1], {name: runner(name) for name in steps}


def compared(steps: Mapping[str, Step], measure: Callable[[Step], float]) -> dict[str, float]:
    """Return the median ratios `off / without` and `on / off` over turns, rotating which goes first."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    with without_collection():
        for turn in range(WARM_UP + TURNS):
            for name in names[turn % 3 :] + names[: turn % 3]:
                times[name] += [measure(steps[name])] * (turn >= WARM_UP)
    return {
        f"{a} / {b}": statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))
        for a, b in (("off", "without"), ("on", "off"))
    }


def model() -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    """Return a GPT and a batch, the same in every process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, WORDS, (2, ROWS, LENGTH))
    return gpt(BLOCKS, WIDTH, HEADS, WORDS, LENGTH), (tokens, targets)


def on_two_ranks() -> None:
    """Run one of two ranks, and report the ratios."""

    def measure(step: Step) -> float:
        dist.barrier()
        start = time.perf_counter()
        step()
        return ranks.makespan(start, time.perf_counter())

    dist.init_process_group("gloo")
    layers, batch = model()
    _, steps = variants(layers, batch, starts(BLOCKS, 2), cross_entropy, 2)
    ranks.report(compared(steps, measure))
    dist.destroy_process_group()


def per_action() -> float:
    """Return the microseconds that recording adds to an action, its waits included: the minimum of many runs."""
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    batch = torch.randn(64, 8), torch.randn(64, 8)
    pipe, _ = variants(layers, batch, [1, 2, 3], nn.functional.mse_loss, 4)
    params, buffers = pipe.init(layers)
    inputs = scatter(pipe.training, params, buffers, pipe.batch(TRAINING, batch[:1], batch[1]), None)
    times: dict[bool, list[float]] = {False: [], True: []}
    with without_collection():
        for turn in range(200):
            for on in (turn % 2 == 0, turn % 2 == 1):
                record = list[Span]().append if on else None
                times[on].append(timed(partial(run_plan, pipe, pipe.training, inputs, record)))
    return (min(times[True]) - min(times[False])) / (4 * 32 * 2) * 1e6


def main() -> None:
    layers, batch = model()
    millions = sum(parameter.numel() for parameter in layers.parameters()) / 1e6
    _, steps = variants(layers, batch, starts(BLOCKS, 2), cross_entropy, 2)
    places = {
        "in one process": compared(steps, timed),
        "2 ranks": ranks.start("benchmarks.profiling", 2)[0],
    }
    for place, found in places.items():
        what = f"GPT of {millions:.1f} million parameters, {place}"
        print(row(f"a step that does not record / that cannot, {what}", "", found["off / without"], None, most(OFF)))
        print(row(f"a step that records / that does not, {what}", "", found["on / off"], None, most(ON)))
    print(row("what recording adds to an action, in one process", "us", per_action(), None))


if __name__ == "__main__":
    on_two_ranks() if ranks.inside() else main()
