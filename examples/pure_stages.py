# SPDX-License-Identifier: Apache-2.0
"""Stages that are pure functions of nested parameter pytrees, under three schedules, with the bits of a plain loop.

    python examples/pure_stages.py                                         # four ranks in this process
    torchrun --standalone --nproc-per-node 4 examples/pure_stages.py       # one process per rank, over Gloo

There is no module. Two of the four stages are the same function with different parameters. The embedding is read twice,
by the first block and by the head; its cotangents are added in the order of one device.
"""

from __future__ import annotations

import os
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import fpipe
from schedules import gpipe, lower, one_f_one_b, zb_h1

WORDS, WIDTH, STEPS, MICROBATCHES = 32, 16, 3, 4
IDS = (torch.arange(8)[:, None] + torch.arange(8)) % WORDS
NEXT = IDS + 1


def embed(params: dict[str, Tensor], inputs: tuple[Tensor]) -> Tensor:
    return params["words"][inputs[0]] + params["places"]


def block(params: list[tuple[Tensor, Tensor]], inputs: tuple[Tensor]) -> Tensor:
    x = inputs[0]
    for weight, bias in params:
        x = x + torch.tanh(x @ weight + bias)
    return x


def head(params: Tensor, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    logits, targets = (inputs[0] + inputs[1]) @ params, inputs[2]
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss, (logits.argmax(-1) == targets).sum()  # beside the loss, any values


STAGES = {
    "embed": (embed, ["inputs"]),
    "first": (block, ["embed"]),
    "second": (block, ["first"]),
    "head": (head, ["second", "embed", "targets"]),
}


def start() -> list[Any]:
    torch.manual_seed(0)
    blocks = [[(torch.randn(WIDTH, WIDTH) / 4, torch.zeros(WIDTH)) for _ in range(3)] for _ in range(2)]
    return [{"words": torch.randn(WORDS, WIDTH), "places": torch.zeros(8, WIDTH)}, *blocks, torch.zeros(WIDTH, WORDS)]


def update(params: Any, grads: Any) -> Any:
    return optree.tree_map(lambda p, g: p if g is None else p - 0.2 * g, params, grads, none_is_leaf=True)


def train_in_a_loop() -> list[Any]:
    params = start()
    for _ in range(STEPS):
        leaves = optree.tree_map(lambda p: p.clone().requires_grad_(), params)
        for x, y in zip(IDS.chunk(MICROBATCHES), NEXT.chunk(MICROBATCHES), strict=True):
            embedded = embed(leaves[0], (x,))
            hidden = block(leaves[2], (block(leaves[1], (embedded,)),))
            (head(leaves[3], (hidden, embedded, y))[0] / MICROBATCHES).backward()
        params = update(params, optree.tree_map(lambda p: p.grad, leaves))
    return params


def main() -> None:
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    stages, transport, wanted = fpipe.connect_stages(STAGES), fpipe.processes(ranks=4), train_in_a_loop()
    for how in (gpipe, one_f_one_b, zb_h1):
        params, program = start(), lower(how(ranks=4, microbatches=MICROBATCHES), stages.graph)
        for step in range(STEPS):
            out, grads = fpipe.execute(program, stages, params, [()] * 4, (IDS,), NEXT, transport=transport)
            params = update(params, grads)
            if out.loss is not None:
                print(f"{how.__name__}, step {step}: loss {out.loss:.6f}, {sum(out.aux)} of {NEXT.numel()} words")
        pairs = [optree.tree_leaves([tree[s] for s in transport.ranks]) for tree in (params, wanted)]
        assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True)), how
    if 0 in transport.ranks:
        print("parameters equal those of the loop under all schedules, bit for bit")
    transport.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
