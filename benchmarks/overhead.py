# SPDX-License-Identifier: Apache-2.0
"""What the executor costs: microseconds per compute action over a bare loop of the same stage functions.

    python benchmarks/overhead.py              # all ranks in one process
    python benchmarks/overhead.py --end-to-end # and two Gloo ranks, steps per second on a GPT

Both libraries run four stages of Linear(8, 8) under the same schedule in one process, GC off, best of several rounds; the
bare loop calls the same stage functions (ours), or the same modules with `.backward()` (the incumbent's), microbatch
after microbatch, and accumulates gradients. In one process the incumbent holds all stages on one rank, since its
transport needs one process per rank, so it sends nothing; ours is measured both so and with one stage per rank, where
every value passes through the transport.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import fpipe
from fpipe.executor import Inputs
from schedules import Action, B, F, gpipe, linear, one_f_one_b, schedule

STAGES, MICROBATCHES, WIDTH = 4, 32, 8


@schedule(placement=linear)
def depth_first(rank: int, ranks: int, microbatches: int, chunks: int = STAGES) -> Iterator[Action]:
    """All stages of a rank, microbatch after microbatch."""
    stages = range(rank * chunks, (rank + 1) * chunks)
    for i in range(microbatches):
        yield from (F(stage, i) for stage in stages)
        yield from (B(stage, i) for stage in reversed(stages))


def best(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The shortest time of each function in seconds; the functions take turns, so that they see the same machine."""
    times = dict.fromkeys(functions, float("inf"))
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name] = min(times[name], time.perf_counter() - start)
    gc.enable()
    return times


def layers() -> list[nn.Module]:
    """The stages that are measured."""
    return [nn.Linear(WIDTH, WIDTH) for _ in range(STAGES)]


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss."""
    return (outputs - targets).square().mean()


def ours(name: str, made: object) -> dict[str, Callable[[], object]]:
    """The executor under one schedule, and the bare loop of the same stage functions."""
    model = layers()
    x, y = torch.randn(2, MICROBATCHES, WIDTH)
    cuts = [str(stage) for stage in range(1, STAGES)]
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mean_square, schedule=made, cuts=cuts, capture="modules")
    plan, stages = pipe.training, pipe.stages
    params, buffers = pipe.init(model)
    leaves = plan.batch.take((x,), y, range(2))
    inputs = Inputs(
        params={s.index: s.leaves(params) for s in stages},
        buffers={s.index: () for s in stages},
        batch=lambda s, i: tuple(leaves[leaf][i] for leaf in stages[s].batch),
        keys=[0] * MICROBATCHES,
    )

    def bare() -> None:
        totals: list[tuple[torch.Tensor, ...]] = [()] * STAGES
        for i in range(MICROBATCHES):
            values: tuple[torch.Tensor, ...] = ()
            kept = []
            for s, stage in enumerate(stages):
                values, _, residuals = stage.forward(inputs.params[s], (), inputs.batch(s, i) + values, 0)
                kept.append(residuals)
            values = ()
            for s in reversed(range(STAGES)):
                values, grads = stages[s].backward(kept.pop(), values)
                totals[s] = stages[s].accumulate(totals[s], grads, i)

    return {name: lambda: pipe.run(plan, inputs), f"{name}, bare": bare}


def incumbents() -> dict[str, Callable[[], object]]:
    """The incumbent's two runtimes with all stages in this process, and the bare loop of the same modules."""
    modules = layers()
    x, y = torch.randn(2, MICROBATCHES, WIDTH)
    device = torch.device("cpu")
    whole = PipelineStage(nn.Sequential(*modules), 0, 1, device)
    single = Schedule1F1B(whole, MICROBATCHES, loss_fn=mean_square)
    parts = [PipelineStage(module, s, STAGES, device) for s, module in enumerate(modules)]
    general = ScheduleInterleaved1F1B(parts, MICROBATCHES, loss_fn=mean_square)

    def bare() -> None:
        for a, b in zip(x.split(1), y.split(1), strict=True):
            value = a
            for module in modules:
                value = module(value)
            (mean_square(value, b) / MICROBATCHES).backward()

    return {
        "incumbent 1F1B": lambda: single.step(x, target=y),
        "incumbent general": lambda: general.step(x, target=y),
        "incumbent, bare": bare,
    }
