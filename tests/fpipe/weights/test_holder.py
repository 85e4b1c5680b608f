# SPDX-License-Identifier: Apache-2.0
"""A holder looks like the model to whatever expects a module: names, order, ties, classes, flags."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.swa_utils import AveragedModel

from fpipe.errors import InputError
from fpipe.tensors.tree import same_bits
from fpipe.weights.loading import hold
from tests.common.running import build
from tests.common.schedules import SCHEDULES
from tests.common.shares import ranks_of
from tests.common.sizes import sampled
from tests.common.zoo import ZOO

CASES = ["gpt", "normalised", "several", "frozen_below", "one_weight", "fourier"]


def pipeline_of(name):
    pipe, model, *_ = build(ZOO[name], SCHEDULES["gpipe"](ranks=2, microbatches=2), 8, capture="trace")
    return pipe, model


@sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_a_holder_of_everything_looks_like_the_model(name):
    pipe, model = pipeline_of(name)
    params, buffers = pipe.init(model)
    module = pipe.module(params, buffers)
    assert list(module.state_dict()) == list(model.state_dict())
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [type(m) for m in module.modules()] == [type(m) for m in model.modules()]
    for n, p in module.named_parameters():
        assert isinstance(p, nn.Parameter)
        assert p.requires_grad == params[n].requires_grad
        assert p.data_ptr() == params[n].data_ptr(), "no memory is copied"


@sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_holders_of_all_ranks_make_up_the_state_dict_of_the_model(name):
    pipe, model = pipeline_of(name)
    found = {}
    for mine in ranks_of(pipe):
        params, buffers = mine.init(model)
        module = mine.module(params, buffers)
        assert dict(module.named_parameters()).keys() == params.keys()
        assert dict(module.named_buffers()).keys() == buffers.keys()
        found.update(module.state_dict())
    assert found.keys() == model.state_dict().keys()
    assert all(same_bits(found[n], value) for n, value in model.state_dict().items())


def test_a_tied_parameter_is_one_under_all_of_its_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    module = hold(model, {"0.weight": torch.ones(2, 2)})
    assert module[0].weight is module[1].weight
    assert list(module.state_dict()) == ["0.weight", "1.weight"]
    module.load_state_dict({name: torch.zeros(2, 2) for name in ("0.weight", "1.weight")})
    assert not module[1].weight.any()


def test_optimizer_state_is_under_the_names_of_the_model():
    pipe, model = pipeline_of("gpt")
    for mine in ranks_of(pipe):
        module, other = mine.module(*mine.init(model)), mine.module(*mine.init(model))
        optimizer, fresh = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (module, other))
        for p in module.parameters():
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()
        state = get_optimizer_state_dict(module, optimizer)
        names = [n for n, _ in module.named_parameters()]
        assert list(state["state"]) == names
        assert get_model_state_dict(module).keys() == module.state_dict().keys()
        set_optimizer_state_dict(other, fresh, state)
        for one, two in zip(module.parameters(), other.parameters(), strict=True):
            assert same_bits(fresh.state[two]["exp_avg"], optimizer.state[one]["exp_avg"])


def test_an_average_of_holders_is_the_average_of_the_model():
    pipe, model = pipeline_of("normalised")
    module, whole = pipe.module(*pipe.init(model)), AveragedModel(model)
    average = AveragedModel(module)
    for k in (1.0, 2.0, 4.0):
        for one in (module, model):
            with torch.no_grad():
                for p in one.parameters():
                    p.mul_(k)
        average.update_parameters(module)
        whole.update_parameters(model)
    assert average.state_dict().keys() == whole.state_dict().keys()
    assert all(same_bits(average.state_dict()[n], value) for n, value in whole.state_dict().items())


def test_names_that_the_model_lacks_are_refused():
    with pytest.raises(InputError, match=r"got \['2.weight'\], which the model does not have, expected names like"):
        hold(nn.Sequential(nn.Linear(2, 2)), {"2.weight": torch.ones(2, 2)})
