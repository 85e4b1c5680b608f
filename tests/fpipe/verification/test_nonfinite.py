# SPDX-License-Identifier: Apache-2.0
"""A value that is not finite is traced to the action that made it, the same one under every schedule."""

import pytest
import torch
from torch import nn

import fpipe
from fpipe.verification.nonfinite import NonFinite
from schedules import gpipe, interleaved_1f1b, one_f_one_b, zb_h1, zb_v
from tests.common.schedules import descending
from tests.common.sizes import by_day

STAGES, MICROBATCHES = 4, 4
SCHEDULES = {
    "descending": descending(STAGES, MICROBATCHES),
    "gpipe": gpipe(STAGES, MICROBATCHES),
    "1f1b": one_f_one_b(STAGES, MICROBATCHES),
    "zb_v": zb_v(2, MICROBATCHES),
    "interleaved": interleaved_1f1b(2, MICROBATCHES),
    "zb_h1": zb_h1(STAGES, MICROBATCHES),
}
schedules = pytest.mark.parametrize("how", by_day(SCHEDULES.values(), 3), ids=by_day(SCHEDULES, 3))


class Layer(nn.Module):
    """A layer whose parameter is the identity at first; `then` is applied to the result."""

    def __init__(self, then=None):
        super().__init__()
        self.inner, self.then = nn.Linear(2, 2), then
        with torch.no_grad():
            self.inner.weight.copy_(torch.eye(2))
            self.inner.bias.zero_()

    def forward(self, x):
        y = self.inner(x)
        return y if self.then is None else self.then(y)


def find(how, layers, x, loss=torch.mean, change=None, backward="autograd"):
    model = nn.Sequential(*layers)
    cuts = [str(k) for k in range(1, len(layers))]
    pipe = fpipe.pipeline(
        model,
        example=(torch.ones_like(x),),
        loss=loss,
        schedule=how,
        cuts=cuts,
        gradients=fpipe.Gradients(backward=backward),
    )
    params, buffers = pipe.init(model)
    for name, value in (change or {}).items():
        params[name] = value
    found = fpipe.find_nonfinite(pipe)(params, buffers, (x,))
    _, grads = fpipe.value_and_grad(pipe)(params, buffers, (x,))
    assert (found is None) == bool(fpipe.all_finite(pipe, grads))
    return found


def place(how, kind, stage, microbatch):
    """Rank and action as they are named."""
    return how.placement.home(stage, microbatch), f"{stage}{kind}{microbatch}"


def rows(*special):
    """A batch of ones, one row per microbatch, but for (microbatch, value)."""
    x = torch.ones(MICROBATCHES, 2)
    for i, value in special:
        x[i] = value
    return x


@schedules
def test_a_step_that_is_finite_has_none(how):
    assert find(how, [Layer() for _ in range(STAGES)], rows()) is None


@schedules
def test_a_forward_that_overflows_is_named(how):
    found = find(how, [Layer(), Layer(torch.exp), Layer(), Layer()], rows((2, 1e3), (3, 1e3)))
    assert found == NonFinite(*place(how, "F", 1, 2), "the output of '1'", "inf")


@schedules
def test_the_first_in_the_order_of_one_device_is_named(how):
    """The loss of microbatch 1 comes before the overflow in stage 0 of microbatch 3."""
    layers = [Layer(lambda y: torch.where(y > 50, y.exp(), y)), Layer(), Layer(), Layer()]
    found = find(how, layers, rows((1, 0.0), (3, 1e3)), loss=lambda y: y.log().mean())
    assert found == NonFinite(*place(how, "F", 3, 1), "the loss", "inf")


@schedules
@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_a_backward_that_divides_by_zero_is_named(how, backward):
    found = find(how, [Layer(), Layer(), Layer(torch.sqrt), Layer()], rows((1, 0.0)), backward=backward)
    kind = "I" if any(action.kind == "I" for action in how.actions(0)) else "B"
    assert found[:2] == place(how, kind, 2, 1)
    assert found.leaf.startswith(("the gradient with respect to the output of '1.inner'", "grads['2.inner"))


@schedules
def test_a_parameter_that_was_not_finite_comes_first(how):
    change = {"2.inner.bias": nn.Parameter(torch.tensor([0.0, torch.nan]))}
    found = find(how, [Layer() for _ in range(STAGES)], rows((0, 1e30)), change=change)
    assert found[1:] == (None, "params['2.inner.bias']", "nan")


def test_a_batch_that_was_not_finite_comes_first():
    found = find(SCHEDULES["gpipe"], [Layer() for _ in range(STAGES)], rows((3, torch.nan)))
    assert found == NonFinite(0, None, "inputs[0]", "nan")


def test_a_gradient_that_overflows_in_its_sum_is_named():
    """Each microbatch's gradient is finite, the sum of two is not."""
    layers, how = [Layer() for _ in range(STAGES)], SCHEDULES["gpipe"]
    found = find(how, layers, 10 * rows(), loss=lambda y: (y[0, 0] - y[0, 1]) * 1e38)
    second = [action for action in how.actions(3) if action.kind == "B"][1]
    assert found[:2] == place(how, "B", 3, second.microbatch)
    assert found.leaf.startswith("grads['3.inner")


class Masked(nn.Module):
    """Attention scores, masked by negative infinity; the mask crosses all cuts."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(STAGES)])

    def forward(self, x, mask):
        for layer in self.layers:
            x = torch.softmax(layer(x) + mask, -1)
        return x


def test_masks_may_be_infinite():
    model, x = Masked(), rows()
    mask = torch.tensor([[0.0, -torch.inf]] * MICROBATCHES)
    pipe = fpipe.pipeline(
        model, example=(x, mask), loss=torch.mean, schedule=SCHEDULES["1f1b"], cuts=["layers.1", "layers.2", "layers.3"]
    )
    assert fpipe.find_nonfinite(pipe)(*pipe.init(model), (x, mask)) is None
    model.layers[2].weight.data.fill_(torch.inf)
    found = fpipe.find_nonfinite(pipe)(*pipe.init(model), (x, mask))
    assert found.leaf == "params['layers.2.weight']"


def test_the_answer_is_a_line_of_text():
    assert str(NonFinite(1, "1F2", "the loss", "nan")) == "rank 1, 1F2: got nan in the loss"
    assert str(NonFinite(1, None, "params['w']", "inf")) == "rank 1: got inf in params['w']"
