# SPDX-License-Identifier: Apache-2.0
"""Models for tensor parallelism, how torch parallelizes them, and the plain loop over the parallelized module."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from optree import tree_map
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.common.generators import seeded
from tests.common.sizes import NIGHTLY

WIDTH, HEADS, WORDS, LENGTH, MICROBATCHES = 16, 4, 32, 8, 4
BLOCKS = 3 if NIGHTLY else 2


class Attention(nn.Module):
    """Causal attention; as many heads as its projections make."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (one(x).view(rows, length, -1, WIDTH // HEADS).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, -1))


class Feed(nn.Module):
    """Two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and linears, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.feed = nn.LayerNorm(WIDTH), Feed()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    """A small transformer."""

    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(BLOCKS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def column_and_row(model: GPT, mesh: DeviceMesh) -> GPT:
    """Return the model, its linears split over `mesh`; norms, embedding and head stay plain."""
    names = ("attention.q", "attention.k", "attention.v", "feed.up")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in names}
    plan |= {name: RowwiseParallel() for name in ("attention.out", "feed.down")}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def by_sequence(model: GPT, mesh: DeviceMesh) -> GPT:
    """Return the model with sequence parallelism: between its linears, each process has a part of every sequence."""
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan: dict[str, Any] = {
        name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "feed.up")
    }
    plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.out", "feed.down")}
    plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": whole, "feed": copy.copy(whole)}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, ends)


def split_llama(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return a Llama, the linears of its layers split over `mesh`."""
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan = {name: ColwiseParallel() for name in names}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def words() -> tuple[Tensor, Tensor]:
    """Return a batch: words, and those that follow."""
    ids = torch.randint(WORDS, (2 * MICROBATCHES, LENGTH + 1), generator=seeded(1))
    return ids[:, :-1], ids[:, 1:]


def entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    """Return the cross entropy per word."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


class Plain(NamedTuple):
    """What a plain loop computes: the loss and, by name, the gradients."""

    loss: Tensor
    grads: dict[str, Tensor]


def plain_loop(model: nn.Module, inputs: Any, targets: Tensor | None, loss: Any) -> Plain:
    """Return what a loop over microbatches computes on the parallelized module itself, without fpipe."""
    total = torch.zeros(())
    for i in range(MICROBATCHES):
        given = tree_map(lambda one, i=i: one.chunk(MICROBATCHES)[i], inputs)
        out = model(**given) if isinstance(given, dict) else model(*given)
        value = (loss(out) if targets is None else loss(out, targets.chunk(MICROBATCHES)[i])) / MICROBATCHES
        value.backward()
        total = total + value.detach()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Plain(total, grads)


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a DTensor; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def require_same_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Require the same bits on this process, and the same placements.

    Autograd does not let a step return a gradient whose local tensor has another shape than the parameter's. It is
    placed like the parameter then.
    """
    for name, grad in got.items():
        other = want[name]
        assert type(grad) is type(other), f"{name}: {type(grad)}, expected {type(other)}"
        if isinstance(grad, DTensor) and grad.placements != other.placements:
            assert local(grad).shape != local(other).shape, f"{name}: {grad.placements}, expected {other.placements}"
            other = other.redistribute(placements=grad.placements)
        assert torch.equal(local(grad), local(other)), f"{name}: other bits"
