"""Hooks on gradients of parameters: called as on one device, or refused."""

import pytest
import torch
from torch import nn

import fpipe
from schedules import one_f_one_b, zb_h1, zb_v
from tests.common.cases import WIDTH
from tests.common.running import staged
from tests.common.sizes import covering, sampled

BACKWARDS = pytest.mark.parametrize("backward", ["autograd", "graph"])
HOWS = {
    "1F1B": one_f_one_b(ranks=2, microbatches=4),
    "ZB-H1": zb_h1(ranks=2, microbatches=4),
    "ZB-V": zb_v(ranks=1, microbatches=4),
}


class Tied(nn.Module):
    """The first weight is used on both sides of the cut."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        h = self.b(self.a(x).sin()).sin()
        return self.c(h @ self.a.weight)


def build(model, how, backward, **options):
    x, y = torch.rand(8, WIDTH), torch.rand(8, WIDTH)
    cuts = ["b", "c"][: how.stages - 1]
    return staged(model, (x,), y, cuts, schedule=how, backward=backward, **options), (x,), y


@sampled(2)
@covering(name=["a.weight", "b.weight", "b.bias", "c.weight"], how=HOWS, backward=["autograd", "graph"])
def test_a_hook_gets_the_gradient_of_each_microbatch(name, how, backward):
    """Clamping is not linear, so the sum of clamped gradients is not the clamped sum."""
    torch.manual_seed(1)
    model, seen = Tied(), []
    model.get_parameter(name).register_hook(lambda grad: seen.append(grad.clone()))
    model.get_parameter(name).register_hook(lambda grad: grad.clamp(-0.001, 0.0015) * 0.3)
    pipe, inputs, targets = build(model, how, backward)
    assert not seen, "nothing is called while a pipeline is built"
    fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets)
    assert len(seen) == how.microbatches
    assert fpipe.verify(pipe, model, inputs, targets).eager


def test_a_stage_with_gradient_hooks_is_left_to_autograd():
    model = Tied()
    model.b.weight.register_hook(lambda grad: grad * 2)
    assert "gradients have hooks" in str(build(model, HOWS["1F1B"], "graph")[0])


MASK = torch.rand(WIDTH, WIDTH)
KEPT = nn.Linear(WIDTH, WIDTH)


def decaying(model):
    model.b.weight.register_hook(lambda grad: grad + 0.1 * model.b.weight.detach())


def method(model):
    model.extra = lambda grad: grad
    model.b.weight.register_hook(model.c.forward)


def by_global(model):
    model.b = KEPT
    KEPT.weight.register_hook(lambda grad: grad + KEPT.bias)


def accumulate(model):
    model.b.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))


@pytest.mark.parametrize(
    ("add", "words"),
    [
        (decaying, ["parameter b.weight", "holds a parameter", "gradients that the step returns"]),
        (method, ["parameter b.weight", "holds a parameter"]),
        (by_global, ["parameter b.weight", "holds a parameter"]),
        (accumulate, ["parameter b.weight", "after accumulation", "register_hook"]),
    ],
)
def test_a_hook_that_a_stage_cannot_call_is_refused(add, words):
    model = Tied()
    add(model)
    with pytest.raises(fpipe.CaptureError) as caught:
        build(model, HOWS["1F1B"], "autograd")
    assert all(word in str(caught.value) for word in words)


def test_a_hook_may_hold_constants():
    model, mask = Tied(), torch.rand(WIDTH, WIDTH).round()
    model.b.weight.register_hook(lambda grad: grad * mask * MASK)
    pipe, inputs, targets = build(model, HOWS["1F1B"], "autograd")
    assert fpipe.verify(pipe, model, inputs, targets).eager


def test_a_hook_on_a_gradient_that_is_summed_over_stages_is_refused():
    model = Tied()
    model.a.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(fpipe.CaptureError, match=r"a\.weight.*'sum'"):
        build(model, HOWS["1F1B"], "autograd", tied={"a.weight": "sum"})
