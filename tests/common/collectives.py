# SPDX-License-Identifier: Apache-2.0
"""Layers whose forward calls a collective, and a check that a pipeline of them equals one device."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import interleaved_1f1b
from tests.common.cases import mse
from tests.common.loops import loop
from tests.common.options import grouped

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
    return fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=HOW, **grouped(more)), model


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


# ------------------------------------------------------------ exchanges of a layer or a loss with a group of processes


def _reduced(x, mesh):
    x = x.clone()
    dist.all_reduce(x, group=mesh.get_group())
    return x


def _later(x, mesh):
    x = x.clone()
    dist.all_reduce(x, group=mesh.get_group(), async_op=True).wait()
    return x


def _counted(x, mesh):
    count = torch.tensor(float(x.numel()))
    dist.all_reduce(count, group=mesh.get_group())
    return x / count


def _functional(x, mesh):
    return functional_collectives.all_reduce(x, "sum", mesh) * 1


def _broadcast(x, mesh):
    x = x.clone()
    dist.broadcast(x, mesh.mesh.tolist()[0], group=mesh.get_group())
    return x


def _placed(x, mesh):
    whole = DTensor.from_local(x, mesh, [Shard(0)]).redistribute(placements=[Replicate()])
    return whole.to_local()[: len(x)] * 1


EXCHANGES = {"allreduce": _reduced, "later": _later, "count": _counted, "all_reduce": _functional}
EXCHANGES |= {"broadcast": _broadcast, "all_gather_into_tensor": _placed}


def _barrier(x, mesh):
    dist.barrier(group=mesh.get_group())
    return x * 1


def _objects(x, mesh):
    dist.all_gather_object([None] * mesh.size(), 1, group=mesh.get_group())
    return x * 1


def _message(x, mesh):
    mine, (first, second, *_) = mesh.get_rank(), mesh.mesh.tolist()
    if mine == first:
        dist.send(x.clone(), second)
    elif mine == second:
        dist.recv(torch.empty_like(x), first)
    return x * 1


REFUSED = EXCHANGES | {"barrier": _barrier, "objects": _objects, "message": _message}


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, exchange):
        ctx.exchange = exchange
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return ctx.exchange(grad), None


class Exchanging(nn.Linear):
    """A layer that exchanges something over a mesh in its forward, its backward, or a hook."""

    def __init__(self, where, exchange, find_mesh):
        super().__init__(4, 4)
        self.where, self.exchange = where, lambda x: exchange(x, find_mesh())
        if where == "forward hook":
            self.register_forward_hook(lambda module, given, out: self.exchange(out.detach()) + out)
        if where == "backward hook":
            self.register_full_backward_hook(lambda module, grads, _: tuple(map(self.exchange, grads)))
        if where == "hook of a parameter":
            self.weight.register_hook(lambda grad: exchange(grad, find_mesh()))

    def forward(self, x):
        if self.where == "forward":
            x = self.exchange(x.detach()) + x
        if self.where == "backward":
            x = InBackward.apply(x, self.exchange)
        x = super().forward(x)
        if self.where == "hook":
            x.register_hook(self.exchange)
        return x


PLACES = ("loss", "forward", "backward", "hook", "forward hook", "backward hook", "hook of a parameter")


def exchanging(places, find_mesh):
    """Return a model that exchanges something in each of these places, and its loss, one exchange by place."""
    torch.manual_seed(0)
    layers = [Exchanging(where, exchange, find_mesh) for where, exchange in places.items()]
    model = nn.Sequential(nn.Linear(4, 4), *layers, nn.Linear(4, 4))
    exchange = places.get("loss", lambda x, mesh: x)
    return model, lambda out, y: (exchange(out.detach(), find_mesh()) + out - y).square().mean()
