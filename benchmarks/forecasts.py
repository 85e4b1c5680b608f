# SPDX-License-Identifier: Apache-2.0
"""How well the profile of a model predicts the steps of pipelines that are made of it: predicted over measured.

    python -m benchmarks.forecasts                 # everything
    python -m benchmarks.forecasts gpt mlp         # some models, in one process
    python -m benchmarks.forecasts between         # all but what runs in one process

1. In one process: small models of all kinds, GPTs and a Llama, each cut in several ways under several schedules. One
   rank runs at a time there, so a step is predicted as the sum over all actions, plus what surrounds them. Times are
   those of the processor, which other work on the machine disturbs least; freed memory stays with the process, as in
   `benchmarks/throughput.py`. Since they still drift, models are profiled anew in each of several rounds, right before
   all of their pipelines are measured. Medians over rounds.
2. On two ranks that compute, over Gloo: both profile the model at the same time, and the makespan is simulated, with
   transfers as measured between the ranks. This machine has cores for no more.
3. On more ranks, whose layers sleep: in the same way, for a model of uneven layers (`benchmarks/common/sleeping.py`).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import fpipe
from benchmarks import llama, throughput
from benchmarks.common import ranks
from benchmarks.common.models import cross_entropy, gpt, starts
from benchmarks.common.sleeping import WIDTH, draw_layers, sleeping_model, weights_may_rest
from benchmarks.common.turns import without_collection
from benchmarks.prediction import hurry
from schedules import (
    Graph,
    Schedule,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    recompute,
    simulate,
    zb_h1,
    zb_v,
)

MICROBATCHES, WORDS, LENGTH = 4, 256, 64
ROUNDS, STEPS, LONG_ENOUGH, PROFILING = 3, 5, 0.2, 0.5
CLOCKS: Final = ("fpipe.network.recording.perf_counter", "fpipe.planning.profiler.perf_counter")
SLEEPS: Final = (0.002, 0.008)  # the seconds that a layer's forward and the halves of its backward last


class Model(NamedTuple):
    """A model, a batch, and where to cut it into two and into four stages."""

    module: nn.Module
    example: Any
    targets: Any
    loss: Callable[..., Any]
    cuts: Mapping[int, Sequence[str]]


def zoo() -> Iterator[tuple[str, Callable[[], Model]]]:
    """Yield the models by name."""
    cases: Any = import_module("tests.common.zoo")
    for name, case in cases.ZOO.items():
        yield name, partial(small, case)
    for blocks, width in ((4, 64), (4, 256), (12, 256)):
        yield f"GPT of {blocks} blocks of width {width}", partial(words, blocks, width)
    yield "Llama of 8 layers of width 256", hugging_face


def small(case: Any) -> Model:
    """Return a model of the tests' zoo."""
    module, example, targets = case.make(4 * MICROBATCHES)
    return Model(module, example, targets, case.loss, {4: list(case.cuts), 2: list(case.cuts[1:2])})


def words(blocks: int, width: int) -> Model:
    """Return a GPT."""
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, WORDS, (2, 4 * MICROBATCHES, LENGTH))
    cuts = {stages: list(map(str, starts(blocks, stages))) for stages in (2, 4)}
    return Model(gpt(blocks, width, 8, WORDS, LENGTH), (tokens,), targets, cross_entropy, cuts)


def hugging_face() -> Model:
    """Return a Llama of `transformers`."""
    module = llama.llama()
    tokens = torch.randint(0, WORDS, (4 * MICROBATCHES, LENGTH))
    cuts = {n: [f"model.layers.{8 * s // n}" for s in range(1, n)] for n in (2, 4)}
    return Model(module, {"input_ids": tokens, "labels": tokens}, None, lambda out: out.loss, cuts)


def schedules(ranks: Sequence[int]) -> list[Schedule]:
    """Return the schedules for so many ranks."""
    found = []
    for count in ranks:
        plain = one_f_one_b(ranks=count, microbatches=MICROBATCHES)
        others = [make(ranks=count, microbatches=MICROBATCHES) for make in (gpipe, zb_h1)]
        found += [plain, *others, recompute(plain)]
    return found


def processor_time(step: Callable[[], object]) -> float:
    """Return the median seconds of processor time that a step takes."""
    times, begin = list[float](), time.perf_counter()
    while len(times) < STEPS or (time.perf_counter() - begin < LONG_ENOUGH and len(times) < 100):
        start = time.thread_time()
        step()
        times.append(time.thread_time() - start)
    return statistics.median(times[2:])


def in_one_process(names: Sequence[str]) -> None:
    """Print a row for each model, and the whole."""
    every: list[float] = []
    with ExitStack() as stack:
        for name in CLOCKS:
            stack.enter_context(patch(name, time.thread_time))
        for name, make in zoo():
            if not names or any(name.lower().startswith(one.lower()) for one in names):
                every += model_in_one_process(name, make())
    print(f"in one process: {summary(every)}")


def model_in_one_process(name: str, model: Model) -> list[float]:
    """Print and return what was predicted over what was measured, for one model."""
    begin, (module, example, targets, loss, cuts) = time.perf_counter(), model
    steps = {how: step_of(model, how) for how in schedules([2, 4])}
    found: dict[Schedule, list[float]] = {how: [] for how in steps}
    with without_collection():
        for _ in range(ROUNDS):
            profile = fpipe.profile(module, example, targets, loss=loss, microbatches=MICROBATCHES, seconds=PROFILING)
            for how, (graph, step) in steps.items():
                simulated = simulate(how, profile.costs(cuts[how.stages]), graph)
                seconds = processor_time(step)
                found[how].append((sum(simulated.busy) + profile.step) / seconds)
    ratios = [statistics.median(some) for some in found.values()]
    print(
        f"{name}: {len(profile.blocks)} blocks, {time.perf_counter() - begin:.0f} s; a step takes "
        f"{seconds * 1e3:.1f} ms; {' '.join(f'{ratio:.3f}' for ratio in ratios)}",
        flush=True,
    )
    return ratios


def step_of(model: Model, how: Schedule) -> tuple[Graph, Callable[[], object]]:
    """Return the stage graph of a pipeline of a model, and a step."""
    module, example, targets, loss, cuts = model
    where = cuts[how.stages]
    pipe = fpipe.pipeline(module, example=example, targets=targets, loss=loss, schedule=how, cuts=where)
    return pipe.program.graph, partial(fpipe.value_and_grad(pipe), *pipe.init(module), example, targets, seed=0)


def summary(ratios: Sequence[float]) -> str:
    """Return the median, the extremes, and the typical deviation."""
    off = statistics.median(abs(ratio - 1) for ratio in ratios)
    within = sum(abs(ratio - 1) <= 0.05 for ratio in ratios) / len(ratios)
    return (
        f"predicted / measured step of {len(ratios)} pipelines: median {statistics.median(ratios):.3f}, from "
        f"{min(ratios):.3f} to {max(ratios):.3f}; off by {off:.1%} in the median, at most 5 % in {within:.0%}"
    )


def computing_rank() -> None:
    """Run one of two ranks that compute, and report predicted and measured makespans by model and schedule."""
    found: dict[str, tuple[float, float]] = {}
    for name, model in (("GPT of 12 blocks", words(12, 256)), ("Llama of 8 layers", hugging_face())):
        hows = [make(ranks=2, microbatches=MICROBATCHES) for make in (interleaved_1f1b, zb_v)]
        pairs = predicted_and_measured(model, [*schedules([2]), *hows], STEPS)
        found |= {f"{name}, {how}": pair for how, pair in pairs.items()}
    ranks.report(found)


def sleeping_rank() -> None:
    """Run one rank whose layers sleep, and report predicted and measured makespans by schedule."""
    count = dist.get_world_size()
    x = torch.ones(MICROBATCHES * count, WIDTH)
    layers = draw_layers(0, 3 * count, 3 * count, *SLEEPS)
    makers = one_f_one_b, gpipe, zb_h1, zb_v, interleaved_1f1b
    hows = [make(ranks=count, microbatches=2 * count) for make in makers]
    cuts = {n: [str(len(layers) * s // n) for s in range(1, n)] for n in (count, 2 * count)}
    with weights_may_rest():
        model = Model(sleeping_model(layers), (x,), None, square, cuts)
        ranks.report(predicted_and_measured(model, hows, 3))


def square(outputs: torch.Tensor) -> torch.Tensor:
    """Return a loss whose cotangent depends on the outputs."""
    return (outputs**2).mean()


def predicted_and_measured(model: Model, hows: Sequence[Schedule], turns: int) -> dict[str, tuple[float, float]]:
    """Return the seconds of a step of each schedule, which all ranks run: as predicted, and the median of `turns`."""
    module, example, targets, loss, cuts = model
    (count,) = {how.microbatches for how in hows}
    profile = fpipe.profile(module, example, targets, loss=loss, microbatches=count, seconds=PROFILING)
    found = {}
    for how in hows:
        graph, step = step_of(model, how)
        times = []
        for turn in range(2 + turns):
            dist.barrier()
            start = time.perf_counter()
            step()
            times += [ranks.makespan(start, time.perf_counter())] * (turn > 1)
        simulated = simulate(how, profile.costs(cuts[how.stages]), graph).makespan + profile.step
        found[repr(how)] = simulated, statistics.median(times)
    return found


def rank(task: Callable[[], None]) -> None:
    """Run one rank."""
    hurry()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task()
    dist.destroy_process_group()


def between_ranks() -> None:
    """Print a row for each schedule on two ranks that compute, and on more that sleep."""
    (found, *_) = ranks.start("benchmarks.forecasts", 2, "computing", **throughput.KEPT)
    print_pairs("on two ranks that compute", found)
    for count in (4, 8):
        (found, *_) = ranks.start("benchmarks.forecasts", count, "sleeping")
        print_pairs(f"on {count} ranks that sleep", found)


def print_pairs(where: str, found: Mapping[str, Sequence[float]]) -> None:
    """Print predicted and measured makespans, and the whole."""
    for name, (simulated, seconds) in found.items():
        print(f"{name}: predicted {simulated * 1e3:.1f} ms, measured {seconds * 1e3:.1f} ms, {simulated / seconds:.3f}")
    print(f"{where}: {summary([simulated / seconds for simulated, seconds in found.values()])}", flush=True)


def main() -> None:
    command = [sys.executable, "-m", "benchmarks.forecasts", "process", *sys.argv[1:]]
    subprocess.run(command, check=True, env={**os.environ, **throughput.KEPT})
    if not sys.argv[1:]:
        between_ranks()


def run() -> None:
    """Run what this process was started for."""
    match sys.argv[1:]:
        case ["computing"]:
            rank(computing_rank)
        case ["sleeping"]:
            rank(sleeping_rank)
        case ["between"]:
            between_ranks()
        case ["process", *names]:
            torch.set_num_threads(1)
            in_one_process(names)
        case _:
            main()


if __name__ == "__main__":
    run()
