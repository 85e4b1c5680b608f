# SPDX-License-Identifier: Apache-2.0
"""The front end `dynamo`: regions are kept; what it cannot read is told with the place."""

import pytest
import torch
from torch import nn

import fpipe
from schedules import one_f_one_b
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.comparison import assert_same
from tests.common.layers import Scale
from tests.common.loops import loop
from tests.common.running import build, run


class Layer(nn.Module):
    """A linear layer with something done to what it returns."""

    def __init__(self, then):
        super().__init__()
        self.linear, self.then = nn.Linear(WIDTH, WIDTH), then

    def forward(self, x):
        return self.then(self, self.linear(x))


def plain(self, x):
    return x.tanh()


def case(then):
    return Case(lambda: nn.Sequential(*map(Layer, [plain, plain, then, plain])), rows_of(), mse, ("1", "2", "3"))


def cast(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        return self.linear(x).float()


def without_gradient(self, x):
    with torch.no_grad():
        return self.linear(x).abs()


class Unreadable(nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x


def test_autocast_is_kept_or_refused():
    """Strict export reads the model as if it were not there."""
    built = _, model, inputs, targets = build(case(cast), one_f_one_b(ranks=4, microbatches=2), 4, capture="export")
    assert_same(run(*built), loop(model, mse, inputs, targets, 2))
    with pytest.raises(fpipe.CaptureError, match=r"module 2.linear: got \(torch.bfloat16.*as the front end saw it"):
        build(case(cast), one_f_one_b(ranks=4, microbatches=2), 4, capture="dynamo")


def test_a_region_without_gradients_belongs_to_its_module():
    one = case(lambda self, x: x + without_gradient(self, x))
    built = _, model, inputs, targets = build(one, one_f_one_b(ranks=4, microbatches=2), 4, capture="dynamo")
    assert_same(run(*built), loop(model, mse, inputs, targets, 2))


def test_a_module_that_is_one_region_can_begin_a_stage():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.quiet, self.c = nn.Linear(WIDTH, WIDTH), Scale(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.a(x)
            return self.c(x * self.quiet(x))

    one = Case(Model, rows_of(), mse, ("", "quiet", ""))
    built = _, model, inputs, targets = build(one, one_f_one_b(ranks=2, microbatches=2), 4, capture="dynamo")
    assert_same(run(*built), loop(model, mse, inputs, targets, 2))


def test_models_that_dynamo_cannot_read_are_refused_with_the_place():
    one = Case(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Unreadable()), rows_of(), mse, ())
    with pytest.raises(fpipe.CaptureError) as caught:
        build(one, one_f_one_b(ranks=1, microbatches=2), 4, (), "dynamo")
    message = str(caught.value)
    assert message.startswith("module 1 (Unreadable): the front end dynamo could not read it: ")
    assert 'choose capture="trace"' in message
    assert "TORCHDYNAMO_VERBOSE" not in message


def test_an_error_of_the_model_is_named_by_its_module():
    one = case(lambda self, x: self.linear(x[:, :2]))
    with pytest.raises(
        fpipe.CaptureError,
        match=r"^module 2\.linear \(Linear\): got RuntimeError: .*, expected a forward that runs",
    ):
        build(one, one_f_one_b(ranks=4, microbatches=2), 4, capture="dynamo")


def test_leaves_are_identified_whatever_their_order():
    """torch's trees keep the order of a dict, fpipe's sort it."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, z, a):
            return {"z": self.b(self.a(z) - a), "a": [a, {"y": z * 2, "b": 3}]}

    def batch(rows):
        targets = {"w": torch.randn(rows, WIDTH), "c": torch.randn(rows, WIDTH)}
        return {"z": torch.randn(rows, WIDTH), "a": torch.randn(rows, WIDTH)}, targets

    def loss(outputs, targets):
        return mse(outputs["z"], targets["w"]) + (outputs["a"][1]["y"] * targets["c"]).mean() * outputs["a"][1]["b"]

    one = Case(Named, batch, loss, ("", "b", ""))
    built = _, model, inputs, targets = build(one, one_f_one_b(ranks=2, microbatches=2), 4, capture="dynamo")
    assert_same(run(*built), loop(model, loss, inputs, targets, 2))
