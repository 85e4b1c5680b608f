# SPDX-License-Identifier: Apache-2.0
"""A training script for one device, on many: only the lines with a comment have changed.

    torchrun --standalone --nproc-per-node 4 examples/drop_in.py    # one process per rank, over Gloo
    python examples/drop_in.py                                      # all ranks in this process

Both print the same losses, to the last digit, as a plain loop over the same microbatches. Dropout is the same, too,
because the seed is.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fpipe  # new
from schedules import one_f_one_b  # new

WORDS, WIDTH, LENGTH, ROWS = 32, 32, 16, 16


class Counter(nn.Module):
    """A small transformer that learns to count; its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True) for _ in range(6))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits of the next words."""
        x = self.embedding(words) + self.positions.weight
        mask = torch.triu(torch.full((LENGTH, LENGTH), float("-inf")), 1)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.head(x).transpose(1, 2)


def make_batch() -> tuple[Tensor, Tensor]:
    """Return rows that count from random numbers, and what comes next."""
    rows = (torch.randint(WORDS, (ROWS, 1)) + torch.arange(LENGTH + 1)) % WORDS
    return rows[:, :-1], rows[:, 1:]


def train(steps: int) -> None:
    """Train, print losses, and print how often the trained model counts correctly."""
    torch.manual_seed(0)
    model = Counter()
    x, y = make_batch()
    ranks = int(os.environ.get("WORLD_SIZE", "2"))
    model = fpipe.Pipelined(  # new
        model, loss=cross_entropy, example=(x,), targets=y, schedule=one_f_one_b(ranks=ranks, microbatches=4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    for step in range(steps):
        x, y = make_batch()
        loss = model(x, targets=y)  # was cross_entropy(model(x), y)
        loss.backward()
        model.clip_grad_norm_(1.0)  # was nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 10 == 0 or step + 1 == steps:
            report(f"step {step:4}  loss {loss.item():.6f}")
    model.eval()
    x, y = make_batch()
    report(f"{(model(x).argmax(1) == y).float().mean().item():.1%} of the next words are right")


def report(text: str) -> None:
    """Print a line, once for all ranks."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="Train a small transformer as a pipeline.")
    parser.add_argument("--steps", type=int, default=200)
    torch.set_num_threads(1)
    train(parser.parse_args(arguments).steps)


if __name__ == "__main__":
    main()
