# SPDX-License-Identifier: Apache-2.0
"""Values from a model or a state dict: what a model has, copied as it is, and nothing read but a process's own."""

import copy
import functools
from collections import ChainMap
from collections.abc import Mapping

import pytest
import torch
from torch import nn

import fpipe
from fpipe.tensors.tree import same_bits
from fpipe.weights.initialization import list_leaves
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.running import run
from tests.common.shares import on_meta, ranks_of, union
from tests.common.sizes import covering, sampled
from tests.common.zoo import ZOO

CASES = ["gpt", "unet", "normalised", "several", "mixed_precision", "fourier", "frozen_below", "one_weight"]


class Lazy(Mapping):
    """A mapping that writes down what is read."""

    def __init__(self, values):
        self.values_, self.read = dict(values), []

    def __getitem__(self, name):
        value = self.values_[name]
        self.read.append(name)
        return value

    def __contains__(self, name):
        return name in self.values_

    def __iter__(self):
        return iter(self.values_)

    def __len__(self):
        return len(self.values_)


@functools.cache
def pipeline(name, ranks):
    return on_meta(ZOO[name], ranks)


def own(pipe, model):
    """What each rank copies out of a real model."""
    return [pipe.init(model) for pipe in ranks_of(pipe)]


def everything(model):
    """A state dict with the buffers that a state dict leaves out, too."""
    return {**dict(model.named_buffers()), **model.state_dict()}


@sampled(2)
@covering(ranks=[1, 2, 4], name=CASES)
def test_a_state_dict_gives_the_same_values_as_its_model(name, ranks):
    pipe, model = pipeline(name, ranks), ZOO[name].make(4)[0]
    wanted = list_leaves(model)
    got = union(own(pipe, model))
    assert got.keys() == wanted.keys()
    assert all(same_bits(got[name], wanted[name]) for name in wanted)
    for rank, (params, buffers) in zip(ranks_of(pipe), own(pipe, model), strict=True):
        source = Lazy(everything(model))
        read = rank.init(source)
        assert set(source.read) <= {alias for name in (*params, *buffers) for alias in aliases_of(model, name)}
        for mine, theirs in zip(read, (params, buffers), strict=True):
            assert mine.keys() == theirs.keys()
            assert all(same_bits(mine[name], theirs[name]) for name in mine)
            assert all(mine[name].stride() == theirs[name].stride() for name in mine)
            assert [value.requires_grad for value in mine.values()] == [x.requires_grad for x in theirs.values()]


def aliases_of(model, first):
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return [name for name, tensor in tensors.items() if tensor is tensors[first]]


@sampled(2)
@pytest.mark.parametrize("name", ["gpt", "unet", "normalised"])
def test_a_step_from_a_state_dict_is_that_of_the_model(name):
    pipe, (model, inputs, targets) = pipeline(name, 2), ZOO[name].make(4)
    expected = loop(model, ZOO[name].loss, inputs, targets, 2)
    assert_same(run(pipe, everything(model), inputs, targets), expected)


def test_values_are_copies_in_the_layout_of_the_model():
    case = Case(lambda: nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), images, mse, ("",) * 3)
    pipe, (model, _, _) = on_meta(case), case.make(4)
    saved = {name: value.contiguous() for name, value in model.state_dict().items()}
    before = copy.deepcopy(saved)
    params, _ = pipe.init(saved)
    assert params["weight"].stride() == model.weight.stride() != saved["weight"].stride()
    with torch.no_grad():
        for value in params.values():
            value.zero_()
    assert all(torch.equal(saved[name], before[name]) for name in saved)


def images(rows):
    return (torch.randn(rows, 2, 4, 4),), torch.randn(rows, 3, 2, 2)


# ---------------------------------------------------------------------------------------------------------------- names


def gpt():
    return pipeline("gpt", 1), ZOO["gpt"].make(4)[0].state_dict()


@pytest.mark.parametrize("dropped", ["embed.weight", "head.weight"])
def test_a_tied_parameter_may_have_any_of_its_names(dropped):
    pipe, saved = gpt()
    params, _ = pipe.init({name: value for name, value in saved.items() if name != dropped})
    assert "embed.weight" in params
    assert "head.weight" not in params
    assert torch.equal(params["embed.weight"], saved["embed.weight"])


def test_a_tied_parameter_has_one_value():
    pipe, saved = gpt()
    assert pipe.init({**saved, "head.weight": saved["head.weight"].clone()})
    with pytest.raises(fpipe.InputError, match=r"source\['head.weight'\]: got a different value from source\['embed"):
        pipe.init({**saved, "head.weight": saved["head.weight"] + 1})


def test_names_that_the_model_does_not_have_are_refused_or_ignored():
    pipe, saved = gpt()
    more = {**saved, "blocks.4.out.bias": torch.zeros(WIDTH), "blocks.4._extra_state": object()}
    with pytest.raises(fpipe.InputError, match=r"source: got \['blocks.4.out.bias', .*which the model does not have"):
        pipe.init(more)
    params, _ = pipe.init(more, strict=False)
    assert params.keys() == pipe.init(saved)[0].keys()


def test_a_rank_needs_only_its_own_values():
    pipe = pipeline("mlp", 4)
    model = ZOO["mlp"].make(4)[0]
    for k, rank in enumerate(ranks_of(pipe)):
        saved = {name: value for name, value in model.state_dict().items() if name.startswith(f"{2 * k}.")}
        assert rank.init(saved)[0].keys() == saved.keys()
        with pytest.raises(fpipe.InputError, match=rf"source: got no value for \['{2 * k}.bias'\], expected one for"):
            rank.init({name: value for name, value in saved.items() if "bias" not in name})


def test_lists_of_names_are_short():
    pipe, _ = gpt()
    with pytest.raises(fpipe.InputError, match=r"'blocks.0.norm.weight'.*\] and 37 more, expected one") as caught:
        pipe.init({})
    assert "blocks.2" not in str(caught.value)


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.double(), "source['0.weight']: got float64[4, 4], expected float32[4, 4]; values are never cast"),
        (lambda x: x.bfloat16(), "got bfloat16[4, 4], expected float32[4, 4]"),
        (lambda x: x[:2], "got float32[2, 4], expected float32[4, 4]"),
        (lambda x: x.to("meta"), "got a tensor on the meta device, expected values"),
        (lambda x: x.tolist(), "got list, expected a tensor float32[4, 4]"),
    ],
)
def test_values_that_do_not_fit_are_refused(change, words):
    saved = ZOO["mlp"].make(4)[0].state_dict()
    with pytest.raises(fpipe.InputError) as caught:
        pipeline("mlp", 1).init({**saved, "0.weight": change(saved["0.weight"])})
    assert words in str(caught.value)


# ----------------------------------------------------------------------------------------- buffers without saved values


class Rotary(nn.Module):
    """A buffer that is computed in the constructor and never saved."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("angles", torch.empty(WIDTH), persistent=False)
        self.register_buffer("seen", torch.zeros(()))
        compute(self)

    def forward(self, x):
        return self.linear(x) * self.angles + self.seen


def compute(module):
    if isinstance(module, Rotary):
        module.angles = torch.arange(float(WIDTH))


ROTARY = Case(lambda: nn.Sequential(Rotary(), Rotary()), rows_of(), mse, ("1",) * 3)


def test_buffers_that_no_state_dict_has_are_filled():
    pipe, (model, inputs, targets) = on_meta(ROTARY, 2), ROTARY.make(4)
    expected = loop(model, mse, inputs, targets, 2)
    step = fpipe.value_and_grad(pipe)
    angles = {f"{k}.angles": torch.arange(float(WIDTH)) for k in (0, 1)}
    for state in (pipe.init(model.state_dict(), fill=compute), pipe.init(ChainMap(model.state_dict(), angles))):
        assert same_bits(step(*state, inputs, targets)[0].loss, expected.loss)


def test_buffers_with_a_value_are_not_filled():
    pipe, model = on_meta(ROTARY), ROTARY.make(4)[0]
    _, buffers = pipe.init({**model.state_dict(), "0.angles": torch.ones(WIDTH)}, fill=compute)
    assert buffers["0.angles"].tolist() == [1] * WIDTH
    assert buffers["1.angles"].tolist() == list(range(WIDTH))


def test_buffers_without_values_are_refused():
    pipe, saved = on_meta(ROTARY), ROTARY.make(4)[0].state_dict()
    with pytest.raises(fpipe.InputError, match=r"no value for \['0.angles', '1.angles'\].* not persistent.* fill=func"):
        pipe.init(saved)
    with pytest.raises(fpipe.InputError, match=r"initialise: got no value, or nan, for 0.angles of Rotary"):
        pipe.init(saved, fill=lambda module: None)


def test_only_buffers_that_are_never_saved_are_filled():
    """A saved buffer that is missing is a mistake, as a parameter is."""
    pipe, saved = on_meta(ROTARY), ROTARY.make(4)[0].state_dict()
    del saved["0.seen"]
    with pytest.raises(fpipe.InputError, match=r"source: got no value for \['0.seen'\], expected one for every leaf"):
        pipe.init(saved, fill=lambda module: [buffer.zero_() for buffer in module.buffers()])


def test_tensors_that_nobody_can_fill_are_refused_when_the_pipeline_is_built():
    with pytest.raises(fpipe.CaptureError, match=r"model: got the attribute weights, a tensor on the meta.*register_b"):
        on_meta(ZOO["constants"], 2)


@pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated")
def test_tensors_that_hooks_compute_need_no_values():
    normed = Case(lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))), rows_of(), mse, ("",) * 3)
    pipe, (model, inputs, targets) = on_meta(normed), normed.make(4)
    assert_same(run(pipe, model.state_dict(), inputs, targets), loop(model, mse, inputs, targets, 2))
