# SPDX-License-Identifier: Apache-2.0
"""Estimates count the operations and bytes of what a stage computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import fpipe
from fpipe import InputError, Roofline
from fpipe.planning.ranges import TIMED
from fpipe.planning.roofline import calibrate

COMPUTE, MEMORY, LAUNCH = Roofline(1.0, 1e30), Roofline(1e30, 1.0), Roofline(1e30, 1e30, 1.0)
ROWS, WIDTH = 4, 8


def estimate(device, *layers):
    x = torch.ones(2 * ROWS, WIDTH)
    return fpipe.profile(
        nn.Sequential(*layers),
        (x,),
        loss=torch.mean,
        microbatches=2,
        device=device,
        gradients=fpipe.Gradients(backward="graph"),
    )


def test_arithmetic_of_a_linear_layer():
    """The first layer needs no gradient of its input."""
    profile = estimate(COMPUTE, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    product = 2 * ROWS * WIDTH * WIDTH
    (first, second) = profile.times
    assert (product, product, 0, product, product) == (first.F, first.B, first.I, first.W, first.C)
    assert (product, 2 * product, product, product) == (second.F, second.B, second.I, second.W)


def test_traffic_is_that_of_arguments_and_results():
    profile = estimate(MEMORY, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Tanh())
    unit = 4 * ROWS * WIDTH
    assert 2 * unit == profile.times[1].F
    assert profile.times[1].B == profile.times[1].I == 3 * unit
    assert profile.times[1].W == 0


def test_views_are_free_and_operators_are_launched():
    profile = estimate(LAUNCH, nn.Linear(WIDTH, WIDTH), nn.Unflatten(1, (2, -1)), nn.Flatten(), nn.Tanh())
    assert [times.F for times in profile.times[1:3]] == [0, 0]


class Attention(nn.Module):
    def forward(self, x):
        q = x.unflatten(-1, (2, -1))[None].transpose(1, 2)
        return functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)[0]


def test_fused_attention_has_arithmetic():
    profile = estimate(COMPUTE, nn.Linear(WIDTH, WIDTH), Attention())
    assert profile.times[1].F == 2 * 2 * ROWS * ROWS * WIDTH
    assert profile.times[1].I > profile.times[1].F


def test_equal_layers_cost_the_same_wherever_they_are():
    layers = [nn.Linear(WIDTH, WIDTH), *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]]
    profile = estimate(Roofline(1e9, 1e9, 1e-6), *layers)
    assert len({profile.times[k] for k in (1, 3, 5)}) == 1


def test_both_halves_cost_what_the_whole_does():
    profile = estimate(COMPUTE, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    assert all(times.I + times.W == times.B for times in profile.times)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((0, 1), "flops=0, expected a finite number above 0"),
        ((1, -1), "bandwidth=-1"),
        ((1, float("inf")), "bandwidth=inf"),
        ((1, 1, float("nan")), "overhead=nan, expected a finite number at least 0"),
        (("1", 1), "flops='1'"),
    ],
)
def test_peaks_are_checked(numbers, words):
    with pytest.raises(InputError) as caught:
        Roofline(*numbers)
    assert words in str(caught.value)


def test_peaks_can_be_measured():
    found = calibrate(torch.device("cpu"), torch.float32)
    assert min(found.flops, found.bandwidth, found.overhead) > 0
    assert len(TIMED) == 5
