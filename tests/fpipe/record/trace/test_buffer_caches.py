# SPDX-License-Identifier: Apache-2.0
"""Caches in buffers grow as on one device: a forward replaces one that is too short."""

import pytest
from torch import nn

import fpipe
from fpipe.tensors.tree import same_bits
from tests.common.reassigned_buffers import (
    CACHES,
    HOWS,
    NAMES,
    WIDTH,
    Block,
    assert_as_one_device,
    build,
    table,
)
from tests.common.running import run
from tests.common.sizes import covering


@covering(cache=CACHES, backward=["autograd", "graph"])
def test_a_cache_in_a_buffer_may_grow(cache, backward):
    """In a module that runs as a whole and in one that is cut, for every size; a step returns it as it was passed."""
    model = nn.Sequential(Block(before=cache), Block(before=cache))
    pipe, x, y = build(model, HOWS["1F1B"], ["1.inner"], backward)
    assert_as_one_device(pipe, model, x, y)
    assert_as_one_device(pipe, model, x.repeat(2, 1), y.repeat(2, 1))
    assert_as_one_device(pipe, model, x, y)
    assert run(pipe, model, (x,), y).buffers["0.table"].shape == (2, 2)


def test_a_cache_computed_from_constants_is_made_once():
    made = []

    def counting(block, x):
        if len(block.table) < len(x):
            made.append(len(x))
            block.table = table(len(x))
        return x + block.table[: len(x), :1]

    model = nn.Sequential(Block(before=counting), nn.Linear(WIDTH, WIDTH))
    pipe, x, y = build(model, HOWS["1F1B"], ["1"])
    made.clear()
    run(pipe, model, (x,), y)
    assert not made


@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_that_the_user_fills_is_no_change_of_the_model(cache):
    model = nn.Sequential(Block(before=cache), Block(before=cache))
    pipe, x, y = build(model, HOWS["1F1B"], ["1"])
    params, buffers = pipe.init(model)
    want = fpipe.value_and_grad(pipe)(params, buffers, (x,), y)[0].loss
    model(x)
    assert [len(buffer) for name, buffer in model[0].named_buffers() if name in NAMES and len(buffer) > 2] == [9]
    assert same_bits(fpipe.value_and_grad(pipe)(params, buffers, (x,), y)[0].loss, want)
