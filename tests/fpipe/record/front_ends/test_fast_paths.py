# SPDX-License-Identifier: Apache-2.0
"""Frozen attention of torch's takes its fast path in every stage, cut or not, where it takes it on one device."""

from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.modules import activation, transformer

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b
from tests.common.cases import mse
from tests.common.growth import Operators
from tests.common.loops import loop
from tests.common.options import grouped
from tests.common.running import staged
from tests.common.sizes import covering, sampled

D, ROWS = 32, 6
HOW = one_f_one_b(ranks=2, microbatches=2)


class Frozen(nn.Module):
    """A frozen encoder, always in eval mode, with a head that is trained."""

    def __init__(self, drop=0.0, padded=False, nested=False):
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 4, 2 * D, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).requires_grad_(False).eval()
        self.head, self.drop, self.padded = nn.Linear(D, D), nn.Dropout(drop), padded

    def train(self, mode=True):
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, x):
        mask = torch.arange(x.shape[1]).ge(4).expand(x.shape[:2]) if self.padded else None
        with torch.no_grad():
            features = self.encoder(x, src_key_padding_mask=mask)
        return self.head(self.drop(features[:, :4]))


class Attending(nn.Module):
    """A frozen attention whose weights nobody wants."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 4, batch_first=True).requires_grad_(False).eval()
        self.head = nn.Linear(D, D)

    def train(self, mode=True):
        super().train(mode)
        self.attention.eval()
        return self

    def forward(self, x):
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.head(mixed[:, :4])


class Fused:
    """Counts how often torch's modules call their fused operators."""

    def __enter__(self):
        self.calls, self.patches = 0, []
        for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
            self.patches.append(patch.object(torch, name, self.counted(getattr(torch, name))))
            self.patches[-1].start()
        return self

    def counted(self, function):
        def count(*args, **kwargs):
            self.calls += 1
            return function(*args, **kwargs)

        return count

    def __exit__(self, *error):
        for one in self.patches:
            one.stop()


MODELS = {
    "encoder": (lambda: nn.Sequential(Frozen(), nn.Linear(D, D)), ["1"]),
    "encoder, cut between layers": (lambda: nn.Sequential(Frozen(), nn.Linear(D, D)), ["0.encoder.layers.1"]),
    "encoder, cut in the head": (lambda: nn.Sequential(Frozen(), nn.Linear(D, D)), ["0.head"]),
    "padded": (lambda: nn.Sequential(Frozen(padded=True), nn.Linear(D, D)), ["1"]),
    "nested": (lambda: nn.Sequential(Frozen(padded=True, nested=True), nn.Linear(D, D)), ["1"]),
    "attention": (lambda: nn.Sequential(Attending(), nn.Linear(D, D)), ["1"]),
    "attention, cut behind": (lambda: nn.Sequential(Attending(), nn.Linear(D, D)), ["0.head"]),
}
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def build(make, cuts, backward):
    torch.manual_seed(0)
    model, x, y = make(), torch.randn(4, ROWS, D), torch.randn(4, 4, D)
    return staged(model, (x,), y, cuts, backward=backward), model, (x,), y


@sampled(2)
@covering(name=[*MODELS], backward=["autograd", "graph"])
def test_the_fast_path_is_taken_where_one_device_takes_it(name, backward):
    pipe, model, inputs, targets = build(*MODELS[name], backward)
    got, grads = fpipe.value_and_grad(pipe, outputs=True)(*pipe.init(model), inputs, targets)
    with Fused() as fused:
        want = loop(model, mse, inputs, targets, 2)
    assert fused.calls, "eager takes the fast path"
    assert same_bits(got.loss, want.loss)
    assert same_bits(got.outputs, want.outputs)
    assert all(same_bits(grads[name], want.grads[name]) for name in want.grads)


def test_an_encoder_that_nests_is_not_recorded():
    pipe, *_ = build(*MODELS["nested"], "graph")
    assert pipe.stages[0].functions.remark == "by autograd: an encoder with a padding mask nests tensors"
    assert build(*MODELS["padded"], "graph")[0].stages[0].functions.remark == "as a graph"


def test_no_stage_begins_inside_an_encoder_that_nests():
    with pytest.raises(fpipe.CutError, match=r"inside '0.encoder' .*: a padding mask in an encoder that nests"):
        build(MODELS["nested"][0], ["0.encoder.layers.1"], "autograd")


def build_encoder(layers, nested=False, **how):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, 4, 2 * D, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, layers, enable_nested_tensor=nested), nn.Linear(D, D))
    x = torch.randn(ROWS, 6, D)
    return fpipe.pipeline(model, example=(x,), targets=x, loss=mse, schedule=HOW, **grouped(how)), model, x


@sampled(1)
@pytest.mark.parametrize(("layers", "begins"), [(3, "0.layers.2"), (1, "1")])
def test_balanced_stages_begin_outside_of_what_runs_as_one_operator_in_evaluation(layers, begins):
    pipe, model, x = build_encoder(layers)
    assert pipe.stages[1].parameters[0].startswith(begins)
    with torch.no_grad(), Fused() as fused:
        wanted = torch.cat([model.eval()(rows) for rows in x.tensor_split(2)])
    assert fused.calls
    assert same_bits(fpipe.predict(pipe)(*pipe.init(model), (x,)), wanted)


def test_an_evaluation_cut_inside_of_what_runs_as_one_operator_is_refused():
    pipe, model, x = build_encoder(2, cuts=["0.layers.1.norm2"])
    with pytest.raises(fpipe.CutError, match=r"torch runs '0\.layers\.1' .* as one operator: cut outside it, or"):
        fpipe.predict(pipe)(*pipe.init(model), (x,))
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        pipe, model, x = build_encoder(2, cuts=["0.layers.1.norm2"])
        with torch.no_grad():
            wanted = torch.cat([model.eval()(rows) for rows in x.tensor_split(2)])
        assert same_bits(fpipe.predict(pipe)(*pipe.init(model), (x,)), wanted)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_modules_that_draw_do_not_prevent_the_fast_path_of_others():
    """Keys are set by a torch function mode, under which torch's modules go the slow way."""
    pipe, model, inputs, targets = build(lambda: nn.Sequential(Frozen(0.5), nn.Linear(D, D)), ["1"], "autograd")
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    reference = fpipe.reference(pipe)
    wanted = reference(*state, inputs, targets, seed=1)
    for function in (step, reference):
        with Operators() as operators:
            got = function(*state, inputs, targets, seed=1)
        assert operators.called[torch.ops.aten._transformer_encoder_layer_fwd.default] == 4
        assert same_bits(got[0].loss, wanted[0].loss)
        assert all(same_bits(got[1][name], wanted[1][name]) for name in wanted[1])


def test_modules_of_torch_ask_what_fpipe_answers_for_them():
    assert activation._is_make_fx_tracing() is False
    code = [f.__code__.co_names for f in (nn.TransformerEncoder.forward, nn.TransformerEncoderLayer.forward)]
    assert all("has_torch_function" in names for names in code), transformer
    assert {"has_torch_function", "_is_make_fx_tracing"} <= {*nn.MultiheadAttention.forward.__code__.co_names}
