# SPDX-License-Identifier: Apache-2.0
"""Layers that sleep are split, profiled and cut like any others."""

from __future__ import annotations

import torch

import fpipe
from benchmarks.common.sleeping import WIDTH, Times, sleeping_model, weights_may_rest
from schedules import zb_h1

LAYERS = [Times(0.0, 0.0, weight) for weight in (0.0, 0.0, 1e-4, 0.0, 0.0)]


def square(outputs):
    return (outputs**2).mean()


def test_weight_halves_sleep_by_themselves_and_layers_that_last_as_long_are_alike():
    model, x = sleeping_model(LAYERS), torch.ones(4, WIDTH)
    with weights_may_rest():
        pipe = fpipe.pipeline(model, example=(x,), loss=square, schedule=zb_h1(2, 4), cuts=["1"])
        assert "undeferred" not in str(pipe)
        assert fpipe.verify(pipe, model, (x,))
        profile = fpipe.profile(model, (x,), loss=square, microbatches=4, device=fpipe.Roofline(1e12, 1e12))
    _, first, second, third, _ = (block.digest for block in profile.blocks)
    assert first == third != second
