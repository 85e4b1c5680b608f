# SPDX-License-Identifier: Apache-2.0
"""A forward that replaces a parameter or buffer, or gives it other data, is refused by the name of the leaf."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b
from tests.common.cases import mse
from tests.common.loops import loop

HOW = one_f_one_b(ranks=2, microbatches=2)


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


def built(change, backward, layer=Layer, **more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), layer(change), nn.Linear(4, 4))
    example = torch.randn(4, 4), torch.randn(4, 4)
    pipe = fpipe.pipeline(
        model, example=example[:1], targets=example[1], loss=mse, schedule=HOW, backward=backward, **more
    )
    return pipe, model, *example


@pytest.mark.parametrize("backward", ["autograd", "graph"])
@pytest.mark.parametrize("more", [{"cuts": ["1"]}, {"cuts": ["2"], "unsplittable": ["1"]}], ids=["cut", "whole"])
@pytest.mark.parametrize("change", CHANGES)
def test_replacing_a_parameter_or_its_data_is_refused(change, more, backward):
    with pytest.raises(fpipe.CaptureError, match=rf"(parameter|buffer) 1\.{CHANGES[change]}: got a forward that repl"):
        built(change, backward, **more)


class Rounded(Layer):
    """The weight is rounded for the time of the product, as in training for quantization."""

    def forward(self, x):
        kept, self.weight.data = self.weight.data, self.weight.data.round()
        y = functional.linear(x, self.weight)
        self.weight.data = kept
        return y


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_data_that_is_restored_is_allowed(backward):
    pipe, model, x, y = built(None, backward, Rounded, cuts=["2"])
    got, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), y)
    want = loop(model, mse, (x,), y, 2)
    assert same_bits(got.loss, want.loss)
    assert all(same_bits(grads[name], want.grads[name]) for name in want.grads)
