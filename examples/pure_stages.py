# SPDX-License-Identifier: Apache-2.0
"""Three pure functions with nested parameter pytrees, trained under three schedules, with the bits of a plain loop.

    python examples/pure_stages.py                                         # three ranks in this process
    torchrun --standalone --nproc-per-node 3 examples/pure_stages.py       # one process per rank, over Gloo

There is no module: a stage is a function of its parameters and inputs. The embedding is read twice, by the block and by
the head; its cotangents are added in the order of one device.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import fpipe
from schedules import gpipe, lower, one_f_one_b, zb_h1

WORDS, WIDTH, ROWS, STEPS = 32, 16, 8, 3


class Affine(NamedTuple):
    """The parameters of an affine map."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return the images of rows."""
        return x @ self.weight + self.bias


def embed(params: dict[str, Tensor], inputs: tuple[Tensor]) -> Tensor:
    (ids,) = inputs
    return params["words"][ids] + params["places"][: ids.shape[1]]


def block(params: list[Affine], inputs: tuple[Tensor]) -> Tensor:
    (x,) = inputs
    for layer in params:
        x = x + torch.tanh(layer(functional.dropout(x, 0.1)))
    return x


def head(params: Affine, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    h, embedded, targets = inputs
    logits = params(h + embedded)
    right = (logits.argmax(-1) == targets).sum()
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), {"right": right}


def make_params() -> list[Any]:
    """Return the parameters of each stage: any pytree."""
    draw = lambda *shape: torch.randn(*shape) / shape[0] ** 0.5  # noqa: E731
    affine = lambda width: Affine(draw(WIDTH, width), torch.zeros(width))  # noqa: E731
    return [{"words": draw(WORDS, WIDTH), "places": draw(8, WIDTH)}, [affine(WIDTH) for _ in range(4)], affine(WORDS)]


def main() -> None:
    """Train under each schedule; raise unless all end with the same bits."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    stages = fpipe.connect_stages(
        {"embed": (embed, ["inputs"]), "block": (block, ["embed"]), "head": (head, ["block", "embed", "targets"])}
    )
    transport, found = fpipe.processes(ranks=3), list[Any]()
    for how in (gpipe, one_f_one_b, zb_h1):
        torch.manual_seed(0)
        params, program = make_params(), lower(how(ranks=3, microbatches=4), stages.graph)
        for seed in range(STEPS):
            ids = torch.randint(WORDS, (ROWS, 8))
            out, grads = fpipe.execute(
                program, stages, params, [()] * 3, (ids,), ids.roll(-1, 1), seed=seed, transport=transport
            )
            params = optree.tree_map(lambda p, g: p if g is None else p - 0.5 * g, params, grads, none_is_leaf=True)
            if out.loss is not None:
                right = sum(one["right"] for one in out.aux)
                print(f"{how.__name__}, step {seed}: loss {out.loss:.6f}, {right} of {ids.numel()} words")
        found.append([params[s] for rank in transport.ranks for s in program.schedule.placement.stages_on(rank)])
    leaves = [optree.tree_leaves(one) for one in found]
    assert all(torch.equal(a, b) for other in leaves[1:] for a, b in zip(leaves[0], other, strict=True))
    if 0 in transport.ranks:
        print("parameters are the same under all schedules, bit for bit")
    transport.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
