# SPDX-License-Identifier: Apache-2.0
"""Whole random models, and the cases that tests run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.common.cases import WIDTH, WORDS, Case, mse
from tests.common.random_models.bodies import Body, combine, module_of, tensor_of
from tests.common.random_models.description import Description, Nest, Part
from tests.common.random_models.layers import Layer


def tie(description: Description, layers: list[Layer]) -> None:
    for i, j in description.ties:
        to, owner = layers[i % len(layers)].b, layers[j % len(layers)].a
        if to.weight.dtype == torch.float32 and isinstance(owner, nn.Linear):
            to.weight = owner.weight


def notes_of(model: nn.Module) -> list[Tensor]:
    """Return the tensors that layers have left in attributes, in order."""
    return [module.note for module in model.modules() if isinstance(module, Layer) and hasattr(module, "note")]


class Net(nn.Module):
    """A model whose forward calls its body directly, unlike an `nn.Sequential`."""

    def __init__(self, description: Description):
        super().__init__()
        layers: list[Layer] = []
        self.body, self.returns = Body(Nest("plain", description.parts), layers), description.returns
        tie(description, layers)

    def forward(self, x, mask, ids, scale=1.0, nothing=None, flag=True, labels=None):
        batch = {"mask": mask, "ids": ids, "scale": scale, "nothing": nothing, "flag": flag}
        y, aside = self.body.run(x, batch)
        for note in notes_of(self):
            y = y + note
        if self.returns == "tensor":
            return y
        out = {"y": y, "more": [aside, None, 3, ids], "mean": y.mean()}
        return {**out, "loss": mse(y, labels)} if self.returns == "loss" else out


class Enter(nn.Module):
    """The first part of an `nn.Sequential`: puts all inputs into one tree."""

    def forward(self, inputs):
        x, mask, ids = inputs
        return [x], {"mask": mask, "ids": ids, "scale": 0.5, "nothing": None, "flag": True}


class PassOn(nn.Module):
    """Calls a part with the values that it needs, and passes the whole tree on."""

    def __init__(self, part: Part, layers: list[Layer]):
        super().__init__()
        self.feeds, self.part = part.feeds, module_of(part, layers)

    def forward(self, tree):
        values, batch = tree
        return [*values, tensor_of(self.part(combine(values, self.feeds), batch))], batch


class Leave(nn.Module):
    """The last part of an `nn.Sequential`: returns the last value."""

    def forward(self, tree):
        return tree[0][-1] * 2


def model_of(description: Description) -> nn.Module:
    """Return the model of a description."""
    if not description.sequence:
        return Net(description)
    layers: list[Layer] = []
    model = nn.Sequential(Enter(), *[PassOn(part, layers) for part in description.parts], Leave())
    tie(description, layers)
    return model


def batch_of(description: Description) -> Callable[[int], tuple[Any, Any]]:
    """Return a function that makes inputs and targets with a given number of rows."""

    def batch(rows: int) -> tuple[Any, Any]:
        x, y = torch.randn(2, rows, WIDTH)
        inputs = {"x": x, "mask": torch.rand(rows) > 0.7, "ids": torch.randint(WORDS, (rows,))}
        if description.returns == "loss":
            return {**inputs, "labels": y}, None
        if description.sequence:
            return (tuple(inputs.values()),), y
        return ({"scale": 0.5, "flag": True, **inputs} if description.keywords else tuple(inputs.values())), y

    return batch


def loss_of(description: Description) -> Callable[..., Tensor]:
    """Return the loss for the model's outputs."""
    if description.returns == "loss":
        return lambda out: out["loss"]
    if description.returns == "tree":
        return lambda out, y: mse(out["y"], y) + out["more"][0].square().mean()
    return mse


def case_of(description: Description) -> Case:
    """Return a case, as those of the zoo, for the helpers that run cases."""
    return Case(
        lambda: model_of(description),
        batch_of(description),
        loss_of(description),
        ("", "", ""),
        random=description.random,
    )
