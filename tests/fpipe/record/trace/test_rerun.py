# SPDX-License-Identifier: Apache-2.0
"""Normalization in a checkpoint counts a microbatch twice, as on one device, where the backward runs it again."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b, recompute, zb_v
from tests.common.cases import mse
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.running import run, run_reference
from tests.common.sizes import covering

HOWS = {
    "1F1B": one_f_one_b(ranks=2, microbatches=3),
    "recomputed": recompute(one_f_one_b(ranks=2, microbatches=3)),
    "ZB-V": zb_v(ranks=1, microbatches=3),
}


class Dense(nn.Module):
    """A layer of DenseNet as it saves memory: what it concatenates and normalizes is computed again."""

    def __init__(self, features, reentrant=False):
        super().__init__()
        self.norm, self.inner, self.reentrant = nn.BatchNorm1d(features), nn.Linear(features, 4), reentrant

    def forward(self, *features):
        def bottleneck(*features):
            return self.inner(torch.relu(self.norm(torch.cat(features, 1))))

        return checkpoint(bottleneck, *features, use_reentrant=self.reentrant)


class Block(nn.Module):
    def __init__(self, reentrant=False):
        super().__init__()
        self.layers = nn.ModuleList(Dense(4 * (k + 1), reentrant) for k in range(2))

    def forward(self, x):
        features = [x]
        for layer in self.layers:
            features.append(layer(*features))
        return features[-1]


def build(block, how, cut, backward):
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(4, 4), block, nn.Linear(4, 4)), torch.randn(9, 4), torch.randn(9, 4)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=how, cuts=[cut], backward=backward)
    return pipe, model, x, y


def require_as_loop(built):
    """Return the buffers of a plain loop on one device; raise unless a step of the pipeline equals it."""
    pipe, model, x, y = built
    want = loop(model, mse, (x,), y, 3)
    assert_same(run(pipe, model, (x,), y), want)
    return want.buffers


@covering(reentrant={"": False, "reentrant": True}, cut=["1.layers.1", "2"], how=HOWS, backward=["autograd", "graph"])
def test_running_statistics_in_a_checkpoint_are_those_of_one_device(reentrant, cut, how, backward):
    assert require_as_loop(build(Block(reentrant), how, cut, backward))["1.layers.0.norm.num_batches_tracked"] == 6


class Dropping(nn.Module):
    """What is normalized is random; the running mean is that of the last microbatch."""

    def __init__(self, checkpointed):
        super().__init__()
        self.norm, self.drop, self.checkpointed = nn.BatchNorm1d(4, momentum=1.0), nn.Dropout(0.5), checkpointed

    def forward(self, x):
        def normalized(x):
            return self.norm(self.drop(x))

        return checkpoint(normalized, x, use_reentrant=False) if self.checkpointed else normalized(x)


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_running_again_draws_the_same_numbers(backward):
    means = []
    for checkpointed, count in ((True, 6), (False, 3)):
        pipe, model, x, y = build(Dropping(checkpointed), HOWS["1F1B"], "2", backward)
        got = run(pipe, model, (x,), y, seed=1)
        assert_same(got, run_reference(pipe, model, (x,), y, seed=1))
        assert got.buffers["1.norm.num_batches_tracked"] == count
        means.append(got.buffers["1.norm.running_mean"])
    assert same_bits(*means)


def test_a_frozen_checkpoint_updates_statistics_once():
    """Nothing is saved, so nothing is computed again."""
    block = Block().requires_grad_(False)
    buffers = require_as_loop(build(nn.Sequential(Detached(), block), HOWS["1F1B"], "2", "autograd"))
    assert buffers["1.1.layers.0.norm.num_batches_tracked"] == 3


class Detached(nn.Module):
    def forward(self, x):
        return x.detach()


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Dense(4)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def test_a_checkpoint_in_a_checkpoint_is_refused():
    with pytest.raises(fpipe.CaptureError, match="a checkpoint in a checkpoint, with a function that changes a buffer"):
        build(Nested(), HOWS["1F1B"], "2", "autograd")


class Averaging(nn.Module):
    """Subtracts a running mean, which it changes before, in or after its checkpoint."""

    def __init__(self, when):
        super().__init__()
        self.inner, self.when = nn.Linear(4, 4), when
        self.register_buffer("mean", torch.zeros(4))

    def average(self, when, x):
        if when == self.when:
            self.mean.mul_(0.5).add_(x.detach().mean(0))

    def forward(self, x):
        def centered(x):
            self.average("in", x)
            return (self.inner(x) - self.mean).sin() * x

        self.average("before", x)
        y = checkpoint(centered, x, use_reentrant=False)
        self.average("after", x)
        return y


@covering(when=["before", "after"], how=HOWS, backward=["autograd", "graph"])
def test_running_again_finds_buffers_as_the_forward_left_them(when, how, backward):
    require_as_loop(build(Averaging(when), how, "2", backward))


def test_a_checkpoint_that_reads_a_buffer_it_changes_is_refused():
    with pytest.raises(fpipe.CaptureError, match=r"module 1, sub: got a checkpointed function that reads a buffer"):
        build(Averaging("in"), HOWS["1F1B"], "2", "autograd")


class Shared(nn.Module):
    """Normalizes twice with one module, of which the first is in a checkpoint."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        x = checkpoint(lambda x: self.norm(self.inner(x)), x, use_reentrant=False)
        return self.norm(x * 2)


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_running_again_comes_after_the_whole_forward(backward):
    assert require_as_loop(build(Shared(), HOWS["1F1B"], "2", backward))["1.norm.num_batches_tracked"] == 9
