# SPDX-License-Identifier: Apache-2.0
"""Recomputation: a forward that keeps its inputs only and is run again before its backward changes no bit."""

import weakref
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fpipe
from fpipe.pipelines.inputs import scatter
from fpipe.record.variant import TRAINING
from fpipe.tensors.tree import same_bits
from schedules import chimera, dualpipe_v, gpipe, one_f_one_b, overlap, recompute, split_backward
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.running import require_exact
from tests.common.sizes import by_day, few, sampled
from tests.common.zoo import ZOO, captured_by

SEED = 5


@sampled(2)
@pytest.mark.filterwarnings("ignore:The tensor attributes self.*_flat_weights")
@pytest.mark.parametrize(("name", "capture"), by_day(captured_by("trace", "export", "modules"), 8))
def test_every_model_of_the_zoo_is_exact_when_recomputed(name, capture):
    require_exact(ZOO[name], recompute(one_f_one_b(ranks=4, microbatches=3)), capture=capture)


@settings(max_examples=few(8))
@given(
    name=st.sampled_from(["chained", "tied_sequence", "normalised", "dropping", "in_place", "frozen_below"]),
    made=st.sampled_from([gpipe, one_f_one_b, lambda **sizes: split_backward(one_f_one_b(**sizes)), chimera]),
    microbatches=st.integers(2, 5),
    stages=st.sets(st.integers(0, 3)).map(lambda found: tuple(sorted(found))),
)
def test_any_stages_of_any_schedule_may_be_recomputed(name, made, microbatches, stages):
    how = made(ranks=4, microbatches=microbatches)
    if name == "normalised" and how.placement.mirrors:
        name = "mlp"  # what keeps state has no replicas
    require_exact(ZOO[name], recompute(how, stages))


def test_a_recomputation_does_not_update_buffers_again():
    got = require_exact(ZOO["normalised"], recompute(one_f_one_b(ranks=4, microbatches=3)))
    assert got.buffers["1.num_batches_tracked"] == 3


@sampled(1)
@pytest.mark.parametrize("name", ["skips", "dropping", "tied_sequence"])
def test_recomputed_stages_in_fused_pairs_are_exact(name):
    require_exact(ZOO[name], dualpipe_v(ranks=2, microbatches=5))
    require_exact(ZOO[name], overlap(one_f_one_b(ranks=4, microbatches=4)))


class Turned(nn.Module):
    """A product whose kernel is another one, with other bits, where its second factor requires no gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 16))

    def forward(self, x):
        wide = x[:, None, :] * torch.linspace(-1, 1, 64)[:, None]
        return wide.transpose(1, 2) @ (self.weight * 1.5)


def test_the_first_forward_has_the_bits_of_the_second():
    x, turned = torch.randn(4, 3), Turned()
    with torch.no_grad():
        without = turned(x)
    if same_bits(without, turned(x)):
        pytest.skip("this processor has the same kernel for both")
    model = nn.Sequential(nn.Linear(WIDTH, 3), Turned(), nn.Linear(16, WIDTH))
    case = Case(lambda: model, rows_of(), lambda out, wanted: mse(out.sum(1), wanted), ("1", "2", "2"))
    for how in (one_f_one_b(ranks=2, microbatches=2), recompute(one_f_one_b(ranks=2, microbatches=2))):
        require_exact(case, how, rows=8, cuts=("1",))


class Noted(torch.autograd.Function):
    """The hyperbolic tangent; notes what it returns."""

    made: ClassVar = []

    @staticmethod
    def forward(ctx, x):
        out = torch.tanh(x)
        Noted.made.append(weakref.ref(out))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return grad * (1 - out * out)


def test_the_first_forward_keeps_nothing():
    made = Noted.made
    x, y = torch.randn(2, 4, WIDTH)
    layers = [nn.Linear(WIDTH, WIDTH), Noted.apply, nn.Linear(WIDTH, WIDTH), Noted.apply, nn.Linear(WIDTH, WIDTH)]
    one = one_f_one_b(ranks=1, microbatches=1)
    pipe = fpipe.pipeline(
        layers,
        example=(x,),
        targets=y,
        loss=mse,
        schedule=one,
        recording=fpipe.Recording(front_end="modules"),
        gradients=fpipe.Gradients(backward="autograd"),
    )
    inputs = scatter(pipe.training, *pipe.init(layers), pipe.batch(TRAINING, (x,), y), None)
    stage, given = pipe.stages[0], (inputs.params[0][0], inputs.buffers[0][0], inputs.batch(0, 0), inputs.keys[0])
    made.clear()
    outputs, buffers, residuals = stage.forward(*given)
    assert [found() is None for found in made] == [False, False], "what the backward needs"
    del residuals
    again, same = stage.evaluate(*given)
    assert [found() is None for found in made] == [True] * 4
    assert all(map(same_bits, again, outputs))
    assert all(map(same_bits, same, buffers))
