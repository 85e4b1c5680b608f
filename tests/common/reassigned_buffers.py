# SPDX-License-Identifier: Apache-2.0
"""Blocks that reassign their buffers in the forward: statistics, counters, caches that grow."""

import pytest
import torch
from torch import nn

import fpipe
from schedules import one_f_one_b, recompute, zb_v
from tests.common.cases import mse
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.running import run, run_reference

WIDTH = 4

HOWS = {
    "1F1B": one_f_one_b(ranks=2, microbatches=3),
    "recomputed": recompute(one_f_one_b(ranks=2, microbatches=3)),
    "ZB-V": zb_v(ranks=1, microbatches=3),
}

BACKWARDS = pytest.mark.parametrize("backward", ["autograd", "graph"])


def table(n):
    return torch.arange(n * n, dtype=torch.float32).reshape(n, n).tril() / n


class Block(nn.Module):
    """A linear layer, with functions of the block that run before and after it."""

    def __init__(self, before=None, after=None):
        super().__init__()
        self.inner, self.before, self.after = nn.Linear(WIDTH, WIDTH), before, after
        self.register_buffer("mean", torch.full((WIDTH,), 0.5))
        self.register_buffer("last", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", table(2), persistent=False)
        self.register_buffer("angles", torch.linspace(0.1, 1, WIDTH))
        self.register_buffer("lazy", None, persistent=False)
        self.register_buffer("waves", torch.zeros(1, WIDTH), persistent=False)
        self.register_buffer("late", None, persistent=False)

    def forward(self, x):
        x = x if self.before is None else self.before(self, x)
        h = self.inner(x).tanh()
        return h if self.after is None else self.after(self, h)


def average(block, h):
    """Multiply by the old value, which the backward needs."""
    out = h * block.mean
    block.mean = 0.9 * block.mean + 0.1 * h.detach().mean(0)
    return out


def average_without_gradients(block, h):
    with torch.no_grad():
        block.mean = block.mean.lerp(h.mean(0), 0.1)
    return h + block.mean


def average_again(block, h):
    return average_without_gradients(block, average(block, h))


def count(block, h):
    block.steps = block.steps + 1
    return h / block.steps


def remember(block, h):
    """Swap two buffers, and never read the new values."""
    block.last, block.mean = block.mean, h.detach()[0]
    return h * block.last


def mixed(block, h):
    """Change the buffer in place and reassign it."""
    block.mean.mul_(0.9)
    block.mean = block.mean + 0.1 * h.detach().mean(0)
    block.mean += 1
    return h


def put_back(block, h):
    old = block.mean
    block.mean = torch.ones(WIDTH)
    h = h * block.mean
    block.mean = old
    return h


def register(block, h):
    block.register_buffer("mean", block.mean * 0.5 + h.detach().mean(0))
    return h * block.mean


def reset(block, h):
    out = h * block.mean
    block.mean = torch.ones(WIDTH)
    return out


CHANGES = (average, average_without_gradients, average_again, count, remember, mixed, put_back, register, reset)


def cached(block, x):
    """Add the table, which is replaced if it is too short."""
    if block.table.shape[0] < len(x):
        block.table = table(len(x))
    return x + block.table[: len(x), :1]


def cached_by_registering(block, x):
    if block.table.shape[0] < len(x):
        block.register_buffer("table", table(len(x)), persistent=False)
    return x + block.table[: len(x), :1]


def cached_lazily(block, x):
    if block.lazy is None or len(block.lazy) < len(x):
        block.lazy = table(len(x))
    return x + block.lazy[: len(x), :1]


def cached_of_a_buffer(block, x):
    """Cache values that are computed from another buffer, as rotary embeddings do."""
    if len(block.waves) < len(x):
        block.waves = torch.outer(torch.arange(len(x)), block.angles).cos()
    return x * block.waves[: len(x)]


def cached_lazily_of_a_buffer(block, x):
    if block.late is None or len(block.late) < len(x):
        block.register_buffer("late", torch.outer(torch.arange(len(x)), block.angles).cos(), persistent=False)
    return x * block.late[: len(x)]


NAMES = ("table", "lazy", "waves", "late")

CACHES = (cached, cached_by_registering, cached_lazily, cached_of_a_buffer, cached_lazily_of_a_buffer)


def state(model):
    return dict(model.named_parameters()), dict(model.named_buffers())


def build(model, how, cuts, backward="autograd", **settings):
    torch.manual_seed(0)
    x, y = torch.randn(9, WIDTH), torch.randn(9, WIDTH)
    pipe = fpipe.pipeline(
        model, example=(x,), targets=y, loss=mse, schedule=how, cuts=cuts, backward=backward, **settings
    )
    return pipe, x, y


def without_caches(result):
    """Return a result without caches, which a step returns as they were passed."""
    return result._replace(buffers={n: b for n, b in result.buffers.items() if not n.endswith(NAMES)})


def assert_as_one_device(pipe, model, x, y, microbatches=3):
    want = loop(model, mse, (x,), y, microbatches)
    assert_same(without_caches(run(pipe, model, (x,), y)), without_caches(want))
    assert_same(without_caches(run_reference(pipe, model, (x,), y)), without_caches(want))
