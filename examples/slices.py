# SPDX-License-Identifier: Apache-2.0
"""Train a small language model on long sequences in slices, and compare it with whole sequences.

    python examples/slices.py                                         # two ranks in this process
    torchrun --standalone --nproc-per-node 2 examples/slices.py       # one process per rank, over Gloo

Losses are those of whole sequences but for rounding, bits are those of a loop over slices on one device.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import fpipe
from schedules import Costs, Schedule, one_f_one_b, seq_1f1b, simulate

WORDS, WIDTH, HEADS, TOKENS = 64, 32, 4, 48


class Block(nn.Module):
    """A block with causal attention; its carry has the keys and values of earlier slices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor, carry: Any) -> tuple[Tensor, Any]:
        """Return the outputs of a slice, and the keys and values so far."""
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        if carry is not None:
            k, v = torch.cat([carry[0], k], 2), torch.cat([carry[1], v], 2)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=x.device).tril(k.shape[2] - q.shape[2])
        y = scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x), (k, v)


class Model(nn.Module):
    """A model whose carry is a list with that of each block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids: Tensor, carry: Any = None) -> tuple[Tensor, Any]:
        """Return the logits of a slice, and the carry for the next one."""
        x, left = self.embed(ids), []
        for k, block in enumerate(self.blocks):
            x, own = block(x, None if carry is None else carry[k])
            left.append(own)
        return self.head(x), left


def word_loss(logits: Tensor, words: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), words.flatten())


def train(schedule: Schedule, model: Model, text: Tensor, steps: int) -> list[float]:
    ids, words = text[:, :-1], text[:, 1:].clone()
    how: dict[str, Any] = {"targets": words, "loss": word_loss, "schedule": schedule, "cuts": ["blocks.2"]}
    with fpipe.pipeline(model, example=(ids,), **how) as pipe:
        fpipe.verify(pipe, model, (ids,), words)
        params, buffers = pipe.init(model)
        init, update = fpipe.optimizer(torch.optim.AdamW, lr=3e-3)
        state, step, losses = init(params), fpipe.value_and_grad(pipe), []
        for _ in range(steps):
            out, grads = step(params, buffers, (ids,), words)
            params, state = update(grads, state, params)
            losses.append(out.loss.item())
    return losses


def main(steps: int = 5) -> None:
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, text = Model(), torch.randint(WORDS, (4, TOKENS + 1))
    for schedule in (one_f_one_b(2, 4), *(seq_1f1b(2, 4, slices=n) for n in (2, 4))):
        losses, found = train(schedule, model, text, steps), simulate(schedule, Costs(F=1, B=2))
        if not dist.is_initialized() or dist.get_rank() == 0:
            shown = f"idle {found.bubble:.0%}, memory {max(found.peak_memory)} microbatches, loss"
            print(f"{schedule!r}: {shown} {' '.join(f'{loss:.4f}' for loss in losses)}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
