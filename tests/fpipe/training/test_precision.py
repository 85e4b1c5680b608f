# SPDX-License-Identifier: Apache-2.0
"""A loss scale goes the way of torch's scaler on one device, and masters that of a plain loop with masters."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

import fpipe
from fpipe.tensors.tree import same_bits
from tests.common.generators import seeded

SCALES = st.floats(2.0**-10, 2.0**20, width=32)


@given(SCALES, st.floats(1.1, 4.0), st.floats(0.1, 0.9), st.integers(1, 3), st.lists(st.booleans(), max_size=12))
def test_scales_and_gradients_are_those_of_torch(scale, growth, backoff, interval, overflows):
    """After any history of good and bad steps; gradients are unscaled with the same rounding."""
    p = torch.zeros(3, requires_grad=True)
    sgd = torch.optim.SGD([p])
    scaler = torch.amp.GradScaler("cpu", scale, growth, backoff, interval)
    mine = fpipe.LossScale(scale, growth, backoff, interval)
    for k, overflow in enumerate(overflows):
        grad = torch.randn(3, generator=seeded(k))
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


KINDS = {"low.weight": torch.bfloat16, "low.bias": torch.float16, "high": torch.float32, "frozen": torch.bfloat16}


def start():
    generator = seeded(0)
    params = {name: torch.randn(4, 3, generator=generator).to(kind) for name, kind in KINDS.items()}
    return {name: p.requires_grad_(name != "frozen") for name, p in params.items()}


def gradients(step):
    generator = seeded(step + 1)
    grads = {name: torch.randn(4, 3, generator=generator).to(kind) for name, kind in KINDS.items() if name != "frozen"}
    if step == 2:
        del grads["low.bias"]
    return grads


def with_masters_alone(cls, group, **options):
    """Parameters, and masters and moments by name, after a plain loop over masters."""
    params = start()
    copies = {name: nn.Parameter(p.detach().float()) for name, p in params.items()}
    rest = [p for name, p in copies.items() if name != "low.bias"]
    instance = cls([{"params": rest}, {"params": [copies["low.bias"]], **group}], **options)
    for step in range(20):
        for name, p in copies.items():
            grad = gradients(step).get(name)
            p.grad = None if grad is None else grad.float()
        instance.step()
        for name, p in params.items():
            if name in gradients(step):
                p.data.copy_(copies[name].data)
    return params, copies, {name: instance.state.get(p, {}) for name, p in copies.items()}


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
def test_masters_are_those_of_a_plain_loop(donate):
    group = {"weight_decay": 0.0}
    init, update = fpipe.masters(fpipe.optimizer(optim.AdamW, groups={"*.bias": group}, donate=donate, lr=1e-3))
    params = start()
    state = init(params)
    for step in range(20):
        given = params
        before = {name: p.detach().clone() for name, p in given.items()}
        params, state = update(gradients(step), state, params)
        assert all((params[name] is given[name]) is (donate or name not in gradients(step)) for name in params)
        assert donate or all(same_bits(given[name].detach(), before[name]) for name in given)
    wanted, copies, moments = with_masters_alone(optim.AdamW, group, lr=1e-3)
    for name, p in wanted.items():
        assert same_bits(params[name].detach(), p.detach())
        assert params[name].requires_grad is (name != "frozen")
        if KINDS[name] is not torch.float32:
            assert same_bits(state[name].pop("master"), copies[name].detach())
        assert state[name].keys() == moments[name].keys()
        assert all(same_bits(state[name][slot], value) for slot, value in moments[name].items())


def test_gradients_may_have_the_dtype_of_the_masters():
    init, update = fpipe.masters(fpipe.optimizer(optim.SGD, lr=0.5))
    params = {"w": torch.ones(2, dtype=torch.bfloat16)}
    after, _ = update({"w": torch.full((2,), 0.25)}, init(params), params)
    assert after["w"].tolist() == [0.875, 0.875]


def test_state_without_masters_is_refused():
    inner = fpipe.optimizer(optim.SGD)
    _, update = fpipe.masters(inner)
    params = {"w": torch.ones(2, dtype=torch.bfloat16)}
    with pytest.raises(fpipe.InputError, match=r"state\['w'\]\['master'\]: got none, expected a tensor of shape \[2\]"):
        update({}, inner.init(params), params)
    with pytest.raises(fpipe.InputError, match=r"got one of shape \[3\]"):
        update({}, {"w": {"master": torch.ones(3)}}, params)
    with pytest.raises(fpipe.InputError, match="dtype: got torch"):
        fpipe.masters(inner, torch.int8)
