# SPDX-License-Identifier: Apache-2.0
"""A small model with BatchNorm and dropout, its batches, and a drop-in module of it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import fpipe
from schedules import one_f_one_b
from tests.common.generators import seeded
from tests.common.options import grouped

M, ROWS = 4, 8


def net(dropout=0.0):
    torch.manual_seed(3)
    return nn.Sequential(
        *(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout)),
        *(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)),
    )


def batches(count):
    generator = seeded(0)
    for _ in range(count):
        yield torch.randn(ROWS, 6, generator=generator), torch.randint(0, 3, (ROWS,), generator=generator)


def make(model=None, schedule=None, **options):
    x, y = next(batches(1))
    return fpipe.Pipelined(
        net() if model is None else model,
        loss=functional.cross_entropy,
        example=(x,),
        targets=y,
        schedule=schedule or one_f_one_b(2, M),
        **grouped(options),
    )
