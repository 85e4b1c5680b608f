# SPDX-License-Identifier: Apache-2.0
"""Models with Python in their backward, drawn at random, equal a plain loop, or are refused by name."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import mse_loss

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b, zb_h1
from tests.common.backward_code import WIDTH, Drawn, models
from tests.common.options import grouped
from tests.common.sizes import few

HOWS = {
    "one rank": one_f_one_b(ranks=1, microbatches=2),
    "two ranks": one_f_one_b(ranks=2, microbatches=3),
    "split": zb_h1(ranks=2, microbatches=3),
}
STEPS = 2
NAMED = re.compile(r"module \d|parameter \d|stage \d.* (in backward_code.py, line|writes to) |cuts: got '\d'")


def train_plainly(drawn: Drawn, x, y, microbatches):
    """The losses, gradients and buffers of steps without updates in a plain loop."""
    model, found = drawn.make(), []
    for _ in range(STEPS):
        model.zero_grad()
        losses = []
        for a, b in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
            loss = mse_loss(model(a), b) / microbatches
            if loss.requires_grad:
                loss.backward()
            losses.append(loss.detach())
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((sum(losses[1:], losses[0]), grads, {name: one.clone() for name, one in model.named_buffers()}))
    return found


def require_same_or_refused(drawn: Drawn, how: str, backward: str, cut: int) -> str:
    """Return the refusal, or an empty text once all bits are equal."""
    schedule = HOWS[how]
    x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    model = drawn.make()
    cuts = [str(min(cut, len(model) - 1))][: schedule.ranks - 1]
    options = {"schedule": schedule, "cuts": cuts, "backward": backward}
    try:
        pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse_loss, **grouped(options))
    except (fpipe.CaptureError, fpipe.CutError, fpipe.InputError) as error:
        return str(error)
    params, buffers = pipe.init(model)
    step, passed = fpipe.value_and_grad(pipe), {}
    for loss, grads, state in train_plainly(drawn, x, y, schedule.microbatches):
        passed = {name: one.clone() for name, one in buffers.items()}
        out, got = step(params, buffers, (x,), y)
        assert all(same_bits(buffers[name], passed[name]) for name in passed), "what was passed is as it was"
        assert same_bits(out.loss, loss)
        assert got.keys() == grads.keys()
        assert not [name for name in grads if not same_bits(got[name], grads[name])]
        assert not [name for name in state if not same_bits(out.buffers[name], state[name])]
        buffers = out.buffers
    return ""


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # torch says so of hooks behind a frozen layer, too
@settings(max_examples=few(12))
@given(models(), st.sampled_from(sorted(HOWS)), st.sampled_from(["graph", "autograd"]), st.integers(1, 3))
def test_code_of_the_backward_is_exact_or_refused_by_name(drawn, how, backward, cut):
    refused = require_same_or_refused(drawn, how, backward, cut)
    assert not refused or NAMED.match(refused), refused
