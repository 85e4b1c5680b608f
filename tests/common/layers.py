# SPDX-License-Identifier: Apache-2.0
"""Layers that the models of the zoo are made of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from tests.common.cases import WIDTH


class Tripled(torch.autograd.Function):
    """A backward that no derivative formula gives."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 + x


def linears(*between: Callable[[], nn.Module]) -> nn.Sequential:
    """Four linear layers with something between them."""
    layers = [nn.Linear(WIDTH, WIDTH)]
    for make in between:
        layers += [make(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers)


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class Block(nn.Module):
    """Attention and a feed-forward part, both residual."""

    def __init__(self, width=WIDTH, dropout=0.0):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = dropout

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        p = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p).squeeze(1)
        x = x + functional.dropout(self.out(attended), self.dropout, self.training)
        return x + self.feed(x)


class Average(nn.Module):
    """Buffers that are read and changed in place, one of them an integer, one not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((WIDTH,), 2.0), persistent=False)

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.count += 1
        return x * self.scale - self.mean


class Assigned(Average):
    """The same buffers, assigned anew; the product keeps the old one for its backward."""

    def forward(self, x):
        out = x * (self.mean + self.scale)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.count = self.count + 1
        return out


class Split(nn.Module):
    """Returns a dict with tensors, a tuple, `None`, a flag and a number in it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        a, b = self.linear(x).chunk(2, -1)
        return {"x": a, "more": (b, x > 0), "nothing": None, "flag": True, "number": 3}


class Middle(nn.Module):
    """Takes and returns such a dict; leaves most of it as it is."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, tree):
        assert tree["flag"] is True
        return {**tree, "x": self.linear(tree["x"] * tree["number"]).tanh()}


class Merge(nn.Module):
    """Takes such a dict, and returns a tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, tree):
        b, positive = tree["more"]
        assert tree["nothing"] is None
        return self.linear(tree["x"] + torch.where(positive, b, -b))


class Noise(nn.Module):
    """Random numbers outside nn.Dropout: several in one module, uniform, normal and integer."""

    def forward(self, x):
        x = x + torch.rand_like(x) * torch.randn(x.shape)
        return torch.where(torch.rand_like(x) < 0.8, x, torch.bernoulli(torch.full_like(x, 0.5)))


class Scaled(nn.Module):
    """A scale and a bias, whose gradients are sums in the order of memory."""

    def __init__(self, width):
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x):
        return (x * self.scale + self.bias).tanh()


class Low(nn.Module):
    """A linear layer under autocast."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.linear(x)


class Scale(nn.Module):
    """A linear layer without gradients."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.no_grad():
            return self.linear(x).abs().mean(-1, keepdim=True)
