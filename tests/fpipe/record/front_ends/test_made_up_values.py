# SPDX-License-Identifier: Apache-2.0
"""Code that may branch on data is recorded on made-up values where assumed answers do not do."""

import pytest
import torch
from torch import nn

import fpipe
from schedules import one_f_one_b
from tests.common.cases import WIDTH

BACKWARDS = pytest.mark.parametrize("backward", ["autograd", "graph"])
HOW = one_f_one_b(ranks=2, microbatches=2)


def build(model, loss, backward="autograd", **options):
    torch.manual_seed(0)
    x, y = torch.rand(8, WIDTH), torch.rand(8, WIDTH)
    batch = {"example": (x,), "targets": y, "loss": loss}
    pipe = fpipe.pipeline(model, **batch, schedule=HOW, cuts=["b"], backward=backward, **options)
    return pipe, (x,), y


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.b(self.a(x))


def _with_numpy(outputs, targets):
    chosen = torch.as_tensor(torch.cdist(outputs, targets).detach().numpy().argmin(1))
    return (outputs - targets[chosen]).abs().mean()


def _with_lists(outputs, targets):
    costs = torch.cdist(outputs, targets).tolist()
    chosen = torch.tensor([min(range(len(row)), key=row.__getitem__) for row in costs])
    return (outputs - targets[chosen]).abs().mean()


def _with_a_guard(outputs, targets):
    if not (outputs.abs() >= 0).all():
        raise ValueError("negative")
    return (outputs - targets).abs().mean()


def _with_a_division(outputs, targets):
    return (outputs - targets).abs().sum() * (1.0 / (outputs > -1000).sum().item())


def _with_equality(outputs, targets):
    assert torch.equal(outputs, outputs.clone())
    assert torch.allclose(targets, targets + 0)
    return (outputs - targets).abs().mean()


def _with_a_best_index(outputs, targets):
    best = outputs.sum(1).topk(2).indices.tolist()
    assert best[0] != best[1]
    return (outputs[best] - targets[best]).abs().mean()


class InModel(nn.Module):
    """A loss inside the model, as its last module."""

    def __init__(self, loss):
        super().__init__()
        self.model, self.loss = Two(), Wrapped(loss)

    def forward(self, x, y):
        return self.loss(self.model(x), y)


class Wrapped(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, *args):
        return self.loss(*args)


@BACKWARDS
@pytest.mark.parametrize(
    "loss", [_with_numpy, _with_lists, _with_a_guard, _with_a_division, _with_equality, _with_a_best_index]
)
def test_code_that_may_branch_on_data_is_recorded_on_values_that_it_can_take(loss, backward):
    pipe, inputs, targets = build(model := Two(), loss, backward, unsplittable=["loss"])
    assert fpipe.verify(pipe, model, inputs, targets).eager
    whole, batch = InModel(loss), (*inputs, targets)
    options = {"schedule": HOW, "cuts": ["model.b"], "unsplittable": [Wrapped], "backward": backward}
    pipe = fpipe.pipeline(whole, example=batch, loss=lambda value: value, **options)
    assert fpipe.verify(pipe, whole, batch).eager


def test_a_guard_still_raises_in_a_step():
    def loss(outputs, targets):
        if (outputs > 5).any():
            raise ValueError("too large")
        if not (outputs.abs() >= 0).all():
            raise ValueError("negative")
        return (outputs - targets).abs().mean()

    pipe, (x,), targets = build(model := Two(), loss, unsplittable=["loss"])
    with pytest.raises(ValueError, match="too large"):
        fpipe.value_and_grad(pipe)(*pipe.init(model), (x * 1000,), targets)
