# SPDX-License-Identifier: Apache-2.0
"""A training loop of pure functions: parameters, buffers and optimizer state are values that go in and come out.

    torchrun --standalone --nproc-per-node 4 examples/functional_loop.py    # one process per rank, over Gloo
    python examples/functional_loop.py                                      # two ranks in this process

It accumulates gradients over two batches, clips them, and warms up. A progress bar shows loss, tokens per second, and
the bubble with the times just measured. `--logs FOLDER` writes them for TensorBoard, if it is installed.
"""

from __future__ import annotations

import argparse
import os
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fpipe
from schedules import Span, simulate, zb_h1

WORDS, WIDTH, LENGTH, ROWS, MICROBATCHES, BATCHES = 32, 32, 16, 16, 4, 2
RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def build_model() -> nn.Module:
    """Return a small network that reads one word and predicts the next; the same in every process."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))


def make_batch(number: int) -> tuple[tuple[Tensor], Tensor]:
    """Return rows that count, and what comes next; they depend only on the number."""
    starts = torch.randint(WORDS, (ROWS, 1), generator=torch.Generator().manual_seed(number))
    rows = (starts + torch.arange(LENGTH + 1)) % WORDS
    return (rows[:, :-1],), rows[:, 1:]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each next word."""
    return cross_entropy(logits.transpose(1, 2), targets)


def train(pipe: fpipe.Pipeline, steps: int, bar: Progress, writer: Any = None) -> None:
    """Train, and report each step to a progress bar and, if there is one, a writer of TensorBoard."""
    params, buffers = pipe.init(build_model())
    spans: list[Span] = []
    step = fpipe.value_and_grad(pipe, record=spans.append)
    init, update = fpipe.optimizer(torch.optim.AdamW, groups={"*.bias": {"weight_decay": 0.0}}, names=pipe.names)
    state, task = init(params), bar.add_task("", total=steps)
    for i in range(steps):
        start, total, grads = perf_counter(), torch.zeros(()), None
        for k in range(i * BATCHES, (i + 1) * BATCHES):  # bit for bit one plain loop over all their microbatches
            spans.clear()
            out, grads = step(params, buffers, *make_batch(k), seed=k, onto=grads, total=BATCHES * MICROBATCHES)
            buffers, total = out.buffers, total + out.loss
        grads, norm = fpipe.clip(pipe, grads, 1.0)
        params, state = update(grads, state, params, lr=0.01 * min(1, (i + 1) / 10))
        speed = BATCHES * ROWS * LENGTH / (perf_counter() - start)
        bubble = simulate(pipe.schedule, fpipe.costs(pipe, fpipe.timeline(pipe, spans)), pipe.program.graph).bubble
        found = {"loss": total.item(), "norm": norm.item(), "tokens/s": speed, "bubble": bubble}
        bar.update(task, advance=1, description="  ".join(f"{name} {value:.3g}" for name, value in found.items()))
        for name, value in found.items() if writer else ():
            writer.add_scalar(name, value, i)
        if i % 20 == 0 or i + 1 == steps:
            bar.console.print(f"step {i:4}  loss {total.item():.6f}  norm {norm.item():.6f}")


def main() -> None:
    """Train, alone or as one rank of several."""
    parser = argparse.ArgumentParser(description="Train a small network as a pipeline, with pure functions.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--logs", help="a folder for TensorBoard")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if SIZE > 1:
        dist.init_process_group("gloo")
    (inputs, targets), how = make_batch(0), zb_h1(ranks=max(2, SIZE), microbatches=MICROBATCHES)
    pipe = fpipe.pipeline(build_model(), example=inputs, targets=targets, loss=loss, schedule=how)
    if args.logs:
        from torch.utils.tensorboard import SummaryWriter  # where it is installed
    writer = SummaryWriter(args.logs) if args.logs and RANK == 0 else None
    console = Console(quiet=RANK != 0, highlight=False)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        train(pipe, args.steps, bar, writer)
    if SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
