# SPDX-License-Identifier: Apache-2.0
"""Layers whose forward calls a collective, and a check that a pipeline of them equals one device."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import nn

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import interleaved_1f1b
from tests.common.cases import mse
from tests.common.loops import loop

HOW = interleaved_1f1b(ranks=1, chunks=2, microbatches=2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))


class Reduced(Layer):
    def forward(self, x):
        total = x.detach().sum(0)
        dist.all_reduce(total)
        return self.inner(x) * total


class ReducedInput(Layer):
    """What is reduced shares memory with the module's input, which the linear layer reads."""

    def forward(self, x):
        dist.all_reduce(x.detach())
        return self.inner(x)


class ReducedBuffer(Layer):
    def forward(self, x):
        x = self.inner(x)
        dist.all_reduce(self.mean.copy_(x.detach().mean(0)))
        return x - self.mean


class Gathered(Layer):
    def forward(self, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.detach())
        return self.inner(x) + torch.stack(parts).square().sum(0)


class Functional(Layer):
    def forward(self, x):
        total = functional_collectives.all_reduce(x, "sum", dist.group.WORLD)
        return self.inner(x) * total


class Later(Layer):
    def forward(self, x):
        total = x.detach().sum(0)
        work = dist.all_reduce(total, async_op=True)
        x = self.inner(x)
        work.wait()
        return x * total


LAYERS = (Reduced, ReducedInput, ReducedBuffer, Gathered, Functional, Later)


CUTS = {"cut inside": "1.inner", "whole": "2"}


def build(layer, cut, backward, group=None):
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(4, 4), layer(), nn.Linear(4, 4)), torch.randn(4, 4), torch.randn(4, 4)
    more = {"cuts": [CUTS[cut]], "backward": backward, "group": group}
    return fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=HOW, **more), model


def require_same(layer, cut, backward, group=None, seed=0):
    """Raise unless a step is that of one device; other processes have other batches."""
    pipe, model = build(layer, cut, backward, group)
    torch.manual_seed(seed)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    got, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), y)
    want = loop(model, mse, (x,), y, 2)
    assert same_bits(got.loss, want.loss)
    assert grads.keys() == want.grads.keys()
    assert all(same_bits(grads[name], want.grads[name]) for name in grads)
    assert all(same_bits(got.buffers[name], want.buffers[name]) for name in got.buffers)
