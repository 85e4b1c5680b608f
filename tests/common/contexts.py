# SPDX-License-Identifier: Apache-2.0
"""Attention over sequences of which each process has a part: keys and values are gathered inside of each layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

from tests.common.generators import seeded

gather = getattr(collectives, "all_gather_single_autograd", collectives.all_gather_tensor_autograd)  # its older name

WIDTH, HEADS, LENGTH, WORDS, ROWS = 8, 2, 8, 13, 2


class Layer(nn.Module):
    """Causal attention of a part of each sequence to all of it; without a mesh, the part is the whole."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.group = None if mesh is None else mesh.get_group()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, places = given
        rows = len(x)
        query, *both = self.mix(self.norm(x)).chunk(3, -1)
        key, value = (self.gather(one) for one in both)
        mask = torch.arange(LENGTH) <= places[:, None, :, None]
        heads = [one.reshape(rows, -1, HEADS, WIDTH // HEADS).transpose(1, 2) for one in (query, key, value)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape)), places

    def gather(self, part: Tensor) -> Tensor:
        """Return the parts of all processes, one after the other."""
        if self.group is None:
            return part
        return gather(part.contiguous(), 1, self.group)


class Reader(nn.Module):
    """An embedding, four layers of attention, and a head."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.Sequential(*[Layer(mesh) for _ in range(4)])

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        x, _ = self.layers((self.embed(ids), places))
        return self.head(x)


def loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """Return the cross entropy per word."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def words(microbatches: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a batch: whole sequences, the places of their words, and the words that follow."""
    ids = torch.randint(WORDS, (ROWS * microbatches, LENGTH + 1), generator=seeded(1))
    return ids[:, :-1], torch.arange(LENGTH).expand(len(ids), LENGTH), ids[:, 1:]
