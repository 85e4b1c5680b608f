# SPDX-License-Identifier: Apache-2.0
"""A small decoder whose layers share a table, computed from a buffer, and a mask, computed from the batch."""

from __future__ import annotations

import torch
from torch import nn

from tests.common.cases import Case, mse

WIDTH = 4


class Attention(nn.Module):
    """Weighs positions by a table that depends on distance alone, where a mask allows it."""

    def __init__(self):
        super().__init__()
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, table, mask):
        return x + (table * mask) @ self.value(x)


class Decoder(nn.Module):
    """A table of weights from a buffer, a mask from the batch, and three layers that take both."""

    def __init__(self):
        super().__init__()
        self.register_buffer("decay", torch.rand(()), persistent=False)
        self.enter = nn.Linear(1, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(3))

    def forward(self, x, mask):
        places = torch.arange(x.shape[1])
        distance = (places[:, None] - places[None, :]).abs()
        table = torch.exp(-self.decay * distance)
        allowed = (distance >= 0) & mask[:, None, :].bool()
        y = self.enter(x[..., None])
        for layer in self.layers:
            y = layer(y, table, allowed)
        return y.sum(-1)


def decoder_batch(length=5):
    def batch(rows):
        mask = torch.ones(rows, length)
        mask[::2, -1] = 0
        return (torch.randn(rows, length), mask), torch.randn(rows, length)

    return batch


CUTS = ("layers.0", "layers.1", "layers.2")
DECODER = Case(Decoder, decoder_batch(), mse, CUTS)
