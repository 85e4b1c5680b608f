# SPDX-License-Identifier: Apache-2.0
"""Train a byte-level GPT on the sources of Python's standard library, as a pipeline of four ranks.

    torchrun --nproc-per-node 4 examples/train_gpt.py    # one process per rank, over Gloo
    python examples/train_gpt.py                         # all four ranks in one process

First, a step is proved to be that of one device, for every batch. Both print the same losses, to the last digit. During
the first steps, every rank also trains the whole model in a plain PyTorch loop; the job fails unless loss, gradients
and parameters agree bit for bit.

It takes about two minutes on two cores and needs no GPU and no download. `--help` lists the options.
"""

from __future__ import annotations

import argparse
import copy
import os
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import mean
from time import perf_counter

import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.optim import AdamW

import fpipe
from schedules import Span, drawing, gpipe, one_f_one_b, simulate, spans, summarize

SCHEDULES = {"one_f_one_b": one_f_one_b, "gpipe": gpipe}
MEASURED = 5  # the last steps, whose times are reported
HELD_OUT = 8  # batches
PROVED = 2  # rows, each a microbatch: more would run the same stages again
BYTES = 256
State = dict[str, Tensor]  # parameters or gradients, by the model's own names

# --- The model: an ordinary module that knows nothing about pipelines ------------------------------------------------


class Block(nn.Module):
    """Causal attention and an MLP, each after a LayerNorm and with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nnf.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(nnf.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A GPT from bytes to logits of the next byte. Embedding and head, at opposite ends of the pipeline, are tied."""

    def __init__(self, context: int, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.05)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        x = self.embedding(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nnf.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --- The text: something every machine with Python has ---------------------------------------------------------------


def standard_library(limit: int = 4_000_000) -> tuple[Tensor, Tensor]:
    """Return bytes to train on and held-out bytes: the modules of the standard library, every tenth held out."""
    folder = Path(sysconfig.get_path("stdlib"))
    modules = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    training = b"".join(text for k, text in enumerate(modules) if k % 10 != 9)[:limit]
    held_out = b"".join(modules[9::10])[:limit]
    if len(training) < 1_000_000 or len(held_out) < 50_000:
        raise SystemExit(
            f"{folder}: got {len(training)} bytes of *.py to train on and {len(held_out)} held out, expected at least "
            "1000000 and 50000. Run a Python whose standard library is installed as source files."
        )
    training, held_out = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (training, held_out))
    return training, held_out


def batches(text: Tensor, args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random batches of tokens and next tokens forever; the seed makes them the same on every rank."""
    generator = torch.Generator().manual_seed(args.seed)
    while True:
        starts = torch.randint(len(text) - args.context, (args.batch, 1), generator=generator)
        windows = text[starts + torch.arange(args.context + 1)].long()
        yield windows[:, :-1], windows[:, 1:]


# --- The training loop -----------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """Train and report. Raise `MismatchError` if the pipeline differs from one device."""
    console = first_rank_console()
    text, held_out = standard_library()
    evaluation = list(islice(batches(held_out, args), HELD_OUT))
    torch.manual_seed(args.seed)
    model = GPT(args.context, args.layers, args.width, args.heads, args.dropout)
    pipe = pipeline(model, evaluation[0], args)
    console.print(prove(pipe, model, evaluation[0], args))
    params, buffers = pipe.init(model)  # only those of this process's ranks
    optimizer = AdamW(params.values(), args.lr)
    recorded: list[Span] = []
    step, evaluate = fpipe.value_and_grad(pipe, record=recorded.append), fpipe.evaluate(pipe)
    one_device = OneDevice(pipe, model, args)
    timelines = []

    def held_out_loss() -> float:
        return mean(evaluate(params, buffers, (x,), y).loss.item() for x, y in evaluation)

    size = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"{size:,} parameters, {len(text):,} bytes to train on, {pipe.schedule!r}")
    before = held_out_loss()
    with progress(console) as bar:
        task = bar.add_task("", total=args.steps, loss=before, speed=0.0)
        for i, (tokens, targets) in enumerate(islice(batches(text, args), args.steps)):
            start = perf_counter()
            recorded.clear()
            out, grads = step(params, buffers, (tokens,), targets, seed=i)
            buffers = out.buffers
            update(optimizer, params, grads)
            speed = tokens.numel() / (perf_counter() - start)

            if i < args.checks:
                one_device.step(i, tokens, targets, out.loss, grads, params)
            del grads  # free these gradients before the next step makes new ones
            if i >= args.steps - MEASURED:
                timelines.append(fpipe.timeline(pipe, recorded))
            if i % args.every == 0 or i == args.steps - 1:
                console.print(f"step {i:4}   loss {out.loss:.8f}   {speed:8,.0f} tokens/s")
            bar.update(task, advance=1, loss=out.loss, speed=speed)
    console.print(f"held-out loss {before:.8f} before, {held_out_loss():.8f} after {args.steps} steps")
    if args.checks:
        console.print(one_device.verdict(params))
    console.print(report(pipe, timelines))
    if args.timeline and not console.quiet:
        Path(args.timeline).write_text(measured_above_simulated(pipe, timelines[-1]))


def pipeline(model: nn.Module, example: tuple[Tensor, Tensor], args: argparse.Namespace) -> fpipe.Pipeline:
    """Return the model cut into one stage per rank, with the chosen schedule."""
    tokens, targets = example
    return fpipe.pipeline(
        model,
        example=(tokens,),
        targets=targets,
        loss=cross_entropy,
        schedule=SCHEDULES[args.schedule](ranks=args.ranks, microbatches=args.microbatches),
        cuts=[f"blocks.{args.layers * rank // args.ranks}" for rank in range(1, args.ranks)],
    )


def prove(pipe: fpipe.Pipeline, model: nn.Module, example: tuple[Tensor, Tensor], args: argparse.Namespace) -> str:
    """Return what is proved of a step for every batch; raise `MismatchError` if something is not."""
    start, (tokens, targets) = perf_counter(), [one[:PROVED] for one in example]
    proof = fpipe.prove(pipe, model, (tokens,), targets, seed=args.seed)
    if not proof.is_complete:
        raise fpipe.MismatchError(str(proof))
    claims, _, _ = str(proof).partition("\nassumed")
    return f"proved in {perf_counter() - start:.1f} s, for every batch and all parameters:\n{claims}"


def update(optimizer: AdamW, params: State, grads: State) -> None:
    """Run one optimizer step: set `.grad`, where torch's optimizers expect gradients, and clear it again."""
    for name, parameter in params.items():
        parameter.grad = grads[name]
    optimizer.step()
    optimizer.zero_grad()


def first_rank_console() -> Console:
    """Return a console that prints on the first rank and is quiet on the others."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return Console(quiet=rank != 0, highlight=False, markup=False, soft_wrap=True)


def progress(console: Console) -> Progress:
    """Return a progress bar, disabled unless the console is a terminal and not quiet."""
    fields = TextColumn("loss {task.fields[loss]:.3f}   {task.fields[speed]:,.0f} tokens/s")
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), fields
    return Progress(*columns, console=console, disable=console.quiet or not console.is_terminal)


# --- What the pipeline must equal: the whole model on one device -----------------------------------------------------


def plain_loop(model: nn.Module, tokens: Tensor, targets: Tensor, microbatches: int) -> tuple[Tensor, State]:
    """Return loss and gradients of one step in plain PyTorch, one microbatch after another."""
    model.zero_grad()
    total = torch.zeros(())
    for x, y in zip(tokens.tensor_split(microbatches), targets.tensor_split(microbatches), strict=True):
        loss = cross_entropy(model(x), y) / microbatches
        loss.backward()
        total += loss.detach()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


class OneDevice:
    """The whole model, trained from the same start without a pipeline, to compare with."""

    def __init__(self, pipe: fpipe.Pipeline, model: nn.Module, args: argparse.Namespace) -> None:
        self.args, self.model, self.reference = args, copy.deepcopy(model), fpipe.reference(pipe)
        self.params = dict(self.model.named_parameters())
        self.optimizer = AdamW(self.params.values(), args.lr)

    def step(self, i: int, tokens: Tensor, targets: Tensor, loss: Tensor, grads: State, params: State) -> None:
        """Run step `i` too, and raise `MismatchError` unless loss, gradients and new parameters are the same."""
        out, expected = self.reference(self.params, {}, (tokens,), targets, seed=i)
        require_same_bits(f"step {i}, against fpipe.reference", named(loss, grads), named(out.loss, expected))
        if not self.args.dropout:  # the plain loop would draw different random numbers
            total, expected = plain_loop(self.model, tokens, targets, self.args.microbatches)
            require_same_bits(f"step {i}, against the plain loop", named(loss, grads), named(total, expected))
        update(self.optimizer, self.params, expected)
        require_same_bits(f"step {i}, after the update", params, self.params)

    def verdict(self, params: State) -> str:
        """Return what was found equal. Raise `MismatchError` if no rank holds, and so none compared, some parameter."""
        held = torch.tensor([name in params for name in self.params], dtype=torch.int32)
        if dist.is_initialized():
            dist.all_reduce(held, op=dist.ReduceOp.MAX)
        if not held.all():
            raise fpipe.MismatchError(f"parameters on all ranks together: got {held.sum()}, expected {len(held)}.")
        ways = "fpipe.reference" if self.args.dropout else "a plain PyTorch loop and of fpipe.reference"
        return (
            f"first {min(self.args.checks, self.args.steps)} steps: loss, all {len(held)} gradients and parameters "
            f"equal, bit for bit, those of {ways}, on every rank"
        )


def named(loss: Tensor, grads: State) -> State:
    """Return loss and gradients under the names that errors show."""
    return {"loss": loss} | {f"gradient of {name}": grad for name, grad in grads.items()}


def require_same_bits(where: str, got: State, expected: State) -> None:
    """Raise `MismatchError`, naming the first tensor, if any bit of `got` differs from `expected`."""
    for name, tensor in got.items():
        if not torch.equal(tensor.view(torch.int32), expected[name].view(torch.int32)):
            far = (tensor - expected[name]).abs().max().item()
            raise fpipe.MismatchError(f"{where}, {name}: got other bits, expected the same; they are {far:.3g} apart.")


# --- The bubble, predicted and measured ------------------------------------------------------------------------------


def report(pipe: fpipe.Pipeline, timelines: Sequence[Sequence[Span]]) -> str:
    """Return the picture of the schedule, the times of F and B on each stage, and the bubble."""
    how, costs = pipe.schedule, fpipe.costs(pipe, *timelines)
    lines = [f"\n{how!r}", str(how)]
    for kind, by_stage in (("F", costs.F), ("B", costs.B)):
        times = "  ".join(f"{1000 * time:.1f}" for time in by_stage)
        lines.append(f"{kind} by stage: {times} ms, medians of the last {len(timelines)} steps")
    lines.append(f"bubble predicted from these times: {simulate(how, costs, pipe.program.graph).bubble:.3f}")
    if dist.is_initialized():
        found, cores = [summarize(timeline, how) for timeline in timelines], os.cpu_count()
        shared = ", which they wait for too" if cores < how.ranks else ""
        bubble = mean(one.bubble for one in found)
        lines.append(f"bubble measured: {bubble:.3f}, of {how.ranks} processes on {cores} cores{shared}")
        waits = "  ".join(f"{1000 * mean(times):.1f}" for times in zip(*[one.waited for one in found], strict=True))
        lines.append(f"waits by rank: {waits} ms per step; a transfer took {1000 * costs.comm:.1f} ms")
    else:
        lines.append("bubble measured: only under torchrun; in one process the ranks take turns on one thread")
    return "\n".join(lines)


def measured_above_simulated(pipe: fpipe.Pipeline, timeline: Sequence[Span]) -> str:
    """Return a picture of the measured step, and of the step simulated with its costs."""
    simulated = spans(pipe.schedule, fpipe.costs(pipe, timeline), pipe.program.graph)
    return drawing.svg({"measured, in seconds": timeline, "simulated with its costs": simulated})


# --- Options ---------------------------------------------------------------------------------------------------------


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=SCHEDULES, default="one_f_one_b")
    parser.add_argument("--ranks", type=int, default=4, help="in one process; torchrun sets its own number (default 4)")
    for name, default, text in [
        ("microbatches", 8, "microbatches per batch"),
        ("steps", 300, "steps of training"),
        ("batch", 32, "sequences per batch"),
        ("context", 64, "bytes per sequence"),
        ("layers", 8, "transformer blocks"),
        ("width", 128, "width of the model"),
        ("heads", 4, "attention heads"),
        ("checks", 3, "first steps that are compared with one device"),
        ("every", 20, "a line every so many steps"),
        ("seed", 0, "seed of the initial parameters, the batches and dropout"),
    ]:
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW (default 0.001)")
    parser.add_argument("--dropout", type=float, default=0.0, help="compared with fpipe.reference only (default 0)")
    parser.add_argument("--timeline", help="a file for a picture of the last step: measured above simulated (SVG)")
    args = parser.parse_args(arguments)
    if min(args.steps, args.every) < 1:
        parser.error(f"--steps, --every: got {args.steps} and {args.every}, expected at least 1")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = options(arguments)
    torch.set_num_threads(1)  # sums split over a different number of threads may round differently
    if dist.is_torchelastic_launched():  # by torchrun
        dist.init_process_group("gloo")
        args.ranks = dist.get_world_size()
    train(args)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
