# SPDX-License-Identifier: Apache-2.0
"""State outside the model: globals, classes and the loss, whose change is an error at the next step."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fpipe
from tests.common import watched_models
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.running import staged
from tests.common.sizes import covering, sampled
from tests.common.watched_models import TABLE, WAYS, Block, Loss, batch, build, run_step


def counted_loss(weight):
    def loss(outputs, targets):
        return (outputs - targets).square().mean() * weight

    def change(value):
        nonlocal weight
        weight = value

    return loss, change


@sampled(1)
@pytest.mark.parametrize("backward", WAYS)
def test_changing_what_a_loss_closes_over_is_an_error(backward):
    loss, change = counted_loss(1.0)
    pipe, model, _, x, y = build(backward, loss=loss)
    run_step(pipe, model, x, y)
    change(3.0)
    words = r"counted_loss.<locals>.loss, which closes over 'weight': got 3.0, expected 1.0, as when it was captured"
    with pytest.raises(fpipe.InputError, match=words + r".*pass it with the batch.*pipe\.rebuilt"):
        run_step(pipe, model, x, y)
    assert_same(run_step(pipe.rebuilt(model), model, x, y), loop(model, loss, (x,), y, 3))


OUTSIDE = {
    "a global": (
        lambda m, patch: patch.setattr(watched_models, "FACTOR", 2.0),
        r"global 'FACTOR': got 2.0, expected 1.0",
    ),
    "a global table": (lambda m, patch: patch.setitem(TABLE, "scale", 2.0), r"'TABLE'\['scale'\]: got 2.0, expected 1"),
    "a class": (lambda m, patch: patch.setattr(Block, "kind", 2.0), r"class Block, attribute 'kind': got 2.0, expect"),
    "a loss": (lambda m, patch: patch.setattr(m, "weight", 2.0), r"the 'loss'.weight: got 2.0, expected 1.0"),
    "a function": (
        lambda m, patch: patch.setattr(watched_models, "shifted", max),
        r"global 'shifted': got max, expected sh",
    ),
}


@sampled(2)
@covering(what=[*OUTSIDE], backward=WAYS)
def test_changing_state_outside_the_model_is_an_error(what, backward, monkeypatch):
    change, words = OUTSIDE[what]
    pipe, model, loss, x, y = build(backward)
    run_step(pipe, model, x, y)
    change(loss, monkeypatch)
    with pytest.raises(fpipe.InputError, match=words):
        run_step(pipe, model, x, y)
    monkeypatch.undo()
    assert_same(run_step(pipe, model, x, y), loop(model, loss, (x,), y, 3))


@pytest.mark.parametrize("backward", WAYS)
def test_changing_a_loss_module_is_an_error(backward):
    loss = nn.SmoothL1Loss()
    pipe, model, _, x, y = build(backward, loss=loss)
    loss.beta = 0.5
    with pytest.raises(fpipe.InputError, match=r"\(SmoothL1Loss\) of the loss, attribute 'beta': got 0.5, expe"):
        run_step(pipe, model, x, y)


@sampled(1)
@pytest.mark.parametrize("capture", ["export", "dynamo", "fx"])
def test_front_ends_that_make_a_graph_notice_every_change(capture, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 2))
    x, y = batch()
    loss = Loss()
    pipe = staged(model, (x,), y, ["2"], 3, loss=loss, capture=capture)
    run_step(pipe, model, x, y)
    for change, words in [
        (lambda: setattr(model[1], "p", 0.5), r"module 1 \(Dropout\), attribute 'p': got 0.5"),
        (lambda: model[0].requires_grad_(False), r"module 0 \(Linear\), parameter 'weight'"),
        (lambda: setattr(loss, "weight", 2.0), r"the 'loss'.weight: got 2.0"),
    ]:
        change()
        with pytest.raises(fpipe.InputError, match=words):
            run_step(pipe, model, x, y)
        pipe = pipe.rebuilt(model)


class Noted(nn.Module):
    """Reads a global, an attribute of a helper, and assigns attributes of the same names to other objects."""

    def __init__(self, common):
        super().__init__()
        self.linear, self.common, self.other = nn.Linear(4, 4), common, SimpleNamespace()

    def forward(self, x):
        note = SimpleNamespace()
        note.SCALE = note.temperature = self.other.SCALE = self.other.temperature = 1
        return self.linear(x) * SCALE * self.common.temperature


SCALE = 2.0


@pytest.mark.parametrize("backward", WAYS)
def test_an_assignment_to_one_object_hides_no_change_of_another(backward, monkeypatch):
    common = SimpleNamespace(temperature=2.0)
    model = nn.Sequential(Noted(common), Noted(common), nn.Linear(4, 2))
    x, y = batch()
    pipe = staged(model, (x,), y, microbatches=3, backward=backward)
    monkeypatch.setattr(common, "temperature", 3.0)
    with pytest.raises(fpipe.InputError, match=r"'common'.temperature: got 3.0, expected 2.0"):
        run_step(pipe, model, x, y)
    monkeypatch.undo()
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    with pytest.raises(fpipe.InputError, match=r"global 'SCALE': got 5.0, expected 2.0"):
        run_step(pipe, model, x, y)


class Kept:
    """Counts and caches what only its own module's forward assigns."""

    def __init__(self):
        self.width, self.calls, self.tables = 0, 0, {}


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 4), Kept()

    def forward(self, x):
        kept = self.kept
        kept.width = len(x)
        self.kept.calls += 1
        if kept.width not in kept.tables:
            kept.tables[kept.width] = torch.ones(1)
        return self.linear(x) * kept.tables[kept.width] * (kept.calls > 0)


def test_what_the_model_assigns_to_a_helper_may_change():
    model, (x, y) = nn.Sequential(Keeps(), Keeps(), nn.Linear(4, 2)), batch()
    pipe = staged(model, (x,), y, microbatches=3)
    before = run_step(pipe, model, x, y)
    model(x[:1])
    assert_same(run_step(pipe, model, x, y), before)


class Reversed(nn.Linear):
    """Scales the gradient in one of several kinds of backward code."""

    factor = 1.0

    def __init__(self, how):
        super().__init__(4, 4)
        self.how = how
        if how == "a module's hook":
            self.register_full_backward_hook(lambda module, grads, _: tuple(g * module.factor for g in grads))

    def forward(self, x):
        y = super().forward(x)
        if self.how == "a tensor's hook" and y.requires_grad:
            y.register_hook(lambda grad: grad * self.factor)
        return Scaled.apply(y) if self.how == "an autograd function" else y


class Scaled(torch.autograd.Function):
    factor = 1.0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * Scaled.factor


@sampled(2)
@covering(how=["a module's hook", "a tensor's hook", "an autograd function"], backward=WAYS)
def test_changing_what_only_the_backward_reads_is_an_error(how, backward, monkeypatch):
    model, (x, y) = nn.Sequential(nn.Linear(4, 4), Reversed(how), nn.Linear(4, 4), Reversed(how)), batch()
    y = torch.randn(6, 4)
    pipe = staged(model, (x,), y, ["2"], 3, backward=backward)
    run_step(pipe, model, x, y)
    monkeypatch.setattr(Scaled if how == "an autograd function" else Reversed, "factor", -0.5)
    with pytest.raises(fpipe.InputError, match=r"attribute 'factor': got -0.5, expected 1.0"):
        run_step(pipe, model, x, y)
    monkeypatch.undo()
    run_step(pipe, model, x, y)
    if how != "an autograd function":
        model[1].factor = -0.5
        with pytest.raises(fpipe.InputError, match=r"module 1 \(Reversed\), attribute 'factor': got -0.5 of its own"):
            run_step(pipe, model, x, y)
