# SPDX-License-Identifier: Apache-2.0
"""Four blocks of two linears, and hooks that gather what they compute."""

from __future__ import annotations

import contextvars

import torch
from torch import Tensor, nn

from tests.common.cases import WIDTH

collector: contextvars.ContextVar[list[Tensor] | None] = contextvars.ContextVar("collector", default=None)


class Block(nn.Module):
    """Two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Stack(nn.Module):
    """Four blocks."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def collecting(module: nn.Module, args: object, out: Tensor) -> None:
    into = collector.get()
    if into is not None:
        into.append(out)


def shifted(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] + 0.5,)


class Gathering(Stack):
    """Installs hooks at its first call that give to whoever gathers; those of inner linears are used at the end."""

    installed = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.installed:
            for block in self.blocks:
                block.a.register_forward_hook(collecting)
                block.b.register_forward_pre_hook(shifted)
            self.installed = True
        gathered: list[Tensor] = []
        token = collector.set(gathered)
        try:
            x = super().forward(x)
        finally:
            collector.reset(token)
        return x + sum(gathered) / len(gathered)


AT, INSIDE = ("blocks.1", "blocks.2", "blocks.3"), ("blocks.0.b", "blocks.1.b", "blocks.2.b")
