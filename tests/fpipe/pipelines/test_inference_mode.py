# SPDX-License-Identifier: Apache-2.0
"""In inference mode a step with gradients is refused; evaluation, and what is built there, are as anywhere else."""

import pytest
import torch
from torch import nn

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b
from tests.common.cases import mse
from tests.common.loops import loop

HOW = one_f_one_b(ranks=2, microbatches=2)


def parts():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), torch.randn(4, 4), torch.randn(4, 4)


def build(model, x, y, backward):
    return fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=HOW, cuts=["2"], backward=backward)


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_steps_with_gradients_are_refused_in_inference_mode(backward):
    model, x, y = parts()
    pipe = build(model, x, y, backward)
    state = pipe.init(model)
    for function in (fpipe.value_and_grad(pipe), fpipe.reference(pipe)):
        with torch.inference_mode(), pytest.raises(fpipe.InputError, match=r"got torch\.inference_mode around it"):
            function(*state, (x,), y)
    with torch.inference_mode(), pytest.raises(fpipe.InputError, match=r"got torch\.inference_mode around it"):
        fpipe.verify(pipe, model, (x,), y)
    got, grads = fpipe.value_and_grad(pipe)(*state, (x,), y)
    assert same_bits(got.loss, loop(model, mse, (x,), y, 2).loss)
    assert len(grads) == 4


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_evaluating_and_building_work_in_inference_mode(backward):
    model, x, y = parts()
    with torch.inference_mode():
        pipe = build(model, x, y, backward)
        state = pipe.init(model)
        inside = fpipe.evaluate(pipe)(*state, (x,), y)
    outside = fpipe.evaluate(pipe)(*pipe.init(model), (x,), y)
    assert same_bits(inside.loss, outside.loss)
    assert same_bits(inside.outputs, outside.outputs)
    _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), y)
    want = loop(model, mse, (x,), y, 2).grads
    assert grads.keys() == want.keys()
    assert all(same_bits(grads[name], want[name]) for name in want)
