# SPDX-License-Identifier: Apache-2.0
"""How well the profile of a model predicts the steps of pipelines that are made of it: predicted over measured.

    python -m benchmarks.forecasts                 # everything
    python -m benchmarks.forecasts gpt mlp         # some models, in one process

1. In one process: small models of all kinds, GPTs and a Llama, each profiled once, then cut in several ways under
   several schedules. One rank runs at a time there, so a step is predicted as the sum over all actions, plus what
   surrounds them. Times are those of the processor, which other work on the machine disturbs least; freed memory stays
   with the process, as in `benchmarks/throughput.py`. Medians.
2. On two ranks that compute, over Gloo: both profile the model at the same time, and the makespan is simulated, with
   transfers as measured between the ranks. This machine has cores for no more.
3. On more ranks, whose stages sleep: each action lasts as long as it would according to the profile of a GPT, times a
   factor, and sends as many bytes.
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
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import fpipe
from benchmarks import llama, throughput
from benchmarks.common import ranks
from benchmarks.common.models import cross_entropy, gpt, starts
from benchmarks.common.turns import without_collection
from benchmarks.prediction import hurry, lasting, lateness
from fpipe.ir.variant import TRAINING
from fpipe.pipelines.inputs import scatter
from fpipe.runtime.executor import Execution
from fpipe.runtime.instructions import link
from fpipe.runtime.transport.interface import Transport
from schedules import (
    Costs,
    Schedule,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    recompute,
    simulate,
    zb_h1,
    zb_v,
)

MICROBATCHES, WORDS, LENGTH, ROUNDS, LONG_ENOUGH = 4, 256, 64, 9, 0.5
CLOCKS: Final = ("fpipe.runtime.recording.perf_counter", "fpipe.planning.profiler.perf_counter")
SLEEP: Final = 0.01  # seconds that the shortest forward lasts


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
    while len(times) < ROUNDS or (time.perf_counter() - begin < LONG_ENOUGH and len(times) < 100):
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
    begin = time.perf_counter()
    module, example, targets, loss, cuts = model
    with without_collection():
        profile = fpipe.profile(module, example, targets, loss=loss, microbatches=MICROBATCHES)
        took, found = time.perf_counter() - begin, dict[str, float]()
        for how in schedules([2, 4]):
            where = cuts[how.stages]
            pipe = fpipe.pipeline(module, example=example, targets=targets, loss=loss, schedule=how, cuts=where)
            state, step = pipe.init(module), fpipe.value_and_grad(pipe)
            seconds = processor_time(partial(step, *state, example, targets, seed=0))
            simulated = simulate(how, profile.costs(where), pipe.program.graph)
            found[f"{how}"] = (sum(simulated.busy) + profile.step) / seconds
    ratios = " ".join(f"{ratio:.3f}" for ratio in found.values())
    print(
        f"{name}: {len(profile.blocks)} blocks in {took:.1f} s; a step takes {seconds * 1e3:.1f} ms; {ratios}",
        flush=True,
    )
    return [*found.values()]


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
    hurry()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, tuple[float, float]] = {}
    for name, model in (("GPT of 12 blocks", words(12, 256)), ("Llama of 8 layers", hugging_face())):
        module, example, targets, loss, cuts = model
        profile = fpipe.profile(module, example, targets, loss=loss, microbatches=MICROBATCHES)
        for how in (
            *schedules([2]),
            interleaved_1f1b(ranks=2, microbatches=MICROBATCHES),
            zb_v(ranks=2, microbatches=MICROBATCHES),
        ):
            where = cuts[how.stages]
            pipe = fpipe.pipeline(module, example=example, targets=targets, loss=loss, schedule=how, cuts=where)
            state, step, times = pipe.init(module), fpipe.value_and_grad(pipe), []
            for turn in range(2 + ROUNDS):
                dist.barrier()
                start = time.perf_counter()
                step(*state, example, targets)
                times += [ranks.makespan(start, time.perf_counter())] * (turn > 1)
            simulated = simulate(how, profile.costs(where), pipe.program.graph).makespan + profile.step
            found[f"{name}, {how}"] = simulated, statistics.median(times)
    ranks.report({"link": str(profile.link), "found": found})
    dist.destroy_process_group()


class Passing(nn.Module):
    """A stage that computes next to nothing, for inputs of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale the input."""
        return x * self.scale


def sleeping_rank(path: str) -> None:
    """Run one rank whose stages sleep, and report predicted and measured makespans by schedule."""
    hurry()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    count, late = dist.get_world_size(), lateness()
    profile, found = fpipe.Profile.read(path), {}
    for make in (one_f_one_b, gpipe, zb_h1, zb_v, interleaved_1f1b):
        how = make(ranks=count, microbatches=2 * count)
        cuts = [len(profile.blocks) * s // how.stages for s in range(1, how.stages)]
        costs, sizes = profile.costs(cuts), profile.stage_link(cuts).bytes
        assert isinstance(costs.F, tuple), "by stage"
        assert isinstance(sizes, tuple), "by stage"
        factor = SLEEP / min(costs.F)
        times = {kind: [cost * factor for cost in getattr(costs, kind)] for kind in "FBIW"}
        x = torch.ones(how.microbatches, int(max(sizes)) // 4)
        module = nn.Sequential(*[Passing() for _ in range(how.stages)])
        names = [str(stage) for stage in range(1, how.stages)]
        pipe = fpipe.pipeline(module, example=(x,), loss=torch.mean, schedule=how, cuts=names)
        own = fpipe.profile(pipe, (x,), device=fpipe.Roofline(1e12, 1e12))  # for the time of transfers
        F, B, I, W = (tuple(times[kind]) for kind in "FBIW")  # noqa: E741 - the action's name
        simulated = simulate(how, Costs(F, B, I, W, comm=own.stage_link(names)))
        found[str(how)] = simulated.makespan, sleeping_step(pipe, x, times, late)
    ranks.report({"found": found})
    dist.destroy_process_group()


def sleeping_step(pipe: Any, x: torch.Tensor, times: Mapping[str, Sequence[float]], late: float) -> float:
    """Return the median seconds of a step whose actions last as long as `times` says, by kind and stage."""
    plan, (rank,) = pipe.training, pipe.ranks.ranks
    stages = {s: Sleeping(pipe.stages[s], times, late) for s in plan.placement.stages_on(rank)}
    linked = link(plan.program.actions(rank), stages, plan.placement)
    params, buffers = pipe.init({name: torch.ones(()) for name in pipe.names})
    inputs = scatter(plan, params, buffers, pipe.batch(TRAINING, (x,), None), None)

    def execution(rank: int, transport: Transport) -> Execution:
        return Execution(rank, linked, transport, inputs)

    found = []
    for turn in range(4):
        dist.barrier()
        start = time.perf_counter()
        pipe.ranks.run([execution])
        found += [ranks.makespan(start, time.perf_counter())] * bool(turn)
    return statistics.median(found)


class Sleeping:
    """A stage whose functions last as long as its actions should, given that sleeps are `late` seconds too long."""

    def __init__(self, stage: Any, times: Mapping[str, Sequence[float]], late: float) -> None:
        self.stage, s = stage, stage.index
        self.forward = lasting(times["F"][s] - late, stage.forward)
        self.backward = lasting(times["B"][s] - late, stage.backward)
        self.backward_input = lasting(times["I"][s] - late, stage.backward_input)
        self.backward_weight = lasting(times["W"][s] - late, stage.backward_weight)

    def __getattr__(self, name: str) -> Any:
        """Forward everything else to the stage."""
        return getattr(self.stage, name)


def between_ranks() -> None:
    """Print a row for each schedule on two ranks that compute, and on more that sleep."""
    (report, *_) = ranks.start("benchmarks.forecasts", 2, "computing", **throughput.KEPT)
    print_pairs("on two ranks that compute", report["found"])
    with TemporaryDirectory() as folder:
        path = f"{folder}/profile.json"
        module, example, targets, loss, _ = words(12, 256)
        fpipe.profile(module, example, targets, loss=loss, microbatches=MICROBATCHES).save(path)
        for count in (4, 8):
            (report, *_) = ranks.start("benchmarks.forecasts", count, "sleeping", path)
            print_pairs(f"on {count} ranks that sleep", report["found"])


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
            computing_rank()
        case ["sleeping", path]:
            sleeping_rank(path)
        case ["process", *names]:
            torch.set_num_threads(1)
            in_one_process(names)
        case _:
            main()


if __name__ == "__main__":
    run()
