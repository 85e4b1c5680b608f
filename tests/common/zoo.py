# SPDX-License-Identifier: Apache-2.0
"""The zoo: every small model that has broken pipelines, as a case, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fpipe.tensors.torch_private import VERSION
from tests.common.cases import LENGTH, PARTS, WIDTH, WORDS, Case, cross_entropy, mse, rows_of, words
from tests.common.layers import Average, Block, Call, Low, Merge, Middle, Noise, Scale, Scaled, Split, linears

# ---------------------- Small models that have broken pipelines, with their batches and losses where those are special


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


# ----------------------------------------------------------------------- The zoo: every small model as a case, by name

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


EXPORTS_LESS = VERSION < (2, 13)
"""True if torch.export traces neither recurrent layers nor buffers that a strict trace changes."""


def captured_by(*fronts: str) -> list[tuple[str, str]]:
    """The cases of the zoo that these front ends can capture, with each of them."""
    lost = {("recurrent", "export"), ("recurrent", "dynamo")} if EXPORTS_LESS else set()
    known = [(name, front) for name, case in ZOO.items() for front in case.fronts if front in fronts]
    return [case for case in known if case not in lost]
