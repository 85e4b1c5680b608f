# SPDX-License-Identifier: Apache-2.0
"""A catalog of models that ask: about their own state, about tracing, about the batch, about constants.

Each answer leads to another result, so a wrong one shows. An `Asking` is a layer that asks one question between its two
linears; a `Net` is a row of them, and passes all of them the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.utils import import_utils

from tests.common.cases import WIDTH

WORDS, LENGTH = 7, 3


class Given(NamedTuple):
    """What every layer is passed of the batch; `entering` is the hidden state before its first linear."""

    ids: Tensor
    mask: Tensor | None
    x: Tensor
    entering: Tensor


class Question(NamedTuple):
    """`asks(layer, h, given)` is what the layer wants to know; `add(layer)` is what it has for that."""

    asks: Callable[..., Any]
    add: Callable[[Any], None] = lambda layer: None


# ------------------------------------------------------------------------------------------------------- its own state


def counts_in_a_buffer(layer, h, given):
    layer.count += 1
    return True


def knows_its_first_call(layer, h, given):
    first, layer.called = not getattr(layer, "called", False), True
    return first


def counts_calls(layer, h, given):
    layer.calls = getattr(layer, "calls", 0) + 1
    return layer.calls % 2


def makes_a_buffer_once(layer, h, given):
    made = not hasattr(layer, "table")
    if made:
        layer.register_buffer("table", torch.arange(1.0, WIDTH + 1), persistent=False)
    return (layer.table[0] == 1).all()


def makes_an_attribute_once(layer, h, given):
    if not hasattr(layer, "cache"):
        layer.cache = torch.arange(1.0, WIDTH + 1)
    return bool(layer.cache.sum() > 3)


def keeps_what_it_saw_first(layer, h, given):
    if not hasattr(layer, "seen"):
        layer.seen = h.detach().mean()
    return layer.seen + 0


def keeps_a_table_per_shape(layer, h, given):
    table = layer.tables.setdefault(tuple(h.shape), torch.full(h.shape, 0.5))
    return table.sum() > 0


def remembers_the_last_batch(layer, h, given):
    last, layer.last = getattr(layer, "last", None), given.x
    return last is None or last.sum() > 0


def holding(**attributes):
    def add(layer):
        for name, value in attributes.items():
            if isinstance(value, Tensor) and name.startswith("b_"):
                layer.register_buffer(name, value.clone())
            else:
                setattr(layer, name, value.copy() if isinstance(value, dict) else value)

    return add


def buffer(value):
    return holding(b_value=torch.tensor(value))


def freeze(layer):
    layer.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)


STATE = {
    "counts in a buffer": Question(counts_in_a_buffer, lambda m: m.register_buffer("count", torch.tensor(0))),
    "a counter of its own": Question(
        lambda m, h, g: m.count.add_(1) > 2, lambda m: m.register_buffer("count", torch.tensor(0))
    ),
    "its first call": Question(knows_its_first_call),
    "how often it was called": Question(counts_calls),
    "makes a buffer once": Question(makes_a_buffer_once),
    "makes an attribute once": Question(makes_an_attribute_once),
    "keeps what it saw first": Question(keeps_what_it_saw_first),
    "keeps a table per shape": Question(keeps_a_table_per_shape, holding(tables={})),
    "remembers the last batch": Question(remembers_the_last_batch),
    "training": Question(lambda m, h, g: m.training),
    "a frozen weight": Question(lambda m, h, g: m.frozen.requires_grad, freeze),
    "a weight's requires_grad": Question(lambda m, h, g: m.a.weight.requires_grad),
    "isinstance of a parameter": Question(lambda m, h, g: isinstance(m.a.weight, nn.Parameter)),
    "a weight's class": Question(lambda m, h, g: type(m.a.weight) is nn.Parameter),
    "whether a weight is a leaf": Question(lambda m, h, g: m.a.weight.is_leaf),
    "a weight's gradient": Question(lambda m, h, g: m.a.weight.grad is None),
    "how many parameters": Question(lambda m, h, g: len(list(m.parameters())) == 4),
    "names of parameters": Question(lambda m, h, g: "a.weight" in dict(m.named_parameters())),
    "a device": Question(lambda m, h, g: next(m.parameters()).device.type == "cpu"),
    "its hooks": Question(lambda m, h, g: bool(m._forward_hooks)),
    "a constant buffer": Question(lambda m, h, g: m.b_value.item() > 1, buffer(2.0)),
    "a buffer of flags": Question(lambda m, h, g: m.b_value.any(), buffer([False, True])),
    "a weight's sum": Question(lambda m, h, g: m.a.weight.sum() > 0),
    "its version": Question(lambda m, h, g: m.a.weight._version > 10**6),
}

# ------------------------------------------------------------------------------------------------------------- tracing

TRACING = {
    "torch.jit.is_tracing": Question(lambda m, h, g: torch.jit.is_tracing()),
    "torch.jit.is_scripting": Question(lambda m, h, g: torch.jit.is_scripting()),
    "torch.compiler.is_compiling": Question(lambda m, h, g: torch.compiler.is_compiling()),
    "torch.compiler.is_exporting": Question(lambda m, h, g: torch.compiler.is_exporting()),
    "torch._dynamo.is_compiling": Question(lambda m, h, g: torch._dynamo.is_compiling()),
    "isinstance of FakeTensor": Question(lambda m, h, g: isinstance(h, FakeTensor)),
    "isinstance of torch's FakeTensor": Question(lambda m, h, g: isinstance(h, torch._subclasses.FakeTensor)),
    "transformers' is_tracing": Question(lambda m, h, g: import_utils.is_tracing(h)),
    "transformers' is_torchdynamo_compiling": Question(lambda m, h, g: import_utils.is_torchdynamo_compiling()),
    "the class of a tensor": Question(lambda m, h, g: type(h) is Tensor),
    "the name of its class": Question(lambda m, h, g: type(h).__name__ == "Tensor"),
    "whether it is on meta": Question(lambda m, h, g: h.is_meta or h.device.type == "meta"),
    "whether gradients are on": Question(lambda m, h, g: torch.is_grad_enabled()),
    "whether h wants a gradient": Question(lambda m, h, g: h.requires_grad),
    "whether h is a leaf": Question(lambda m, h, g: h.is_leaf),
    "whether h has a node": Question(lambda m, h, g: h.grad_fn is None),
    "whether what enters is a leaf": Question(lambda m, h, g: g.entering.is_leaf),
    "whether what enters has a node": Question(lambda m, h, g: g.entering.grad_fn is None),
    "whether what enters wants a gradient": Question(lambda m, h, g: g.entering.requires_grad),
    "whether what enters is a view": Question(lambda m, h, g: g.entering._is_view()),
    "whether x is a leaf": Question(lambda m, h, g: g.x.is_leaf and g.x.grad_fn is None),
    "autocast": Question(lambda m, h, g: torch.is_autocast_enabled("cpu")),
    "inference mode": Question(lambda m, h, g: torch.is_inference_mode_enabled() or h.is_inference()),
}

# ----------------------------------------------------------------------------------------------------------- the batch


def counts_as_far_as_it_can(layer, h, given):
    try:
        return int((given.ids == 0).sum())
    except Exception:
        return 0


BATCH = {
    "mask.all()": Question(lambda m, h, g: g.mask is not None and g.mask.all()),
    "mask.all().item()": Question(lambda m, h, g: g.mask is not None and g.mask.all().item()),
    "not mask.any()": Question(lambda m, h, g: g.mask is not None and not g.mask.any()),
    "torch.all of a mask": Question(lambda m, h, g: g.mask is not None and torch.all(g.mask == 1)),
    "no mask": Question(lambda m, h, g: g.mask is None),
    "any padding": Question(lambda m, h, g: (g.ids == 0).any()),
    "the largest id": Question(lambda m, h, g: g.ids.max().item() < WORDS - 1),
    "how much padding": Question(lambda m, h, g: int((g.ids == 0).sum())),
    "how much padding, if it can": Question(counts_as_far_as_it_can),
    "lengths": Question(lambda m, h, g: max((g.ids != 0).sum(-1).tolist())),
    "sorted ids": Question(lambda m, h, g: torch.equal(g.ids, g.ids.sort(-1).values)),
    "falling ids": Question(lambda m, h, g: (g.ids.diff(dim=-1) < 0).any()),
    "different ids": Question(lambda m, h, g: g.ids.unique().numel() > 3),
    "where the padding is": Question(lambda m, h, g: (g.ids == 0).nonzero().shape[0]),
    "positive numbers": Question(lambda m, h, g: (g.x > 0).all()),
    "a first number": Question(lambda m, h, g: float(g.x[0, 0]) > 0),
    "the hidden state": Question(lambda m, h, g: (h > 0).all()),
    "its rows": Question(lambda m, h, g: h.shape[0] > 1),
    "its dtype": Question(lambda m, h, g: h.dtype is torch.float32 and g.ids.dtype is torch.int64),
    "whether it is contiguous": Question(lambda m, h, g: g.ids.is_contiguous()),
    "an assertion": Question(lambda m, h, g: (torch._assert(g.ids.max() < WORDS, "too large"), True)[1]),
    "a batch and a buffer": Question(lambda m, h, g: (g.ids > m.b_value).any(), buffer(4)),
}

# ----------------------------------------------------------------------------------------------------------- constants

CONSTANTS = {
    "a table": Question(lambda m, h, g: m.table.any(), holding(table=torch.tensor([0.0, 1.0]))),
    "a table's sum": Question(lambda m, h, g: m.table.sum().item() > 1, holding(table=torch.tensor([0.5, 1.0]))),
    "a range": Question(lambda m, h, g: torch.arange(h.shape[0]).sum().item() > 0),
    "a new tensor": Question(lambda m, h, g: torch.ones(3).all() and not torch.zeros(2).any()),
    "a number as a tensor": Question(lambda m, h, g: torch.tensor(2.0) > 1),
    "its own positions": Question(lambda m, h, g: (torch.arange(LENGTH)[None] == 0).all()),
    "a list of a table": Question(lambda m, h, g: sum(m.table.tolist()), holding(table=torch.tensor([0.0, 1.0]))),
}

CATALOG: dict[str, Question] = {**STATE, **TRACING, **BATCH, **CONSTANTS}


class Asking(nn.Module):
    """Two linears, and between them what the answer says: a number, a flag or a tensor, by value."""

    def __init__(self, question: str) -> None:
        super().__init__()
        self.a, self.b, self.question = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), question
        CATALOG[question].add(self)

    def forward(self, h: Tensor, given: Given) -> Tensor:
        h = torch.tanh(self.a(h))
        answer = CATALOG[self.question].asks(self, h, given)
        if isinstance(answer, Tensor) and answer.dtype is torch.float32:
            return self.b(h * answer)
        return h + self.b(h * (1.5 + float(answer)) if answer else h - 0.25)


class Net(nn.Module):
    def __init__(self, questions: list[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Asking(question) for question in questions])

    def forward(self, ids: Tensor, mask: Tensor | None, x: Tensor) -> Tensor:
        h = self.words(ids).mean(1) + x
        if mask is not None:
            h = h * mask.float().mean(1, keepdim=True)
        for layer in self.layers:
            h = layer(h, Given(ids, mask, x, h))
        return self.head(h)
