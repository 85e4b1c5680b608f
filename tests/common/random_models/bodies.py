# SPDX-License-Identifier: Apache-2.0
"""The nested parts of a random model, each of which calls its own parts in its own way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.common.random_models.description import SEALED_NESTS, Again, Leaf, Nest, Part
from tests.common.random_models.layers import Layer


class Opaque:
    """A dict in which no tree library looks for tensors."""

    def __init__(self, batch):
        self.batch = batch

    def __getitem__(self, key):
        return self.batch[key]


def combine(values: list[Tensor], feeds: tuple[int, ...]) -> Tensor:
    """Return the last value, combined with the earlier ones that `feeds` number."""
    total = values[-1]
    for feed in feeds:
        value = values[feed % len(values)]
        total = total * value.tanh() if feed % 2 else total + value
    return total


class Body(nn.Module):
    """A sequence of parts, called in one of the ways of `NESTS`."""

    def __init__(self, nest: Nest, layers: list[Layer]):
        super().__init__()
        self.kind, self.feeds = nest.kind, [part.feeds for part in nest.parts]
        self.parts = nn.ModuleList([module_of(part, layers) for part in nest.parts])
        around = nest.kind in ("method", "object") and any(part.sealed for part in self.parts)  # whole or not at all
        self.sealed = nest.kind in SEALED_NESTS or around
        if self.kind == "eval":
            self.eval()

    def run(self, x, batch):
        values = [x]
        for part, feeds in zip(self.parts, self.feeds, strict=True):
            values.append(self.call(part, combine(values, feeds), batch))
        return values[-1], values[len(values) // 2]

    def call(self, part, x, batch):
        if self.kind == "keyword":
            return tensor_of(part(batch=batch, x=x))
        return tensor_of(part.forward(x, batch) if self.kind == "method" else part(x, batch))

    def forward(self, x, batch):
        if self.kind == "residual":
            return x + self.run(x, batch)[0]
        if self.kind == "tree":
            y, aside = self.run(x, batch)
            return {"y": y, "more": (aside, None, 3), "mask": batch["mask"], "positive": y > 0}
        if self.kind == "object":
            return self.run(x, Opaque(batch))[0]
        if self.kind == "twice":
            return self.run(self.run(x, batch)[0].tanh(), batch)[0]
        if self.kind == "checkpoint":
            return checkpoint(self.run, x, batch, use_reentrant=False)[0]
        if self.kind == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.run(x, batch)[0].float()
        if self.kind == "no_grad":
            with torch.no_grad():
                scale = self.run(x, batch)[0].abs().mean(-1, keepdim=True)
            return x / (1 + scale)
        return self.run(x, batch)[0]


def tensor_of(out: Any) -> Tensor:
    """Return the output of a part as one tensor."""
    if not isinstance(out, dict):
        return out
    aside, nothing, number = out["more"]
    assert nothing is None
    return torch.where(out["positive"] | out["mask"][:, None], out["y"], aside * number)


def module_of(part: Part, layers: list[Layer]) -> nn.Module:
    """Return the module of a part; a new layer is appended to `layers`."""
    if isinstance(part, Again) and layers:
        return layers[part.which % len(layers)]
    if isinstance(part, Nest):
        return Body(part, layers)
    layers.append(Layer(part if isinstance(part, Leaf) else Leaf("plain")))
    return layers[-1]
