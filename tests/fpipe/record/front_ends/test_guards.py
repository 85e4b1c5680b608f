# SPDX-License-Identifier: Apache-2.0
"""What a front end would lose is refused by name; recorded as modules, the same models work, and exactly."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe.record.model.places import places
from schedules import one_f_one_b, split_backward
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.running import build, run, run_reference
from tests.common.sizes import covering
from tests.common.unusual_models import Negated
from tests.common.zoo import EXPORTS_LESS

CUTS = ("1", "2", "3")
GRAPHS = ["export", "fx", "dynamo"]
FRONTS = ["trace", "modules", *GRAPHS]


class Part(nn.Module):
    """A linear layer with something done to it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x).tanh()


class Custom(Part):
    def forward(self, x):
        return Negated.apply(super().forward(x))


class Checkpointed(Part):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Reentrant(Part):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


class SavedTensors(Part):
    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t * 1):
            return super().forward(x)


class TensorHook(Part):
    def forward(self, x):
        x = super().forward(x)
        if x.requires_grad:
            x.register_hook(double)
        return x


class Seeding(Part):
    def forward(self, x):
        torch.manual_seed(1)
        return super().forward(x)


class Reassigned(Part):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x):
        self.seen = self.seen + x.detach().sum(0)
        return super().forward(x)


class Counting(Part):
    calls = 0

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x)


class Branching(Part):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class Ragged(Part):
    def forward(self, x):
        return super().forward(x[x[:, 0] > 0])


def double(grad):
    return grad * 2


def double_output(module, args, out):
    return out * 2


def double_input(module, args):
    return (args[0] * 2,)


def double_grads(module, incoming, outgoing):
    return tuple(grad * 2 for grad in incoming)


def double_grads_before(module, outgoing):
    return tuple(grad * 2 for grad in outgoing)


def hooked(register, hook):
    def make():
        part = Part()
        getattr(part, register)(hook)
        return part

    return make


def post_hook():
    part = Part()
    part.linear.weight.register_post_accumulate_grad_hook(lambda p: None)
    return part


def case(make):
    """A sequence whose third part is the one in question."""
    return Case(lambda: nn.Sequential(Part(), Part(), make(), Part()), rows_of(), mse, CUTS)


KEPT = {
    "custom function": (Custom, "the custom autograd function Negated", "module 2 (Custom)"),
    "checkpoint": (Checkpointed, "activation checkpointing", "module 2 (Checkpointed)"),
    "saved-tensor hooks": (SavedTensors, "saved-tensor hooks", "module 2 (SavedTensors)"),
    "tensor hook": (TensorHook, "the tensor hook double", "module 2 (TensorHook)"),
    "backward hook": (hooked("register_full_backward_hook", double_grads), "double_grads", "module 2 (Part)"),
    "backward pre-hook": (
        hooked("register_full_backward_pre_hook", double_grads_before),
        "double_grads_before",
        "module 2 (Part)",
    ),
}

FORWARD_HOOKS = {
    "register_forward_hook": double_output,
    "register_forward_pre_hook": double_input,
}
NOWHERE = ["post-accumulate hook", "seeding", "assigned attribute"]  # kept by no front end
LOST = {
    "seeding": (Seeding, "a forward that seeds the generator", "module 2 (Seeding)"),
    "reentrant checkpoint": (Reentrant, "activation checkpointing", "module 2 (Reentrant)"),
    "post-accumulate hook": (post_hook, "a gradient hook", "parameter 2.linear.weight"),
    "reassigned buffer": (Reassigned, "a change of the buffer '2.seen'", "module 2 (Reassigned)"),
    "assigned attribute": (Counting, "a forward that changes it", "module 2 (Counting), attribute 'calls'"),
}


@pytest.mark.parametrize("capture", GRAPHS)
@pytest.mark.parametrize("what", {**KEPT, **LOST})
def test_graphs_of_operators_refuse_what_they_would_lose(what, capture):
    make, got, where = {**KEPT, **LOST}[what]
    with pytest.raises(fpipe.CaptureError) as caught:
        build(case(make), one_f_one_b(ranks=4, microbatches=2), 4, capture=capture)
    message = str(caught.value)
    assert got in message
    assert message.startswith(where)
    assert "xpected" in message
    assert 'capture="trace"' in message or what in NOWHERE


@pytest.mark.parametrize("capture", FRONTS)
@pytest.mark.parametrize("register", FORWARD_HOOKS)
def test_forward_hooks_are_kept(register, capture):
    one = case(hooked(register, FORWARD_HOOKS[register]))
    built = _, model, inputs, targets = build(one, one_f_one_b(ranks=4, microbatches=2), 4, capture=capture)
    assert_same(run(*built), loop(model, one.loss, inputs, targets, 2))


@covering(what=[*KEPT], split=[False, True])
def test_modules_keep_what_graphs_of_operators_would_lose(what, split):
    """Exactly: equal to a plain loop over the same modules, and different from a model without the thing."""
    one, how = case(KEPT[what][0]), one_f_one_b(ranks=4, microbatches=3)
    built = _, model, inputs, targets = build(one, split_backward(how) if split else how, 6, capture="modules")
    got = run(*built)
    assert_same(got, loop(model, one.loss, inputs, targets, 3))
    assert_same(got, run_reference(*built))
    plain = nn.Sequential(Part(), Part(), Part(), Part())
    plain.load_state_dict(model.state_dict())
    without = loop(plain, one.loss, inputs, targets, 3)
    if what not in ("checkpoint", "saved-tensor hooks"):
        assert not torch.equal(without.grads["0.linear.weight"], got.grads["0.linear.weight"])


@pytest.mark.parametrize("what", ["reassigned buffer", "reentrant checkpoint"])
def test_modules_keep_what_graphs_refuse(what):
    one = case(LOST[what][0])
    built = _, model, inputs, targets = build(one, one_f_one_b(ranks=4, microbatches=3), 6, capture="modules")
    assert_same(run(*built), loop(model, one.loss, inputs, targets, 3))


@pytest.mark.parametrize("what", ["post-accumulate hook"])
def test_modules_refuse_hooks_on_parameters(what):
    """They hang on the user's own tensors, which the pipeline never uses."""
    with pytest.raises(fpipe.CaptureError, match=r"parameter 2\.linear\.weight"):
        build(case(LOST[what][0]), one_f_one_b(ranks=4, microbatches=2), 4, capture="modules")


@pytest.mark.parametrize("make", [Branching, Ragged])
@pytest.mark.parametrize("capture", FRONTS)
def test_control_flow_on_data_is_refused(make, capture):
    with pytest.raises(fpipe.CaptureError) as caught:
        build(
            replace(case(make), loss=lambda out, _: out.mean()),
            one_f_one_b(ranks=4, microbatches=2),
            4,
            capture=capture,
        )
    assert "2" in str(caught.value).split(":")[0]


def test_an_error_of_the_model_is_named():
    class Broken(Part):
        def forward(self, x):
            return super().forward(x[:, :2])

    with pytest.raises(fpipe.CaptureError, match=r"^module 2\.linear \(Linear\): got RuntimeError: a and b"):
        build(case(Broken), one_f_one_b(ranks=4, microbatches=2), 4, capture="export")


@pytest.mark.parametrize("capture", FRONTS)
def test_attributes_that_the_first_call_sets_are_allowed(capture):
    """As models do that write into their configuration how their loss is computed."""

    class Settling(Part):
        def __init__(self):
            super().__init__()
            self.config = {"kind": None}

        def forward(self, x):
            if self.config["kind"] is None:
                self.config["kind"] = "double"
            return super().forward(x) * len(self.config["kind"])

    one = case(Settling)
    built = _, model, inputs, targets = build(one, one_f_one_b(ranks=4, microbatches=2), 4, capture=capture)
    assert_same(run(*built), loop(model, one.loss, inputs, targets, 2))


def test_a_harmless_assignment_is_allowed():
    class Same(Part):
        def __init__(self):
            super().__init__()
            self.flag = 1
            self.register_buffer("seen", torch.zeros(WIDTH))

        def forward(self, x):
            self.flag = 1
            self.seen += 1
            return super().forward(x) + self.seen

    one = case(Same)
    for capture in FRONTS[:-1] if EXPORTS_LESS else FRONTS:
        built = _, model, inputs, targets = build(one, one_f_one_b(ranks=4, microbatches=2), 4, capture=capture)
        assert_same(run(*built), loop(model, one.loss, inputs, targets, 2))


def test_a_module_is_identified_by_its_attributes():
    """The proxies that export makes come and go, and the next ones are where the last ones were."""
    part = Part()
    twin = Part.__new__(Part)
    twin.__dict__ = part.__dict__
    assert places(nn.Sequential(twin)).items() >= places(part, "0").items()


def test_the_user_s_model_is_not_touched():
    """Capture runs a copy: no hook of the model is called with real values, no buffer moves, no attribute changes."""
    calls = []
    one = Case(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), rows_of(), mse, CUTS)
    model, inputs, targets = one.make(4)
    model[1].register_forward_hook(lambda *_: calls.append(1))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    fpipe.pipeline(
        model,
        example=inputs,
        targets=targets,
        loss=mse,
        schedule=one_f_one_b(ranks=2, microbatches=2),
        cuts=["1"],
        capture="modules",
    )
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == attributes
