# SPDX-License-Identifier: Apache-2.0
"""A forward that asks about its tensors, or gives them other data, does so as on one device, or is refused by name."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import fpipe
from fpipe.record.trace import checks
from fpipe.record.trace.record import ASKING
from schedules import one_f_one_b
from tests.common.cases import mse
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.options import grouped
from tests.common.running import run, staged
from tests.common.sizes import covering, sampled

HOW = one_f_one_b(ranks=2, microbatches=3)


class Asking(nn.Module):
    """Goes one way if what it asks is so, another if not."""

    def __init__(self, question):
        super().__init__()
        self.question = question
        self.so, self.otherwise = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.so(x) if self.question(self, x) else self.otherwise(x)


def caught(module, x):
    try:
        return bool(x.sum() > 0)
    except Exception:
        return False


def as_array(module, x):
    try:
        return x.detach().numpy().sum() < 100
    except RuntimeError:
        return False


def gathered(module, x):
    try:
        return torch.tensor([0.0, *x.sum(1)]).sum() < 100
    except RuntimeError:
        return False


ANSWERED = {
    "a parameter": lambda m, x: isinstance(m.so.weight, nn.Parameter),
    "all parameters": lambda m, x: all(isinstance(p, nn.Parameter) for p in m.parameters()),
    "no parameter": lambda m, x: not isinstance(x, nn.Parameter),
    "a leaf": lambda m, x: m.so.weight.is_leaf and m.so.weight.grad_fn is None,
    "no leaf": lambda m, x: not x.is_leaf,
    "a node": lambda m, x: x.grad_fn is not None,
    "no view": lambda m, x: not x._is_view(),
    "a gradient of a value": lambda m, x: x.detach().grad is None,
    "moved": lambda m, x: m.to(x.device) is m,
}
REFUSED = {
    "a gradient": (lambda m, x: m.so.weight.grad is None, r"the \.grad of parameter 1\.so\.weight is asked for"),
    "no gradient": (lambda m, x: setattr(m.so.weight, "grad", None), r"the \.grad of parameter .* is assigned to"),
    "an address": (lambda m, x: x.data_ptr() != 0, "asks for the address"),
    "a value, caught": (caught, "got a question about values that depend on"),
    "a list of tensors": (lambda m, x: [x.new_tensor([[x.sum()]])], r"got new_tensor\(\) of a list .*torch\.stack"),
    "a list of tensors, caught": (gathered, r"got tensor\(\) of a list with tensors in it in test_checks"),
    "an array, caught": (as_array, "got a question about values that depend on"),
}


def build(question, cut, backward):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Asking(question), nn.Linear(4, 4))
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    pipe = fpipe.pipeline(
        model, example=(x,), targets=y, loss=mse, schedule=HOW, cuts=[cut], gradients=fpipe.Gradients(backward=backward)
    )
    return pipe, model, x, y


@sampled(2)
@covering(name=[*ANSWERED], cut=["1", "2"], backward=["autograd", "graph"])
def test_questions_about_tensors_are_answered_as_on_one_device(name, cut, backward):
    pipe, model, x, y = build(ANSWERED[name], cut, backward)
    assert_same(run(pipe, model, (x,), y), loop(model, mse, (x,), y, 3))


@sampled(5)
@pytest.mark.parametrize("backward", ["autograd", "graph"])
@pytest.mark.parametrize("name", REFUSED)
def test_questions_that_cannot_be_answered_are_refused(name, backward):
    question, why = REFUSED[name]
    with pytest.raises(fpipe.CaptureError, match=rf"module 1 \(Asking\).*{why}"):
        build(question, "2", backward)


def test_an_exception_that_one_device_raises_too_may_be_caught():
    def mismatched(module, x):
        try:
            return x @ torch.ones(3, 3)
        except RuntimeError:
            return True

    build(mismatched, "2", "autograd")


def test_torch_calls_attributes_by_the_names_that_the_recorder_knows():
    """The recorder knows these calls by the attributes of torch's class."""
    seen = []

    class Seeing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Seeing():
        (x.grad, x.grad_fn, x.is_leaf, x.data_ptr())
        x.grad = None
    assert seen == [checks.GRAD.__get__, *ASKING, torch.Tensor.data_ptr, checks.GRAD.__set__]


class Sparse(nn.Module):
    """Attends to few; what it holds is made at random, and used by `Full`."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(4, 4)

    def forward(self, x):
        return self.query(x).relu()


class Full(Sparse):
    def forward(self, x):
        return self.query(x).tanh()


class Changing(nn.Module):
    """Takes another module for short inputs, for good, with the weights of the first."""

    def __init__(self):
        super().__init__()
        self.inner, self.kind = Sparse(), "sparse"

    def forward(self, x):
        if self.kind == "sparse" and x.shape[1] < 8:
            full = Full()
            full.query = self.inner.query
            self.inner, self.kind = full, "full"
        return self.inner(x)


@sampled(2)
@pytest.mark.parametrize("cut", ["1.inner", "2"])
@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_a_module_that_the_first_call_replaces_keeps_its_weights(cut, backward):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Changing(), nn.Linear(4, 4)), torch.randn(4, 4)
    options = {"schedule": one_f_one_b(ranks=2, microbatches=2), "cuts": [cut], "backward": backward}
    pipe = fpipe.pipeline(model, example=(x,), loss=lambda out: out.square().mean(), **grouped(options))
    for _ in range(2):  # the first leaves the model as it was built
        fpipe.verify(pipe, model, (x,))
    assert model[1].kind == "sparse"


class Turning(nn.Module):
    """Uses weights of its own at its first call, and those of a child from then on."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias, self.child, self.turned = *nn.Linear(4, 4).parameters(), nn.Linear(4, 4), False

    def forward(self, x):
        turned, self.turned = self.turned, True
        return self.child(x) if turned else nn.functional.linear(x, self.weight, self.bias)


def test_a_module_whose_later_calls_use_other_weights_is_refused():
    model, x = nn.Sequential(nn.Linear(4, 4), Turning()), torch.randn(6, 4)
    with pytest.raises(fpipe.CaptureError, match="behaves differently when it is called again"):
        fpipe.pipeline(model, example=(x,), loss=torch.sum, schedule=HOW, cuts=["1"])


class Layer(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change, self.weight = change, nn.Parameter(torch.randn(4, 4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        self.change(self, x)
        return functional.linear(x, self.weight) * self.scale


def renormalized(layer, x):
    layer.weight.data = torch.renorm(layer.weight.data, 2, 0, 0.5)


def renormalized_anew(layer, x):
    layer._parameters["weight"] = nn.Parameter(torch.renorm(layer.weight.detach(), 2, 0, 0.5))


def set_to_another(layer, x):
    with torch.no_grad():
        layer.weight.set_(torch.renorm(layer.weight, 2, 0, 0.5))


def averaged(layer, x):
    layer.scale.data = 0.9 * layer.scale + x.detach().mean(0)


def averaged_anew(layer, x):
    layer._buffers["scale"] = 0.9 * layer.scale + x.detach().mean(0)


CHANGES = {renormalized: "weight", renormalized_anew: "weight", set_to_another: "weight"}
CHANGES |= {averaged: "scale", averaged_anew: "scale"}


def build_layer(change, backward, layer=Layer, **more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), layer(change), nn.Linear(4, 4))
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    return staged(model, (x,), y, backward=backward, **more), model, (x,), y


@sampled(7)
@pytest.mark.parametrize("backward", ["autograd", "graph"])
@pytest.mark.parametrize("more", [{"cuts": ["1"]}, {"cuts": ["2"], "unsplittable": ["1"]}], ids=["cut", "whole"])
@pytest.mark.parametrize("change", CHANGES)
def test_replacing_a_parameter_or_its_data_is_refused(change, more, backward):
    with pytest.raises(fpipe.CaptureError, match=rf"(parameter|buffer) 1\.{CHANGES[change]}: got a forward that repl"):
        build_layer(change, backward, **more)


class Rounded(Layer):
    """The weight is rounded for the time of the product, as in training for quantization."""

    def forward(self, x):
        kept, self.weight.data = self.weight.data, self.weight.data.round()
        y = functional.linear(x, self.weight)
        self.weight.data = kept
        return y


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_data_that_is_restored_is_allowed(backward):
    built = build_layer(None, backward, Rounded, cuts=["2"])
    assert_same(run(*built), loop(built[1], mse, *built[2:], 2))
