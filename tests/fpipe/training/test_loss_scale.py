# SPDX-License-Identifier: Apache-2.0
"""A loss scale goes the way of torch's scaler on one device."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.tensors.tree import same_bits

SCALES = st.floats(2.0**-10, 2.0**20, width=32)


@given(SCALES, st.floats(1.1, 4.0), st.floats(0.1, 0.9), st.integers(1, 3), st.lists(st.booleans(), max_size=12))
def test_scales_and_gradients_are_those_of_torch(scale, growth, backoff, interval, overflows):
    """After any history of good and bad steps; gradients are unscaled with the same rounding."""
    p = torch.zeros(3, requires_grad=True)
    sgd = torch.optim.SGD([p])
    scaler = torch.amp.GradScaler("cpu", scale, growth, backoff, interval)
    mine = fpipe.LossScale(scale, growth, backoff, interval)
    for k, overflow in enumerate(overflows):
        grad = torch.randn(3, generator=torch.Generator().manual_seed(k))
        scaled = grad * mine.scale
        scaled[1] = math.inf if overflow else scaled[1]
        p.grad = scaled.clone()
        scaler.scale(torch.zeros(()))  # makes the scale a tensor
        scaler.unscale_(sgd)
        if not overflow:
            assert same_bits(mine.unscale({"p": scaled})["p"], p.grad)
        scaler.step(sgd)
        scaler.update()
        mine = mine.next(torch.tensor(not overflow))
        assert (mine.scale, mine.good) == (scaler.get_scale(), scaler._get_growth_tracker())


def test_a_scale_stays_finite():
    mine = fpipe.LossScale(2.0**127, interval=1)
    assert mine.next(True).scale == 2.0**127


def test_gradients_are_unscaled_in_place_if_donated():
    grads = {"w": torch.full((2,), 8.0)}
    kept = fpipe.LossScale(4.0).unscale(grads)
    assert (kept["w"].tolist(), grads["w"].tolist()) == ([2, 2], [8, 8])
    assert fpipe.LossScale(4.0).unscale(grads, donate=True)["w"] is grads["w"]
    assert same_bits(grads["w"], kept["w"])
