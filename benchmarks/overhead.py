# SPDX-License-Identifier: Apache-2.0
"""What the executor costs, beside torch.distributed.pipelining in the same run.

    python benchmarks/overhead.py               # microseconds per compute action, all ranks in one process
    python benchmarks/overhead.py --end-to-end  # and steps per second of two Gloo ranks on a GPT of 3.3 million
                                                # parameters

Overhead is time over a bare loop, per compute action (one forward or one backward of one stage for one microbatch). The
bare loop calls the same stage functions and accumulates gradients, and does nothing else: once in the order in which
the executor calls them, and once microbatch after microbatch, which is kinder to the processor's caches than 1F1B is.
For the incumbent it calls the same modules and `.backward()`. All run stages of Linear(8, 8), GC off, best of many
rounds in turns.

In one process the incumbent holds all stages on one rank, since its transport needs a process per rank, so it sends
nothing. Ours is measured both so and with a rank per stage, where every value passes through the transport.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.remove(str(Path(__file__).parent))  # its schedules.py is a benchmark, not the package

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

import fpipe
from fpipe.executor import Execution, Inputs, Port, StageLike
from fpipe.linking import link
from fpipe.step import scatter
from fpipe.transport.contract import Transport
from fpipe.transport.local import LocalRanks
from schedules import Action, B, F, Schedule, Span, gpipe, linear, lower, one_f_one_b, schedule

STAGES, MICROBATCHES, WIDTH = 4, 32, 8


@schedule(placement=linear)
def depth_first(rank: int, ranks: int, microbatches: int, chunks: int = STAGES) -> Iterator[Action]:
    """All stages of a rank, microbatch after microbatch."""
    stages = range(rank * chunks, (rank + 1) * chunks)
    for i in range(microbatches):
        yield from (F(stage, i) for stage in stages)
        yield from (B(stage, i) for stage in reversed(stages))


def best(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The shortest time of each function in seconds.

    The functions take turns, so that they see the same machine; each is timed right after a call of its own, so that
    none pays for what the one before it left in the caches.
    """
    times = dict.fromkeys(functions, float("inf"))
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, function in functions.items():
            function()
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


def ours(name: str, made: Schedule) -> dict[str, Callable[[], object]]:
    """The executor under one schedule, and the bare loops of the same stage functions."""
    model = layers()
    x, y = torch.randn(2, MICROBATCHES, WIDTH)
    cuts = [str(stage) for stage in range(1, STAGES)]
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mean_square, schedule=made, cuts=cuts)
    params, buffers = pipe.init(model)
    inputs = scatter(pipe.training, params, buffers, ((x,), y), None)
    spans: list[Span] = []
    pipe.run(pipe.training, inputs, spans.append)
    plain = [action for i in range(MICROBATCHES) for action in microbatch(i)]
    return {
        name: lambda: pipe.run(pipe.training, inputs),
        f"{name}, bare": lambda: bare(pipe.stages, inputs, [span.action for span in spans]),
        f"{name}, plain": lambda: bare(pipe.stages, inputs, plain),
    }


class Empty:
    """A stage of a chain whose functions return at once, for the executor's own time."""

    def __init__(self, s: int) -> None:
        before, after = [Port(s - 1, ((),))] * (s > 0), [Port(s + 1, ((),))] * (s < STAGES - 1)
        self.gets, self.gives, self.pulls, self.pulled_by = before, after, before, after
        self.shares, self.shared_by, self.totals, self.results = [], [], (), ((),) * (not after)

    def forward(self, *_: object) -> tuple[tuple[int], tuple[()], int]:
        """One output."""
        return (0,), (), 0

    def evaluate(self, *_: object) -> tuple[tuple[int], tuple[()]]:
        """One output."""
        return (0,), ()

    def backward(self, *_: object) -> tuple[tuple[int], tuple[()]]:
        """One cotangent."""
        return (0,), ()

    def accumulate(self, *_: object) -> tuple[()]:
        """Nothing."""
        return ()


def executor_alone(name: str, made: Schedule) -> dict[str, Callable[[], object]]:
    """The executor with empty stages."""
    program, nothing = lower(made), dict.fromkeys(range(STAGES), ())
    stages = [Empty(s) for s in range(STAGES)]
    inputs = Inputs(nothing, nothing, lambda s, i: (), [0] * MICROBATCHES)
    held = [{s: stages[s] for s in made.placement.stages_on(rank)} for rank in range(made.ranks)]
    linked = [link(program.actions(rank), held[rank], made.placement) for rank in range(made.ranks)]

    def run(rank: int, transport: Transport) -> Execution:
        return Execution(linked[rank], transport, inputs)

    order = [action for i in range(MICROBATCHES) for action in microbatch(i)]
    return {
        name: lambda: LocalRanks(made.ranks).run(run),
        f"{name}, bare": lambda: bare(stages, inputs, order),
    }


def microbatch(i: int) -> list[Action]:
    """One microbatch through all stages and back."""
    return [F(s, i) for s in range(STAGES)] + [B(s, i) for s in reversed(range(STAGES))]


def bare(stages: Sequence[StageLike], inputs: Inputs, order: list[Action]) -> None:
    """Call the stage functions of a chain in this order."""
    totals: list[tuple[torch.Tensor, ...]] = [()] * STAGES
    counts = [0] * STAGES
    values: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
    kept = {}
    for kind, s, i, _, _ in order:
        stage = stages[s]
        if kind == "F":
            arguments = inputs.batch(s, i) + values.pop((s, i), ())
            values[s + 1, i], _, kept[s, i] = stage.forward(inputs.params[s], (), arguments, 0)
            if s == STAGES - 1:
                values[s, i] = ()
        else:
            values[s - 1, i], grads = stage.backward(kept.pop((s, i)), values.pop((s, i)))
            totals[s] = stage.accumulate(totals[s], grads, counts[s])
            counts[s] += 1


def incumbents() -> dict[str, Callable[[], object]]:
    """The incumbent's two runtimes with all stages in this process, each with the bare loop of its modules."""
    modules = layers()
    x, y = torch.randn(2, MICROBATCHES, WIDTH)
    device = torch.device("cpu")
    single = Schedule1F1B(PipelineStage(modules[0], 0, 1, device), MICROBATCHES, loss_fn=mean_square)
    parts = [PipelineStage(module, s, STAGES, device) for s, module in enumerate(modules)]
    general = ScheduleInterleaved1F1B(parts, MICROBATCHES, loss_fn=mean_square)

    def loop(used: list[nn.Module]) -> None:
        for a, b in zip(x.split(1), y.split(1), strict=True):
            value = a
            for module in used:
                value = module(value)
            (mean_square(value, b) / MICROBATCHES).backward()

    return {
        "incumbent, 1F1B, 1 stage": lambda: single.step(x, target=y),
        "incumbent, 1F1B, 1 stage, bare": lambda: loop(modules[:1]),
        "incumbent, general, 1 rank": lambda: general.step(x, target=y),
        "incumbent, general, 1 rank, bare": lambda: loop(modules),
    }


def overhead(rounds: int) -> None:
    """Print microseconds per compute action over the bare loops."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    theirs = incumbents()
    dist.destroy_process_group()
    everything = {
        **ours("fpipe, 1F1B, 4 ranks", one_f_one_b(ranks=STAGES, microbatches=MICROBATCHES)),
        **executor_alone("fpipe, 1F1B, empty stages", one_f_one_b(ranks=STAGES, microbatches=MICROBATCHES)),
        **ours("fpipe, GPipe, 4 ranks", gpipe(ranks=STAGES, microbatches=MICROBATCHES)),
        **ours("fpipe, 1 rank", depth_first(ranks=1, microbatches=MICROBATCHES)),
        **theirs,
    }
    times = best(everything, rounds)
    print(f"{'us per compute action':<28}{'over same order':>16}{'over microbatches':>18}{'bare, same order':>18}")
    for name in everything:
        if not name.endswith(("bare", "plain")):
            actions = 2 * MICROBATCHES * (1 if "1 stage" in name else STAGES)
            loop = times[f"{name}, bare"]
            plain = times.get(f"{name}, plain", loop)
            row = ((times[name] - loop) / actions, (times[name] - plain) / actions, loop / actions)
            print(f"{name:<28}{row[0] * 1e6:>16.2f}{row[1] * 1e6:>18.2f}{row[2] * 1e6:>18.2f}")


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and MLP, each with a residual."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 8, width // 8).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    """Tokens and positions."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Parameter(torch.zeros(length, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embed."""
        return self.tokens(tokens) + self.positions


def flat_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss over all positions."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def end_to_end(rounds: int) -> None:
    """One of two Gloo ranks: steps per second of both libraries in turns, median over rounds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, (width, length, batch, microbatches) = dist.get_rank(), (256, 128, 16, 8)
    torch.manual_seed(0)
    model = nn.Sequential(Embedding(width, length), *[Block(width) for _ in range(4)], nn.Linear(width, 256))
    tokens, targets = torch.randint(0, 256, (2, batch, length))
    made = one_f_one_b(ranks=2, microbatches=microbatches)
    pipe = fpipe.pipeline(model, example=(tokens,), targets=targets, loss=flat_cross_entropy, schedule=made, cuts=["3"])
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    half = model[:3] if rank == 0 else model[3:]
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))
    theirs = Schedule1F1B(stage, microbatches, loss_fn=flat_cross_entropy)

    def incumbent() -> None:
        half.zero_grad(set_to_none=True)
        theirs.step(tokens) if rank == 0 else theirs.step(target=targets)

    functions = {"fpipe": lambda: step(*state, (tokens,), targets), "incumbent": incumbent}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 2):
        for name, function in functions.items():
            dist.barrier()
            start = time.perf_counter()
            function()
            dist.barrier()
            times[name] += [time.perf_counter() - start] if turn >= 2 else []
    if rank == 0:
        mine, other = (statistics.median(times[name]) for name in functions)
        parameters = sum(p.numel() for p in model.parameters())
        print(
            f"two Gloo ranks, 1F1B, {microbatches} microbatches, GPT of {parameters:,} parameters, median of {rounds}:"
        )
        print(f"fpipe {1 / mine:.2f} steps/s, incumbent {1 / other:.2f} steps/s, ratio {other / mine:.3f}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="rounds of the overhead measurement")
    parser.add_argument("--end-to-end", action="store_true", help="two Gloo ranks, too")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        return end_to_end(rounds=30)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    overhead(arguments.rounds)
    if arguments.end_to_end:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        subprocess.run(launch, check=True)


if __name__ == "__main__":
    main()
