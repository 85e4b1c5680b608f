# SPDX-License-Identifier: Apache-2.0
"""The zoo: small models that have broken pipelines, each with a batch, a loss and places to cut.

And what they are held against: a plain loop over microbatches, on one device, that uses nothing of fpipe's.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn
from torch.nn import functional

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import Schedule, gpipe, linear, looped, one_f_one_b, schedule, split_backward, vee

# ---------------------------------------------------------------------------------------------------- what is compared


class Result(NamedTuple):
    """What a step computes."""

    loss: Tensor | None
    outputs: Any
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]


def loop(model, loss, inputs, targets, microbatches, order=None, dims=(0, 0), weight=None, joined=0) -> Result:
    """One device: slices of the batch, loss / M, `.backward()`, `.grad`. Backwards run in `order`, or as they come.

    `dims` are a pair of prefixes: how inputs and targets are cut. With a weight, the loss is multiplied by its share.
    """
    model, inputs, targets = copy.deepcopy((model, inputs, targets))
    values, outputs = [], []
    parts = [
        [piece(tree, i, microbatches, how) for tree, how in zip((inputs, targets), dims, strict=True)]
        for i in range(microbatches)
    ]
    counts = None if weight is None else [float(weight(*part)) for part in parts]
    for i, (part, wanted) in enumerate(parts):
        out = model(**part) if isinstance(part, dict) else model(*part)
        value = loss(out) if targets is None else loss(out, wanted)
        values.append(value / microbatches if counts is None else value * (counts[i] / sum(counts)))
        out = dict(out) if isinstance(out, dict) else out  # transformers' outputs are dicts of their own kind
        outputs.append(optree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, out))
        if order is None and values[-1].requires_grad:
            values[-1].backward()
    for i in order or ():
        if values[i].requires_grad:
            values[i].backward()
    total = values[0].detach()
    for value in values[1:]:
        total = total + value.detach()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Result(total, join(outputs, joined), grads, dict(model.named_buffers()))


def loop_as_stated(pipe, model, loss, inputs, targets) -> Result:
    """One device, for a model without state: gradients are added as the schedule of `pipe` states it.

    Each replica of a parameter's first stage adds those of its microbatches in its order, and then the sums are added.
    """
    how = pipe.schedule
    alone = [gradients_of(i, model, loss, inputs, targets, how.microbatches) for i in range(how.microbatches)]
    grads = {}
    for stage in pipe.stages:
        ranks = how.placement.replicas(stage.index)
        for name in stage.grads:
            terms = [one[name] for one in alone]
            grads[name] = functools.reduce(operator.add, [added(how, rank, stage.index, terms) for rank in ranks])
    return loop(model, loss, inputs, targets, how.microbatches)._replace(grads=grads)


def loop_untied(pipe, model, loss, inputs, targets, uses: dict[int, tuple[str, ...]]) -> Result:
    """One device, for a model without state: a copy of one tied parameter per stage, whose gradients are added.

    `uses` are the names under which each stage uses the parameter; the first of all is its own.
    """
    how, model = pipe.schedule, copy.deepcopy(model)
    own, *_ = [name for names in uses.values() for name in names]
    for names in uses.values():
        new = nn.Parameter(model.get_parameter(names[0]).detach().clone())
        for path, _, attribute in (name.rpartition(".") for name in names):
            setattr(model.get_submodule(path), attribute, new)
    alone = [gradients_of(i, model, loss, inputs, targets, how.microbatches) for i in range(how.microbatches)]
    totals: dict[str, list[Tensor]] = {}
    for stage in pipe.stages:
        for name in stage.grads:
            terms = [one[uses[stage.index][0] if name == own else name] for one in alone]
            ranks = how.placement.replicas(stage.index)
            total = functools.reduce(operator.add, [added(how, rank, stage.index, terms) for rank in ranks])
            totals.setdefault(name, []).append(total)
    grads = {name: functools.reduce(operator.add, by_stage) for name, by_stage in totals.items()}
    return loop(model, loss, inputs, targets, how.microbatches)._replace(grads=grads)


def added(how: Schedule, rank: int, s: int, terms: list[Tensor]) -> Tensor:
    """The terms of a rank's microbatches, in the order of its weight gradients on stage `s`."""
    order = [action.microbatch for action in how.actions(rank) if action.stage == s and action.kind in ("B", "W")]
    return functools.reduce(operator.add, [terms[i] for i in order])


def gradients_of(i: int, model, loss, inputs, targets, microbatches: int) -> dict[str, Tensor]:
    """Those of one microbatch, by `.backward()`."""
    model, inputs, targets = copy.deepcopy((model, inputs, targets))
    part, wanted = piece(inputs, i, microbatches), piece(targets, i, microbatches)
    out = model(**part) if isinstance(part, dict) else model(*part)
    value = (loss(out) if targets is None else loss(out, wanted)) / microbatches
    if value.requires_grad:
        value.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def eval_loop(model, loss, inputs, targets, microbatches, **changes) -> Result:
    """One device, eval mode, no gradients; `loss` may be `None`."""
    with torch.no_grad():
        computed = loss or (lambda *_: torch.zeros(()))
        found = loop(copy.deepcopy(model).eval(), computed, inputs, targets, microbatches, **changes)
    return found._replace(loss=None if loss is None else found.loss, grads={})


def piece(tree: Any, i: int, microbatches: int, dims: Any = 0) -> Any:
    if isinstance(dims, tuple | list):
        return type(tree)(piece(part, i, microbatches, dim) for part, dim in zip(tree, dims, strict=True))
    if isinstance(dims, dict):
        return {name: piece(tree[name], i, microbatches, dim) for name, dim in dims.items()}

    def cut(leaf):
        if not isinstance(leaf, Tensor):
            return leaf
        if callable(dims):
            return dims(leaf, microbatches)[i]
        return leaf.clone() if dims is None else leaf.chunk(microbatches, dims)[i]

    return optree.tree_map(cut, tree)


def join(trees: list[Any], dim: int = 0) -> Any:
    def joined(*leaves):
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        return torch.cat(leaves, dim) if leaves[0].dim() else torch.stack(leaves)

    return optree.tree_map(joined, *trees)


def differences(got: Result, want: Result) -> Iterator[str]:
    """Every leaf in which two results differ, in any bit."""
    outputs = [optree.tree_flatten(one.outputs) for one in (got, want)]
    if outputs[0][1] != outputs[1][1]:
        yield f"outputs: {outputs[0][1]} is not {outputs[1][1]}"
        return
    leaves = [{f"outputs {k}": leaf for k, leaf in enumerate(found)} for found, _ in outputs]
    for mine, theirs in (
        ({"loss": got.loss}, {"loss": want.loss}),
        leaves,
        (got.grads, want.grads),
        (got.buffers, want.buffers),
    ):
        if mine.keys() != theirs.keys():
            yield f"names: {sorted(mine)} are not {sorted(theirs)}"
        for name in mine.keys() & theirs.keys():
            a, b = mine[name], theirs[name]
            same = same_bits(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
            if not same:
                yield f"{name}: {a} is not {b}"


def assert_same(got: Result, want: Result) -> None:
    found = list(differences(got, want))
    assert not found, "\n".join(found)


# ----------------------------------------------------------------------------------------------------------- schedules


def split_1f1b(ranks: int, microbatches: int) -> Schedule:
    return split_backward(one_f_one_b(ranks=ranks, microbatches=microbatches))


def _fill_drain(placement):
    def actions(rank, ranks, microbatches, chunks=2):
        from schedules import B, F

        stages = placement(ranks, chunks).stages_on(rank)
        yield from (F(s, i) for s in stages for i in range(microbatches))
        yield from (B(s, i) for s in reversed(stages) for i in range(microbatches))

    actions.__name__ = f"{placement.__name__}_fill_drain"
    return schedule(placement=placement)(actions)


linear_fill_drain, looped_fill_drain, vee_fill_drain = map(_fill_drain, (linear, looped, vee))


@schedule(placement=linear)
def descending(rank, ranks, microbatches):
    """Gradients are added in the order of the backwards, which is the reverse of the forwards here."""
    from schedules import B, F

    yield from (F(rank, i) for i in range(microbatches))
    yield from (B(rank, i) for i in reversed(range(microbatches)))


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "split_backward": split_1f1b,
}


# -------------------------------------------------------------------------------------------------------------- models


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


@dataclass(frozen=True)
class Case:
    """A model in a zoo; `batch(rows)` makes (inputs, targets), and `cuts` makes four stages of it.

    `fronts` are the front ends that can capture it; `random` says that it draws random numbers, so that only the
    reference can be its equal.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, Any]]
    loss: Callable[..., Tensor]
    cuts: tuple[str, str, str]
    fronts: tuple[str, ...] = ("trace", "export", "fx", "dynamo")
    random: bool = False

    def at(self, stages: int) -> tuple[str, ...]:
        """Cuts that make one, two or four stages."""
        return {1: (), 2: self.cuts[1:2], 4: self.cuts}[stages]

    def make(self, rows: int) -> tuple[nn.Module, Any, Any]:
        """The model and a batch, always the same."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = self.build()
            return model, *self.batch(rows)


PARTS = ("modules", "trace", "export", "fx", "dynamo")
WIDTH, WORDS, LENGTH = 4, 11, 3


def rows_of(width: int = WIDTH) -> Callable[[int], tuple[Any, Any]]:
    return lambda rows: ((torch.randn(rows, width),), torch.randn(rows, width))


def words(rows: int) -> tuple[Any, Any]:
    return (torch.randint(WORDS, (rows, LENGTH)),), torch.randint(WORDS, (rows, LENGTH))


def mse(outputs, targets):
    return functional.mse_loss(outputs, targets)


def cross_entropy(outputs, targets):
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


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


class GPT(nn.Module):
    """A transformer whose head is its embedding."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tied_sequence() -> nn.Sequential:
    """Embedding, two blocks, and a head with the embedding's weight, as a sequence of modules."""
    layers = nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(), Block(), nn.Linear(WIDTH, WORDS, bias=False))
    layers[3].weight = layers[0].weight
    return layers


class Chained(nn.Module):
    """One weight in three stages: its gradient travels over all of them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.c.weight = self.d.weight = self.a.weight

    def forward(self, x):
        x = self.a(x).tanh()
        return self.d(self.c(self.b(x)).tanh())


def one_weight() -> nn.Sequential:
    """One weight in four stages: four shares of its gradient, whose order of addition shows."""
    model = linears(nn.Tanh, nn.Tanh, nn.Tanh)
    for k in (2, 4, 6):
        model[k].weight = model[0].weight
    return model


class Skips(nn.Module):
    """Skip connections over two stages, one of them used again on the way."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        first = self.a(x).tanh()
        second = self.b(first).relu()
        third = self.c(second) * first
        return self.d(third + second) + first * x


class UNet(nn.Module):
    """Convolutions down and up, with skips and batch normalisation."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(inplace=True))
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU())
        self.up = nn.ConvTranspose2d(4, 2, 2, stride=2)
        self.last = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        skip = self.down(x)
        return self.last(torch.cat([self.up(self.deep(skip)), skip], 1))


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


class Later(nn.Module):
    """Integer inputs that are used again in the third stage, and integers made in the second."""

    def __init__(self):
        super().__init__()
        self.first, self.again = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.a, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.pick = Call(lambda x: x.argmax(-1))

    def forward(self, ids):
        x = self.a(self.first(ids))
        best = self.pick(x)
        return self.head(x + self.again(ids) * self.again(best))


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


def frozen_below() -> nn.Sequential:
    """Nothing to train in the first stage, and frozen layers among the others."""
    model = linears(nn.Tanh, nn.Tanh, nn.Tanh)
    model[0].requires_grad_(False)
    model[4].requires_grad_(False)
    model[6].bias.requires_grad_(False)
    return model


class Unused(nn.Module):
    """A parameter and a buffer that nothing reads, and a layer whose output nobody uses."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.spare = nn.Parameter(torch.randn(3))
        self.register_buffer("idle", torch.randn(2))
        self.dead = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.b(self.a(x))
        aside = self.dead(x)
        return self.d(self.c(x)), aside


class Several(nn.Module):
    """Keyword arguments, a tree of outputs, one of which the loss does not use."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(2, WIDTH)
        self.both, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x, pair, scale=1.0):
        y, mask = pair
        hidden = self.left(x) + self.right(y["y"]) * mask[:, None]
        both = self.both(hidden * scale)
        return {"score": self.last(both), "parts": [both, hidden], "rows": x.sum(), "kind": "several"}


def several_batch(rows: int) -> tuple[Any, Any]:
    inputs = {
        "x": torch.randn(rows, WIDTH),
        "pair": ({"y": torch.randn(rows, 2)}, torch.rand(rows) > 0.5),
        "scale": 0.5,
    }
    return inputs, {"score": torch.randn(rows, 1), "weight": (torch.rand(rows, 1), 2)}


def several_loss(outputs, targets):
    weight, power = targets["weight"]
    far = (outputs["score"] - targets["score"]).abs() ** power
    return (weight * far).mean() + outputs["parts"][0].square().mean()


class OwnLoss(nn.Module):
    """Computes its own loss from labels that it is given."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, labels=None):
        logits = self.d(self.c(self.b(self.a(x)).relu()))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def own_loss_batch(rows: int) -> tuple[Any, Any]:
    return {"x": torch.randn(rows, WIDTH), "labels": torch.randint(WIDTH, (rows,))}, None


class Noise(nn.Module):
    """Random numbers outside nn.Dropout: several in one module, uniform, normal and integer."""

    def forward(self, x):
        x = x + torch.rand_like(x) * torch.randn(x.shape)
        return torch.where(torch.rand_like(x) < 0.8, x, torch.bernoulli(torch.full_like(x, 0.5)))


class InPlace(nn.Module):
    """Changes what it is given, and what a stage was given."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        x += 1
        y = self.a(x)
        y.mul_(x)
        y = self.b(y).relu_()
        y = self.c(y)
        y[:, 0] = 0
        return self.d(y.clamp_(min=-1))


class Scaled(nn.Module):
    """A scale and a bias, whose gradients are sums in the order of memory."""

    def __init__(self, width):
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x):
        return (x * self.scale + self.bias).tanh()


class Strides(nn.Module):
    """Values that cross cuts transposed, expanded, and with gaps; large enough for the order of sums to show."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.scaled = nn.Linear(20, 20), nn.Linear(24, 24), nn.Linear(24, 12), Scaled(24)

    def forward(self, x):
        turned = self.a(x).transpose(1, 2)
        x = self.scaled(turned)
        wide = x.sum(1, keepdim=True).expand(-1, 4, -1)
        gaps = self.b(x)[..., ::2]
        return self.c(wide).sum(1) + gaps.sum(1)


def strides_batch(rows: int) -> tuple[Any, Any]:
    return (torch.randn(rows, 24, 20),), torch.randn(12, rows).t()


class Twice(nn.Module):
    """One module called in two stages, and one called twice in one."""

    def __init__(self):
        super().__init__()
        self.shared, self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        x = self.a(self.shared(x).tanh())
        x = self.b(self.b(x).tanh())
        return self.shared(self.c(x))


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


class Contexts(nn.Module):
    """Autocast, no_grad and detach inside the forward; bfloat16 crosses a cut."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Low(), Scale()
        self.c, self.d = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        low = self.a(x)
        scale = self.b(low.float())
        return self.d(self.c(low.float()) / (1 + scale)) + low.detach()


class Fourier(nn.Module):
    """Complex values cross a cut."""

    def __init__(self):
        super().__init__()
        self.a, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.filter = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.b = Call(lambda z, w: z * w.conj())

    def forward(self, x):
        z = self.b(torch.fft.fft(self.a(x)), self.filter)
        return self.d(self.c(torch.fft.ifft(z).real))


class Constants(nn.Module):
    """Tensors that are neither parameters nor buffers, used in two stages; a scalar parameter; a stage without any."""

    def __init__(self):
        super().__init__()
        self.a, self.d = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.squash, self.act = Call(torch.tanh), nn.ReLU()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.weights = torch.linspace(0, 1, WIDTH)

    def forward(self, x):
        x = self.squash(self.a(x) * self.weights)
        return self.d(self.act(x * self.gain) + self.weights)


class Recurrent(nn.Module):
    """A GRU and an LSTM layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.gru, self.lstm = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        x, _ = self.gru(self.embed(ids))
        x, (h, _) = self.lstm(x)
        return self.head(x + h.transpose(0, 1))


def all_frozen() -> nn.Sequential:
    return linears(nn.ReLU, nn.ReLU, nn.ReLU).requires_grad_(False)


def normalised() -> nn.Sequential:
    return linears(lambda: nn.BatchNorm1d(WIDTH), Average, lambda: nn.BatchNorm1d(WIDTH, momentum=0.3))


def dropping() -> nn.Sequential:
    return linears(lambda: nn.Dropout(0.3), lambda: nn.Sequential(nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5)), Noise)


def mixed_precision() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH, dtype=torch.float64),
        Call(lambda x: x.to(torch.bfloat16)),
        nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16),
        Call(lambda x: x.half().float()),
        nn.Linear(WIDTH, WIDTH),
    )


ZOO: dict[str, Case] = {
    "mlp": Case(lambda: linears(nn.ReLU, nn.Tanh, nn.GELU), rows_of(), mse, ("1", "3", "6"), PARTS),
    "gpt": Case(GPT, words, cross_entropy, ("blocks.1", "blocks.2", "head")),
    "tied_sequence": Case(tied_sequence, words, cross_entropy, ("1", "2", "3"), PARTS),
    "chained": Case(Chained, rows_of(), mse, ("b", "c", "d")),
    "one_weight": Case(one_weight, rows_of(), mse, ("2", "4", "6"), PARTS),
    "skips": Case(Skips, rows_of(), mse, ("b", "c", "d")),
    "unet": Case(
        UNet, lambda rows: ((torch.randn(rows, 1, 4, 4),), torch.randn(rows, 1, 4, 4)), mse, ("deep", "up", "last")
    ),
    "normalised": Case(normalised, rows_of(), mse, ("1", "3", "5"), PARTS),
    "later": Case(Later, words, cross_entropy, ("a", "pick", "again")),
    "dicts": Case(lambda: nn.Sequential(Split(), Middle(), Middle(), Merge()), rows_of(), mse, ("1", "2", "3"), PARTS),
    "frozen_below": Case(frozen_below, rows_of(), mse, ("2", "4", "6"), PARTS),
    "all_frozen": Case(all_frozen, rows_of(), mse, ("2", "4", "6"), PARTS),
    "unused": Case(Unused, rows_of(), lambda outputs, targets: mse(outputs[0], targets), ("b", "c", "d")),
    "several": Case(Several, several_batch, several_loss, ("right", "both", "last")),
    "own_loss": Case(OwnLoss, own_loss_batch, lambda outputs: outputs["loss"], ("b", "c", "d")),
    "in_place": Case(InPlace, rows_of(), mse, ("b", "c", "d")),
    "strides": Case(Strides, strides_batch, mse, ("scaled", "b", "c")),
    "twice": Case(Twice, rows_of(), mse, ("a", "b", "c")),
    "contexts": Case(Contexts, rows_of(), mse, ("b", "c", "d"), ("trace", "export")),
    "fourier": Case(Fourier, rows_of(), mse, ("b", "c", "d")),
    "constants": Case(Constants, rows_of(), mse, ("squash", "act", "d")),
    "recurrent": Case(Recurrent, words, cross_entropy, ("gru", "lstm", "head")),
    "mixed_precision": Case(
        mixed_precision,
        lambda rows: ((torch.randn(rows, WIDTH, dtype=torch.float64),), torch.randn(rows, WIDTH)),
        mse,
        ("1", "2", "3"),
        PARTS,
    ),
    "dropping": Case(dropping, rows_of(), mse, ("2", "4", "5"), PARTS, random=True),
    "gpt_dropout": Case(lambda: GPT(dropout=0.25), words, cross_entropy, ("blocks.1", "blocks.2", "head"), random=True),
}


def captured_by(*fronts: str) -> list[tuple[str, str]]:
    """The cases of the zoo that these front ends can capture, with each of them."""
    return [(name, front) for name, case in ZOO.items() for front in case.fronts if front in fronts]


# ----------------------------------------------------------------------------------------------------------- pipelines


def build(
    case: Case, how: Schedule, rows: int, cuts: tuple[str, ...] | None = None, capture: str = "export", **options: Any
):
    """A pipeline of a case: (pipe, model, inputs, targets). `options` are those of `fpipe.pipeline`."""
    model, inputs, targets = case.make(rows)
    pipe = fpipe.pipeline(
        model,
        example=inputs,
        targets=targets,
        loss=case.loss,
        schedule=how,
        cuts=case.at(how.stages) if cuts is None else cuts,
        capture=capture,
        **options,
    )
    return pipe, model, inputs, targets


def run(pipe, model, inputs, targets, seed=None) -> Result:
    """One step of a pipeline from the model's parameters."""
    step, grads = fpipe.value_and_grad(pipe, outputs=True)(*pipe.init(model), inputs, targets, seed=seed)
    return Result(step.loss, step.outputs, grads, step.buffers)


def run_reference(pipe, model, inputs, targets, seed=None) -> Result:
    """The same step by fpipe's reference, from the model's parameters."""
    state = dict(model.named_parameters()), dict(model.named_buffers())
    step, grads = fpipe.reference(pipe, outputs=True)(*state, inputs, targets, seed=seed)
    return Result(step.loss, step.outputs, grads, step.buffers)


def few(examples: int) -> int:
    """How many examples of a slow property by day; by night, as many times more as of all others."""
    return examples * max(1, settings.default.max_examples // 30)


NIGHTLY = settings.default.max_examples > 100


def by_day(cases: Iterable[Any], every: int) -> list[Any]:
    """Every so many of the cases by day, and all of them by night."""
    return [*cases] if NIGHTLY else [*cases][::every]


def in_turn(cases: Iterable[Any], ways: Iterable[Any]) -> list[tuple[Any, Any]]:
    """By day each case in one of the ways, which take turns, and by night in all."""
    every = [*ways]
    return [(case, way) for k, case in enumerate(cases) for way in (every if NIGHTLY else [every[k % len(every)]])]


by_night = pytest.mark.skipif(not NIGHTLY, reason="takes long; make nightly runs it")
