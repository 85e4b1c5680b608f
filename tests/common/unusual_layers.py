# SPDX-License-Identifier: Apache-2.0
"""Residual blocks that do something that a graph of operators would lose."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.common.cases import WIDTH


class Negated(torch.autograd.Function):
    """A function whose backward is not that of a graph of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Block(nn.Module):
    """Two linears with a function in between, and a residual connection."""

    def __init__(self, middle=None):
        super().__init__()
        self.a, self.b, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), middle

    def forward(self, x):
        h = self.a(x)
        h = torch.tanh(h) if self.middle is None else self.middle(self, h)
        return x + self.b(h)


class Stack(nn.Module):
    """Blocks that run one after the other; `around` calls each of them."""

    def __init__(self, middle=None, around=None, depth=4):
        super().__init__()
        self.blocks = nn.ModuleList([Block(middle) for _ in range(depth)])
        self.around = around

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.around is None else self.around(self, block, x)
        return x


def mixed(module, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return module.a(x).float().sin()


def stopped(module, x):
    with torch.no_grad():
        scale = module.a(x).abs().mean()
    return x * scale


def hooked(module, x):
    h = torch.sin(x)
    h.register_hook(lambda grad: grad * 0.5)
    return h * 1.5


def packed(module, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: (t * 2).float()):
        return torch.sin(x) * x


def vmapped(module, x):
    return torch.func.vmap(lambda row: row * row.sum())(x)


def replaced(module, x):
    y = x * 2
    y.data = y.data.cos()
    return y


def differentiated(module, x):
    y = x.detach().requires_grad_()
    return x + torch.autograd.grad((module.a(y) ** 2).sum(), y, create_graph=True)[0]


class Noted:
    """Stores a value in an attribute, for others to read."""

    def __call__(self, module, x):
        module.note = x.mean()
        return torch.sin(x)


def checkpointed(root, block, x):
    return checkpoint(block, x, use_reentrant=False)


def enclosed(root, block, x):
    return checkpoint(lambda: block(x) * x, use_reentrant=False)


def branching(module, x):
    return torch.tanh(x) if x.sum() > 0 else -x
