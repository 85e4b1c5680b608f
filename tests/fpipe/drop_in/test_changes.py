# SPDX-License-Identifier: Apache-2.0
"""What a script changes after it has made a drop-in module is followed, bit for bit, or refused; never ignored."""

import copy
import gc
from types import MethodType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fpipe
from fpipe.errors import InputError
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b
from tests.common.options import grouped
from tests.common.sizes import sampled

M = 4
X, Y = torch.randn(8, 4, generator=torch.manual_seed(1)), torch.randn(8, 2, generator=torch.manual_seed(2))


class Block(nn.Module):
    """A layer that reads attributes of every kind; `gain` is one of its class, and `extra` may be missing."""

    gain = 1.0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.config, self.scales, self.table = SimpleNamespace(scale=2.0), [2.0], {"scale": 1.5}
        self.constant, self.number, self.pair, self.rate = torch.tensor(2.0), np.float32(1.5), (1.0, 2.0), 1.0
        self.activation, self.inner = functional.relu, {"list": [1.0]}

    def forward(self, x):
        y = self.linear(x) * self.config.scale * self.scales[0] * self.table["scale"] * self.constant
        y = y * float(self.number) * self.pair[0] * self.rate * self.inner["list"][0] * self.gain
        return self.activation(y) * (getattr(self, "extra", None) or 1.0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.last, self.weight = nn.Linear(4, 4), Block(), nn.Linear(4, 2), 1.0

    def forward(self, x):
        return self.last(self.block(self.first(x))) * self.weight


def put(**attributes):
    def change(model):
        for name, value in attributes.items():
            setattr(model.block, name, value)

    return change


def double(model):
    known = model.block.forward
    model.block.forward = lambda x: known(x) * 2


IN_PLACE = {
    "a config": lambda model: setattr(model.block.config, "scale", 3.0),
    "a list": lambda model: model.block.scales.append(model.block.scales.pop() + 1),
    "a dict": lambda model: model.block.table.update(scale=4.0),
    "a list in a dict": lambda model: model.block.inner["list"].__setitem__(0, 2.5),
    "a tensor": lambda model: model.block.constant.mul_(3),
}
CHANGES = {
    **{f"{name} in place": change for name, change in IN_PLACE.items()},
    "another config": put(config=SimpleNamespace(scale=5.0)),
    "another list": put(scales=[5.0]),
    "another dict": put(table={"scale": 0.5}),
    "another tensor": put(constant=torch.tensor(-1.0)),
    "a number": put(rate=0.5),
    "a number of numpy": put(number=np.float32(0.25)),
    "a tuple": put(pair=(3.0, 2.0)),
    "a function of a library": put(activation=torch.tanh),
    "a function of the script's": put(activation=lambda x: x * x),
    "an attribute of the class": put(gain=2.0),
    "a missing attribute": put(extra=3.0),
    "an attribute of the model itself": lambda model: setattr(model, "weight", 0.5),
    "a forward hook": lambda model: model.block.register_forward_hook(lambda module, args, out: out * 2),
    "a hook before the forward": lambda model: model.block.register_forward_pre_hook(lambda module, args: args[0] * 2),
    "a hook on gradients": lambda model: model.block.register_full_backward_hook(lambda m, g, o: (g[0] * 2,)),
    "a method": lambda model: setattr(model.block, "forward", MethodType(lambda self, x: self.linear(x), model.block)),
    "a forward around the old one": double,
}


def make(model):
    return fpipe.Pipelined(model, loss=functional.mse_loss, example=(X,), targets=Y, schedule=one_f_one_b(2, M))


def train(model):
    """The loss and the gradients, each cloned, of a step on one device, or of a drop-in module."""
    model.zero_grad()
    if isinstance(model, fpipe.Pipelined):
        loss = model(X, targets=Y)
        loss.backward()
    else:
        losses = [functional.mse_loss(model(x), y) / M for x, y in zip(X.chunk(M), Y.chunk(M), strict=True)]
        for one in losses:
            one.backward()
        loss = sum(one.detach() for one in losses)
    return [loss.detach(), *[p.grad.clone() for p in model.parameters()]]


@sampled(2)
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_the_module_is_followed(what):
    model, plain, change = make(Net()), Net(), CHANGES[what]
    before = train(model)
    assert all(map(same_bits, before, train(plain)))
    for one in (model, plain):
        change(one)
    expected = train(plain)
    assert not all(map(same_bits, before, expected))
    assert all(map(same_bits, train(model), expected))


@sampled(1)
@pytest.mark.parametrize("what", ["a number", "a forward hook"])
def test_a_change_in_eval_mode_is_followed_in_both_modes(what):
    model, plain, change = make(Net()), Net(), CHANGES[what]
    train(model)
    for one in (model, plain):
        change(one.eval())
    assert same_bits(model(X), torch.cat([plain(x) for x in X.chunk(M)]).detach())
    assert all(map(same_bits, train(model.train()), train(plain.train())))


@sampled(2)
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_the_users_own_model_is_refused(what):
    net = Net()
    model = make(net)
    model.block.rate = 0.5  # a pipeline that was built later refuses it, too
    model(X, targets=Y)
    CHANGES[what](net)
    with pytest.raises(
        InputError, match=r"it runs a copy of the model. Restore it, or change it in the fpipe.Pipelined"
    ):
        model(X, targets=Y)


@sampled(2)
@pytest.mark.parametrize("what", IN_PLACE)
def test_a_change_of_what_the_model_shared_is_refused_when_it_is_gone(what):
    net = Net()
    shared = SimpleNamespace(block=SimpleNamespace(**{k: v for k, v in vars(net.block).items() if k[0] != "_"}))
    model = make(net)
    del net
    gc.collect()
    model(X, targets=Y)
    IN_PLACE[what](shared)
    with pytest.raises(InputError, match=r"module block \(Block\), attribute .*, expected"):
        model(X, targets=Y)


def test_a_hook_of_the_models_that_is_removed_later_is_refused():
    net = Net()
    handle = net.block.register_forward_hook(lambda module, args, out: out * 2)
    model = make(net)
    del net
    handle.remove()
    with pytest.raises(InputError, match=r"module block \(Block\), attribute '_forward_hooks'"):
        model(X, targets=Y)


def test_settings_that_alternate_are_built_once():
    model, seen = make(Net()), set()
    for k in range(6):
        model.block.rate = float(k % 2)
        train(model)
        seen.add(id(model.pipe))
    handle = model.block.register_forward_hook(lambda module, args, out: out * 2)
    train(model)
    handle.remove()
    known = model.pipe
    train(model)
    assert id(known) not in seen
    assert id(model.pipe) in seen
    assert len(seen) == 2


def test_the_settings_that_were_used_last_are_kept(monkeypatch):
    monkeypatch.setattr("fpipe.drop_in.settings.KEPT_PIPELINES", 2)
    model, built = make(Net()), []
    for rate in (1.0, 0.0, 1.0, 2.0, 1.0):
        model.block.rate = rate
        train(model)
        built.append(model.pipe)
    assert built[0] is built[2] is built[4]


class Adversaries(nn.Module):
    """A generator and what judges it, trained in turns on objectives of their own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.makes, self.judges = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x, z, phase):
        made = self.makes(z)
        if phase == "judge":
            return self.judges(x).mean() - self.judges(made.detach()).mean()
        return self.judges(made).mean()


def test_objectives_in_turns_are_those_of_a_plain_loop():
    """The setting is new in a phase that the example does not have; each is built once."""
    plain, (x, z) = Adversaries(), torch.randn(2, 4, 4)
    how = one_f_one_b(ranks=2, microbatches=2)
    given = {"loss": lambda loss: loss, "schedule": how, "cuts": ["judges"]}
    model = fpipe.Pipelined(Adversaries(), example=(x, z, "judge"), **grouped(given))
    for turn in range(2):
        for phase, frozen in (("judge", "makes"), ("make", "judges")):
            for one in (model, plain):
                one.zero_grad()
                for name, p in one.named_parameters():
                    p.requires_grad_(not name.startswith(frozen))
            model(x, z, phase).backward()
            for a, b in zip(x.chunk(2), z.chunk(2), strict=True):
                (plain(a, b, phase) / 2).backward()
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None) == name.startswith(frozen)
                assert p.grad is None or same_bits(p.grad, q.grad)
        built = len(model._pipelines.kept)
        assert built == 3, f"turn {turn}"
    with pytest.raises(fpipe.CaptureError, match="got one without a gradient for any parameter"):
        model(x, z, "judge")


def test_a_hook_on_a_parameter_stays_when_a_change_is_followed():
    net, plain = Net(), Net()
    for one in (net, plain):
        one.block.linear.weight.register_hook(lambda grad: grad * 3)
    model = make(net)
    for k in range(4):
        for one in (model, plain):
            one.block.rate = k + 1.0
            one.block.linear.weight.requires_grad_(k != 1)
        if k != 1:
            assert all(map(same_bits, train(model), train(plain)))
        else:
            model(X, targets=Y)


def test_a_copy_of_the_module_is_followed_by_itself():
    model, plain = make(Net()), Net()
    for one in (model, plain):
        one.block.rate = 0.5
    other = copy.deepcopy(model)
    assert all(map(same_bits, train(other), train(plain)))
    other.block.register_forward_hook(lambda module, args, out: out * 2)
    train(other)
    assert all(map(same_bits, train(model), train(plain)))


def test_state_that_nothing_compares_is_found_by_recording_again():
    net = Net()
    net.block.scales = np.ones(2)
    model = make(net)
    del net
    train(model)
    model.block.scales[0] = 3.0
    with pytest.raises(InputError, match="now behaves differently"):
        model.pipe.recheck()


REPLACED = {
    "a tensor that is taken away": (lambda model: setattr(model.first, "bias", None), "first.bias: got none, expected"),
    "a new buffer": (lambda model: model.first.register_buffer("new", X), "first.new: got the buffer first.new of"),
    "a new module": (lambda model: model.add_module("new", nn.ReLU()), "'new': got ReLU, expected none"),
    "tied parameters": (
        lambda model: setattr(model.block.linear, "weight", model.first.weight),
        "block.linear.weight: got the parameter first.weight of",
    ),
    "a parameter of another shape": (
        lambda model: setattr(model.last, "weight", nn.Parameter(torch.ones(3, 4))),
        r"last.weight.*: got .*float32\[3, 4\], expected .*float32\[2, 4\]",
    ),
}


@sampled(2)
@pytest.mark.parametrize("what", REPLACED)
def test_what_ranks_hold_does_not_change(what):
    model, (change, words) = make(Net()), REPLACED[what]
    change(model)
    with pytest.raises(InputError, match=words):
        model(X, targets=Y)
