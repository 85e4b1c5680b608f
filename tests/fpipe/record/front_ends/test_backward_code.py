# SPDX-License-Identifier: Apache-2.0
"""Python code of the backward is code of the model: hooks, and `backward` of custom autograd functions."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fpipe
from schedules import one_f_one_b, zb_h1
from tests.common.backward_code import Inward
from tests.common.running import staged
from tests.common.sizes import covering, sampled

HOWS = {"1F1B": one_f_one_b(ranks=2, microbatches=2), "ZB-H1": zb_h1(ranks=2, microbatches=2)}


class Tripled(torch.autograd.Function):
    """Returns a sine, with a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


tripled = Tripled.apply


class Noting(torch.autograd.Function):
    """Notes the largest gradient in a buffer."""

    @staticmethod
    def forward(ctx, x, most):
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.most.copy_(torch.maximum(ctx.most, grad.abs().amax()))
        return grad, None


class Layer(nn.Module):
    """A linear layer, and what `around` makes of it."""

    def __init__(self, around):
        super().__init__()
        self.inner, self.around = nn.Linear(4, 4), around
        self.register_buffer("most", torch.zeros(()))
        self.size = torch.ones(())

    def forward(self, x):
        return self.around(self, x)


def hooked(hook):
    def around(layer, x):
        y = layer.inner(x)
        if y.requires_grad:
            y.register_hook(lambda grad: hook(layer, grad))
        return y

    return around


def with_module_hook(hook):
    layer = Layer(lambda layer, x: layer.inner(x))
    layer.register_full_backward_hook(hook)
    return layer


def keeping_size(layer, x):
    layer.size = x.detach().norm()
    return layer.inner(x)


def reading_size():
    layer = Layer(keeping_size)
    layer.register_full_backward_hook(lambda module, grads, outs: (grads[0] * module.size,))
    return layer


EXACT = {
    "a module run again": lambda: Layer(lambda m, x: Inward.apply(x, m.inner, *m.inner.parameters())),
    "a function kept under another name": lambda: Layer(lambda m, x: tripled(m.inner(x))),
    "a tensor hook that reads a weight": lambda: Layer(hooked(lambda m, grad: grad * m.inner.weight.detach().norm())),
    "a module hook that reads a weight": lambda: with_module_hook(lambda m, i, o: (i[0] * m.inner.weight.norm(),)),
    "a hook that looks at a number": lambda: with_module_hook(lambda m, i, o: float(o[0].norm()) and None),
}


def build(make, how="1F1B", backward="autograd"):
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 4)), torch.randn(4, 4), torch.randn(4, 4)
    return staged(model, (x,), y, schedule=HOWS.get(how, how), backward=backward), model, x, y


@sampled(2)
@covering(what=EXACT, how=HOWS, backward=["autograd", "graph"])
def test_code_of_the_backward_is_exact(what, how, backward):
    pipe, model, x, y = build(what, how, backward)
    assert fpipe.verify(pipe, model, (x,), y).eager


REFUSED = {
    "a function that writes a buffer": (
        lambda: Layer(lambda m, x: Noting.apply(m.inner(x), m.most)),
        "writes to 1.most",
    ),
    "a hook that writes a buffer": (
        lambda: with_module_hook(lambda m, i, o: m.most.copy_(o[0].amax()) and None),
        r"line \d+: .*uses a parameter or buffer which no forward of its module reads",
    ),
    "an attribute of the forward": (reading_size, "module 1: got .* runs in the backward and reads 'size'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_code_of_the_backward_that_would_differ_is_refused(what):
    make, message = REFUSED[what]
    with pytest.raises(fpipe.CaptureError, match=message):
        build(make)


def test_a_backward_inside_the_loss_is_refused():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), torch.randn(4, 4)

    def loss(outputs):
        value = outputs.square().mean()
        value.backward(retain_graph=True)
        return value

    with pytest.raises(fpipe.CaptureError, match=r"a backward inside .* accumulates the gradient of 0\.weight"):
        staged(model, (x,), loss=loss)


class Looping(nn.Module):
    """Checkpoints a function that closes over the variable of a loop, or binds it."""

    def __init__(self, bound):
        super().__init__()
        self.layers, self.bound = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), bound

    def forward(self, x):
        for layer in self.layers:
            bound, late = (lambda x, layer=layer: layer(x).sin()), (lambda x: layer(x).sin())  # noqa: B023
            x = checkpoint(bound if self.bound else late, x, use_reentrant=False)
        return x


def test_a_checkpointed_function_that_finds_another_variable_in_the_backward_is_refused():
    pipe, model, x, y = build(lambda: Looping(bound=True))
    assert fpipe.verify(pipe, model, (x,), y).eager
    with pytest.raises(fpipe.CaptureError, match=r"module 1: .* closes over 'layer', which changes after the call"):
        build(lambda: Looping(bound=False))
