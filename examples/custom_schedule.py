# SPDX-License-Identifier: Apache-2.0
"""Invent a schedule: write it, check it, draw it, test it at all sizes, simulate it, and train with it.

    python examples/custom_schedule.py                                         # three ranks in this process
    torchrun --standalone --nproc-per-node 4 examples/custom_schedule.py       # one process per rank, over Gloo

1F1B keeps the activations of as many microbatches on the first rank as there are ranks. If they do not fit, a limit
helps, but takes time. The table shows how much; then a pipeline with limit 2 trains as one device does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

import fpipe
from schedules import Action, B, Costs, F, check, linear, one_f_one_b, schedule, simulate
from schedules.testing import conformance

MICROBATCHES = 8


@schedule(placement=linear)
def limited_1f1b(rank: int, ranks: int, microbatches: int, limit: int) -> Iterator[Action]:
    """Yield the actions of one rank: those of 1F1B, with at most `limit` microbatches kept at any time."""
    ahead = min(ranks - 1 - rank, limit - 1, microbatches)
    for i in range(ahead):
        yield F(rank, i)
    for i in range(microbatches - ahead):
        yield F(rank, ahead + i)
        yield B(rank, i)
    for i in range(microbatches - ahead, microbatches):
        yield B(rank, i)


def compare(ranks: int) -> Iterator[str]:
    """Yield a line for each limit: what the first rank keeps, and how long it idles."""
    costs = Costs(F=1, B=2)
    for limit in range(1, ranks + 1):
        how = limited_1f1b(ranks=ranks, microbatches=MICROBATCHES, limit=limit)
        check(how)  # raises at the first action that can't work, and says why
        found = simulate(how, costs)
        yield f"limit {limit}: {found.peak_memory[0]:.0f} microbatches kept, {found.bubble:.0%} idle"
    best = simulate(one_f_one_b(ranks=ranks, microbatches=MICROBATCHES), costs)
    yield f"1F1B:    {best.peak_memory[0]:.0f} microbatches kept, {best.bubble:.0%} idle"


def train(ranks: int) -> str:
    """Run three steps as a pipeline, on one device, and as the plain module: raise unless all bits are the same."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2 * ranks)))
    x, y = torch.randn(2, 4 * MICROBATCHES, 16)
    how = limited_1f1b(ranks=ranks, microbatches=MICROBATCHES, limit=2)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=nn.functional.mse_loss, schedule=how)
    found = fpipe.verify(pipe, model, (x,), y, steps=3)
    return f"{found.reference} tensors equal those of one device, {found.eager} those of the module, bit for bit"


def main() -> None:
    """Check, compare and train, in one process or several."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    ranks = dist.get_world_size() if dist.is_initialized() else 3
    lines = [str(limited_1f1b(ranks=ranks, microbatches=MICROBATCHES, limit=2)), *compare(ranks)]
    if not dist.is_initialized():
        conformance(limited_1f1b)()  # all sizes, graphs and costs that Hypothesis thinks of
        lines.append("conforms at all sizes tried")
    lines.append(train(ranks))
    if int(os.environ.get("RANK", "0")) == 0:
        print(*lines, sep="\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
