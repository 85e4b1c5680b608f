# SPDX-License-Identifier: Apache-2.0
"""The step time of a GPT in slices, over that of the same GPT with whole sequences.

    python -m benchmarks.slices

All ranks are in this process, with one thread, so this is the work of all of them: slices add calls, and the transfer
of the carry; they save what attention computes of tokens that a mask hides. CPU seconds, medians of interleaved rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fpipe
from benchmarks.common.rounds import rounds
from benchmarks.common.rows import row
from benchmarks.common.turns import Function, medians
from schedules import Schedule, one_f_one_b, seq_1f1b

WIDTH, HEADS, LAYERS, WORDS, LENGTH, MICROBATCHES = 256, 4, 4, 256, 512, 2
ROUNDS = rounds(4)


class Block(nn.Module):
    """A block of a GPT; its carry has the keys and values of all earlier tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, carry: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the hidden state of these tokens, and the keys and values of all tokens so far."""
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1))
        if carry is not None:
            k, v = torch.cat([carry[0], k], 2), torch.cat([carry[1], v], 2)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x), (k, v)


class GPT(nn.Module):
    """A GPT that takes a carry."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(
        self, ids: Tensor, carry: list[tuple[Tensor, Tensor]] | None = None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the logits of these tokens, and the carry of each block."""
        x, left = self.embed(ids), []
        for k, block in enumerate(self.blocks):
            x, own = block(x, None if carry is None else carry[k])
            left.append(own)
        return self.head(x), left


def word_loss(logits: Tensor, words: Tensor) -> Tensor:
    """Return the loss per word."""
    return cross_entropy(logits.flatten(0, 1), words.flatten())


def step(how: Schedule) -> Function:
    """Return a step of the model under a schedule."""
    torch.manual_seed(0)
    model, (ids, words) = GPT(), torch.randint(WORDS, (2, 2 * MICROBATCHES, LENGTH))
    pipe = fpipe.pipeline(model, example=(ids,), targets=words, loss=word_loss, schedule=how, cuts=["blocks.2"])
    run, (params, buffers) = fpipe.value_and_grad(pipe), pipe.init(model)
    return lambda: run(params, buffers, (ids,), words)


def main() -> None:
    torch.set_num_threads(1)
    steps = {n: step(seq_1f1b(2, MICROBATCHES, slices=n)) for n in (1, 2, 4, 8)}
    steps[0] = step(one_f_one_b(2, MICROBATCHES))
    found = medians({str(n): one for n, one in steps.items()}, ROUNDS)
    for n in (1, 2, 4, 8):
        print(
            row(
                f"a step of a GPT in {n} slices / with whole sequences of {LENGTH}",
                "",
                found[str(n)] / found["0"],
                None,
            )
        )


if __name__ == "__main__":
    main()
