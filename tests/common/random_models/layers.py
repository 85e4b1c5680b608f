# SPDX-License-Identifier: Apache-2.0
"""The layers of a random model."""

from __future__ import annotations

from torch import nn

from tests.common.cases import WIDTH
from tests.common.random_models.description import Leaf
from tests.common.random_models.kinds import KINDS


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Layer(nn.Module):
    """Two linears with a function of its kind in between, and a residual connection."""

    def __init__(self, leaf: Leaf):
        super().__init__()
        self.kind = KINDS[leaf.kind]
        self.a, self.b = Adapted() if leaf.adapted else nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kind.add(self)
        self.sealed = self.kind.sealed
        if leaf.frozen:
            self.requires_grad_(False)

    def forward(self, x, batch):
        h = self.kind.middle(self, self.a(x), batch)
        return x + self.b(h).to(x.dtype)
