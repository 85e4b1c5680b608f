# SPDX-License-Identifier: Apache-2.0
"""Modules that ask whether gradients are enabled get the answers of one device, in training and in evaluation."""

import pytest
import torch
from torch import nn

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b
from tests.common.sizes import covering

CUTS = (["1"], ["1.inside"])


class Asking(nn.Module):
    """Computes something else if gradients are disabled, or if its input requires none; may switch them itself."""

    def __init__(self):
        super().__init__()
        self.before, self.inside = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.before(x)
        h = h + (1 if torch.is_grad_enabled() else 2)
        h = h * (3 if h.requires_grad else 4)
        with torch.no_grad():
            h = h + (5 if torch.is_grad_enabled() else self.before(x))
        with torch.enable_grad():
            h = h + (7 if (h * self.inside.weight.sum()).requires_grad else 8)
        return self.inside(h)


def build(cuts, frozen=(), **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Asking())
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    how = one_f_one_b(ranks=2, microbatches=4)
    loss = nn.functional.mse_loss
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=loss, schedule=how, cuts=cuts, **options)
    return model, pipe, (x,), y


def run_alone(model, x):
    return torch.cat([model(rows) for rows in x.split(2)])


@pytest.mark.parametrize(
    ("cuts", "options"),
    [
        (["1"], {}),
        (["1.inside"], {}),
        (["1.inside"], {"backward": "graph"}),
        (["1"], {"capture": "export"}),
        (["1.inside"], {"capture": "dynamo"}),
    ],
)
def test_an_evaluation_answers_as_without_gradients(cuts, options):
    model, pipe, inputs, y = build(cuts, **options)
    with torch.no_grad():
        expected = run_alone(model.eval(), *inputs)
    assert same_bits(fpipe.evaluate(pipe)(*pipe.init(model), inputs, y).outputs, expected)
    assert same_bits(fpipe.predict(pipe)(*pipe.init(model), inputs), expected)


@covering(cuts=CUTS, backward=["autograd", "graph"], frozen=[("0",), ("0", "1.before")])
def test_training_answers_as_with_gradients_even_in_a_frozen_stage(cuts, backward, frozen):
    model, pipe, inputs, y = build(cuts, frozen=frozen, backward=backward)
    with torch.no_grad():  # around the build, which makes no difference
        pipe = pipe.rebuilt(model)
    fpipe.verify(pipe, model, inputs, y)
    out, _ = fpipe.value_and_grad(pipe, outputs=True)(*pipe.init(model), inputs, y)
    assert same_bits(out.outputs, run_alone(model, *inputs).detach())


@pytest.mark.parametrize("cuts", CUTS)
def test_a_hook_on_what_requires_a_gradient_is_no_obstacle_to_an_evaluation(cuts):
    def forward(self, x):
        h = self.before(x)
        if h.requires_grad:
            h.register_hook(lambda grad: None)
        return self.inside(h)

    kind = type("Hooking", (Asking,), {"forward": forward})
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Linear(8, 8), kind()), torch.randn(2, 8, 8)
    how = one_f_one_b(ranks=2, microbatches=4)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=nn.functional.mse_loss, schedule=how, cuts=cuts)
    with torch.no_grad():
        expected = run_alone(model, x)
    assert same_bits(fpipe.evaluate(pipe)(*pipe.init(model), (x,), y).outputs, expected)


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_a_module_that_is_a_frozen_stage_is_asked_with_gradients_enabled(backward):
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(Asking().requires_grad_(False), nn.Linear(8, 8)), torch.randn(2, 8, 8)
    how = one_f_one_b(ranks=2, microbatches=4)
    pipe = fpipe.pipeline(
        model, example=(x,), targets=y, loss=nn.functional.mse_loss, schedule=how, cuts=["1"], backward=backward
    )
    out, _ = fpipe.value_and_grad(pipe, outputs=True)(*pipe.init(model), (x,), y)
    assert same_bits(out.outputs, run_alone(model, x).detach())
