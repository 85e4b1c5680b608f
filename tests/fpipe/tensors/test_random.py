# SPDX-License-Identifier: Apache-2.0
"""What a random operation draws depends on its key alone, and the user's generator stays where it was."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fpipe
from fpipe import InputError
from fpipe.tensors.random import generator, key, label, preserve_generators, reseed
from schedules import one_f_one_b
from tests.common.options import grouped

CPU = torch.device("cpu")


@given(st.integers(0, 2**63), st.integers(0, 10**6), st.text(max_size=20), st.integers(0, 99))
def test_keys_and_labels_fit_a_generator(seed, microbatch, path, ordinal):
    for value in (key(seed, microbatch), label(path, ordinal), key(seed, microbatch) ^ label(path, ordinal)):
        assert 0 <= value < 2**63
    with preserve_generators([CPU]):
        reseed(key(seed, microbatch), label(path, ordinal), CPU)


def test_different_keys_draw_different_numbers():
    keys = {key(seed, i) for seed in range(50) for i in range(50)}
    labels = {label(path, k) for path in ("", "a", "a.b", "a@1", "1", "11") for k in range(50)}
    assert len(keys) == 2500
    assert len(labels) == 300
    assert len({a ^ b for a in keys for b in labels}) == 2500 * 300


def test_the_same_key_draws_the_same_numbers():
    with preserve_generators([CPU]):
        reseed(1, 2, CPU)
        first = torch.rand(5)
        torch.rand(7)
        reseed(1, 2, CPU)
        assert torch.equal(torch.rand(5), first)
        reseed(1, 3, CPU)
        assert not torch.equal(torch.rand(5), first)


def test_the_user_s_generator_is_restored_even_after_an_error():
    before = torch.get_rng_state()

    def draw():
        with preserve_generators([CPU]):
            reseed(1, 2, CPU)
            torch.rand(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        draw()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_device_without_a_generator_is_refused():
    with pytest.raises(InputError, match="got a random operation on device meta, expected cpu or cuda"):
        generator(torch.device("meta"))


class Rounded(torch.autograd.Function):
    """Adds noise to the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + torch.randn_like(grad)


class Rounding(nn.Module):
    def forward(self, x):
        return Rounded.apply(x)


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_a_backward_that_draws_is_refused(backward):
    model, x = nn.Sequential(nn.Linear(2, 2), Rounding(), nn.Linear(2, 2)), torch.randn(4, 2)
    options = {"schedule": one_f_one_b(ranks=2, microbatches=2), "cuts": ["2"], "backward": backward}
    with pytest.raises(fpipe.CaptureError, match=r"stage 0: got a backward that draws random numbers"):
        fpipe.pipeline(model, example=(x,), loss=torch.sum, **grouped(options))
