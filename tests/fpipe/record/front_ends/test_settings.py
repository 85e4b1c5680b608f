# SPDX-License-Identifier: Apache-2.0
"""A forward may change torch's settings for what it calls; no cut goes through that, and no graph loses it."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import fpipe
from schedules import one_f_one_b
from tests.common.cases import BACKWARDS, WIDTH, mse
from tests.common.running import require_eager, staged
from tests.common.sizes import covering, sampled


def setting(get, put, new):
    """A context in which a setting has another value."""

    @contextmanager
    def context():
        old = get()
        put(new)
        try:
            yield
        finally:
            put(old)

    return context


ONEDNN = setting(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False)
DTYPE = setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64)
CONTEXTS = {
    "oneDNN": ONEDNN,
    "the default dtype": DTYPE,
    "deterministic algorithms": setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "the precision of matmul on mkldnn": setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "flash attention": lambda: sdpa_kernel(SDPBackend.MATH),
}


class Piece(nn.Module):
    """A convolution, attention, and numbers in the default dtype."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        counts = (x > 0).sum(-1, keepdim=True)
        return self.linear(scaled_dot_product_attention(x, x, x)) * (counts / 7).float()


class Around(nn.Module):
    """Two pieces in a context."""

    def __init__(self, context):
        super().__init__()
        self.a, self.b, self.context = Piece(), Piece(), context

    def forward(self, x):
        with self.context():
            return self.b(self.a(x))


def batch():
    x, y = torch.randn(2, 8, 4, WIDTH)
    return (x,), y


@sampled(1)
@covering(name=[*CONTEXTS], backward=BACKWARDS)
def test_modules_that_change_settings_are_exact_and_never_cut_inside(name, backward):
    model = nn.Sequential(Around(CONTEXTS[name]), Around(CONTEXTS[name]))
    pipe = require_eager(model, *batch(), backward=backward)
    changes = backward == "graph" and name != "flash attention"  # a graph has the operators that attention is made of
    assert ("by autograd: it changes torch's settings for what it calls" in str(pipe)) is changes
    with pytest.raises(fpipe.CutError, match=rf"Around\): a change of torch's settings \(.*{name}.*\) around what it"):
        staged(model, *batch(), ["1.b"], backward=backward)


def test_even_cuts_avoid_modules_that_change_settings():
    model, (inputs, y) = nn.Sequential(nn.Linear(WIDTH, WIDTH), Around(ONEDNN), nn.Linear(WIDTH, WIDTH)), batch()
    pipe = fpipe.pipeline(model, example=inputs, targets=y, loss=mse, schedule=one_f_one_b(2, 4))
    assert fpipe.verify(pipe, model, inputs, y).eager


@sampled(2)
@pytest.mark.parametrize("capture", ["export", "fx", "dynamo"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_front_ends_that_read_operators_refuse_changed_settings(name, capture):
    model = nn.Sequential(Around(CONTEXTS[name]), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(fpipe.CaptureError, match=rf"got a change of torch's settings \(.*{name}"):
        staged(model, *batch(), ["1"], capture=capture)


@pytest.mark.parametrize("backward", BACKWARDS)
def test_settings_that_a_capture_has_read_are_watched(backward):
    model, (inputs, y) = nn.Sequential(Piece(), Piece()), batch()
    pipe = staged(model, inputs, y, backward=backward)
    step, state = fpipe.value_and_grad(pipe), pipe.init(model)
    step(*state, inputs, y)
    with DTYPE(), pytest.raises(fpipe.InputError, match=r"torch: the default dtype: got torch.float64, expected torch"):
        step(*state, inputs, y)
    flash = setting(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False)
    with flash(), pytest.raises(fpipe.InputError, match="torch: flash attention: got False, expected True"):
        step(*state, inputs, y)
    with ONEDNN():
        assert fpipe.verify(pipe, model, inputs, y).eager
