# SPDX-License-Identifier: Apache-2.0
"""A model and a loss that read attributes, globals and helper objects, whose changes a pipeline must notice."""

import torch
from torch import nn

import fpipe
from schedules import one_f_one_b
from tests.common.options import grouped
from tests.common.running import run

FACTOR = 1.0

TABLE = {"scale": 1.0, "unread": 0}

WAYS = ["autograd", "graph"]


class Settings:
    """A helper object."""

    def __init__(self):
        self.temperature, self.unread, self.nested = 1.0, 0, {"shift": 0.5}
        self.calls = 0


def shifted(x, settings):
    return x + settings.nested["shift"]


class Block(nn.Module):
    kind = 1.0

    def __init__(self, common):
        super().__init__()
        self.linear, self.drop, self.norm = nn.Linear(4, 4), nn.Dropout(0.0), nn.BatchNorm1d(4)
        self.common, self.gain, self.unread, self.mask = common, 1.0, 0, torch.ones(4)
        self.gains = [1.0, 2.0]

    def forward(self, x):
        self.common.calls += 1
        x = shifted(self.drop(self.linear(x)) * self.mask, self.common) * self.gain * self.gains[1]
        return self.norm(x).tanh() / self.common.temperature * self.kind


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        common = Settings()
        self.blocks, self.head = nn.ModuleList(Block(common) for _ in range(2)), nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * FACTOR  # a cut goes through this one
        return self.head(x)


class Loss:
    def __init__(self):
        self.weight, self.unread = 1.0, 0

    def __call__(self, outputs, targets):
        return (outputs - targets).square().mean() * self.weight * TABLE["scale"]


def batch(rows=6):
    return torch.randn(rows, 4), torch.randn(rows, 2)


def build(backward="autograd", model=None, loss=None, **options):
    torch.manual_seed(0)
    model, loss, (x, y) = model or Model(), loss or Loss(), batch()
    how = one_f_one_b(ranks=2, microbatches=3)
    pipe = fpipe.pipeline(
        model,
        example=(x,),
        targets=y,
        loss=loss,
        schedule=how,
        cuts=["blocks.1"],
        **grouped({"backward": backward, **options}),
    )
    return pipe, model, loss, x, y


def run_step(pipe, model, x, y):
    return run(pipe, model, (x,), y)
