# SPDX-License-Identifier: Apache-2.0
"""The kinds of layers in random models, each of which computes something else between its two linears."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.common.cases import WIDTH, WORDS
from tests.common.layers import Tripled


class Kind(NamedTuple):
    """A kind of layer.

    - `middle(layer, h, batch)` computes the value between the two linears; `add(layer)` adds what else the layer has.
    - `random`: it draws random numbers. `sealed`: no cut may be inside it.
    - `graph`: a graph of operators preserves its behavior.
    """

    middle: Callable[..., Tensor]
    add: Callable[[nn.Module], None] = lambda layer: None
    random: bool = False
    sealed: bool = False
    graph: bool = True


def sliced(layer, h, batch):
    h[:, 0] = 0
    return h


def viewed(layer, h, batch):
    h.view(-1)[::2].mul_(0.5)
    return h


def averaged(layer, h, batch):
    layer.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    layer.count += 1
    return h * (1 - layer.mean / layer.count)  # so the backward reads what the forward has made of the buffers


def stopped(layer, h, batch):
    with torch.no_grad():
        scale = layer.c(h).abs().mean(-1, keepdim=True)
    return h * scale


def cast(layer, h, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = layer.c(h)
    return h.float()


def kept_low(layer, h, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layer.c(h).sin()


def hooked(layer, h, batch):
    if h.requires_grad:
        h.register_hook(lambda grad: grad * 0.5)
    return h * 1.5


def packed(layer, h, batch):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: (t * 2).float()):
        return torch.sin(h) * h


def noted(layer, h, batch):
    layer.note = h.mean()
    return torch.sin(h)


def fourier(layer, h, batch):
    return torch.fft.ifft(torch.fft.fft(h.float()) * layer.filter.conj()).real


def spared(layer, h, batch):
    layer.c(h)
    return h.cos()


def numbered(layer, h, batch):
    assert batch["nothing"] is None
    return h * batch["scale"] * (h.shape[-1] / 3) if batch["flag"] else h


def linear(layer):
    layer.c = nn.Linear(WIDTH, WIDTH)


def words(layer):
    layer.words = nn.Embedding(WORDS, WIDTH)


def dropping_part(layer):
    layer.c = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh())
    layer.c.sealed = True


def scaling(layer):
    layer.a.register_forward_hook(lambda module, args, out: out * 1.25)
    layer.a.sealed = True


def average(layer):
    layer.register_buffer("mean", torch.zeros(WIDTH))
    layer.register_buffer("count", torch.zeros((), dtype=torch.int64))


def spare(layer):
    linear(layer)
    layer.spare = nn.Parameter(torch.randn(3))
    layer.register_buffer("idle", torch.randn(2))


def of_type(dtype):
    def change(layer):
        layer.b.to(dtype)

    return change


KINDS: dict[str, Kind] = {
    "plain": Kind(lambda layer, h, batch: torch.tanh(h)),
    "relu_": Kind(lambda layer, h, batch: h.relu_()),
    "mul_": Kind(lambda layer, h, batch: h.mul_(2).add_(1)),
    "sliced": Kind(sliced),
    "viewed": Kind(viewed),
    "pieces": Kind(lambda layer, h, batch: torch.cat(h.chunk(2, -1)[::-1], -1)),
    "turned": Kind(lambda layer, h, batch: h.t().contiguous().t()),
    "expanded": Kind(lambda layer, h, batch: h.sum(-1, keepdim=True).expand(-1, WIDTH)),
    "dropout": Kind(lambda layer, h, batch: functional.dropout(h, 0.3, layer.training), random=True),
    "dropping": Kind(
        lambda layer, h, batch: layer.c(h), lambda layer: setattr(layer, "c", nn.Dropout(0.4)), random=True
    ),
    "noise": Kind(lambda layer, h, batch: h + torch.rand_like(h) * torch.randn(h.shape[-1]), random=True),
    "norm": Kind(lambda layer, h, batch: layer.c(h), lambda layer: setattr(layer, "c", nn.BatchNorm1d(WIDTH))),
    "average": Kind(averaged, average),
    "masked": Kind(lambda layer, h, batch: h.masked_fill(batch["mask"][:, None], 0.5)),
    "words": Kind(lambda layer, h, batch: h + layer.words(batch["ids"]), words),
    "picked": Kind(lambda layer, h, batch: h * layer.words(h.argmax(-1)), words),
    "double": Kind(lambda layer, h, batch: h.double(), of_type(torch.float64)),
    "low": Kind(lambda layer, h, batch: h.bfloat16(), of_type(torch.bfloat16)),
    "kept low": Kind(kept_low, lambda layer: (linear(layer), of_type(torch.bfloat16)(layer)), graph=False),
    "fourier": Kind(
        fourier, lambda layer: setattr(layer, "filter", nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64)))
    ),
    "stopped": Kind(stopped, linear, graph=False),
    "detached": Kind(lambda layer, h, batch: h.detach() * h),
    "cast": Kind(cast, linear, graph=False),
    "custom": Kind(lambda layer, h, batch: Tripled.apply(h), graph=False),
    "checkpointed": Kind(lambda layer, h, batch: checkpoint(torch.sin, h, use_reentrant=False), graph=False),
    "part checkpointed": Kind(lambda layer, h, batch: checkpoint(layer.c, h, use_reentrant=False), linear, graph=False),
    "dropout checkpointed": Kind(
        lambda layer, h, batch: checkpoint(layer.c, h, use_reentrant=False), dropping_part, random=True, graph=False
    ),
    "hooked": Kind(hooked, graph=False),
    "module hooks": Kind(
        lambda layer, h, batch: h.sin(),
        scaling,
        graph=False,
    ),
    "packed": Kind(packed, sealed=True, graph=False),
    "vmapped": Kind(lambda layer, h, batch: torch.func.vmap(lambda row: row * row.sum())(h), graph=False),
    "vmapped weights": Kind(lambda layer, h, batch: torch.vmap(layer.c)(h), linear, sealed=True, graph=False),
    "constant": Kind(
        lambda layer, h, batch: h * layer.weights, lambda layer: setattr(layer, "weights", torch.linspace(0, 1, WIDTH))
    ),
    "gain": Kind(
        lambda layer, h, batch: h * layer.gain, lambda layer: setattr(layer, "gain", nn.Parameter(torch.tensor(1.5)))
    ),
    "outside": Kind(lambda layer, h, batch: functional.linear(h, layer.b.weight)),
    "spare": Kind(spared, spare),
    "noted": Kind(noted, graph=False),
    "numbers": Kind(numbered),
}
