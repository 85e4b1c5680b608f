# SPDX-License-Identifier: Apache-2.0
"""Front ends of users' own: functions from a module to a module, whose result is recorded like any other model."""

import pytest
import torch
from torch import nn

import fpipe
from schedules import one_f_one_b
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.running import build, run, run_reference
from tests.common.unusual_models import Negated
from tests.common.zoo import ZOO


def exported(model, inputs):
    """Return a flat graph, whose nodes know the modules that they come from."""
    return torch.export.export(model, inputs, strict=False).module()


def unflattened(model, inputs):
    """Return torch's own modules, one for each of the model's."""
    return torch.export.unflatten(torch.export.export(model, inputs, strict=False))


def symbolic(model, inputs):
    return torch.fx.symbolic_trace(model)


def same(model, inputs):
    return model


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own unflatten asks
@pytest.mark.parametrize("name", ["normalised", "tied_sequence", "dropping", "mlp"])
@pytest.mark.parametrize("front_end", [exported, unflattened, same])
def test_what_a_front_end_returns_is_recorded_and_cut_at_the_names_of_the_model(front_end, name):
    case = ZOO[name]
    built = _, model, inputs, targets = build(case, one_f_one_b(ranks=4, microbatches=3), 6, capture=front_end)
    seed = 1 if case.random else None
    got = run(*built, seed=seed)
    assert_same(got, run_reference(*built, seed=seed))
    if not case.random:
        assert_same(got, loop(model, case.loss, inputs, targets, 3))


class Layer(nn.Module):
    """A linear layer with something done to what it returns."""

    def __init__(self, then):
        super().__init__()
        self.linear, self.then = nn.Linear(WIDTH, WIDTH), then

    def forward(self, x):
        return self.then(self.linear(x))


def without_gradient(x):
    with torch.no_grad():
        scale = x.abs()
    return x * scale


def cast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ x.t()).float() @ x


def nested(x):
    """A region in a region, which torch.export forgets."""
    with torch.autocast("cpu", torch.bfloat16):
        h = x @ x.t()
        with torch.no_grad():
            g = h * 2
        h = h + g
    return h.float() @ x


def negated(x):
    return Negated.apply(x)


def case(then):
    return Case(lambda: nn.Sequential(*map(Layer, [torch.tanh, torch.tanh, then])), rows_of(), mse, ("", "1", ""))


def test_cuts_lie_at_modules_that_torch_fx_traced_through():
    one = case(torch.sigmoid)
    built = _, model, inputs, targets = build(one, one_f_one_b(ranks=2, microbatches=2), 4, capture=symbolic)
    assert_same(run(*built), loop(model, mse, inputs, targets, 2))


LOST = {
    "no_grad": (symbolic, without_gradient, r"module 2 \(Layer\): got gradients that are switched off"),
    "autocast": (symbolic, cast, r"module 2 \(Layer\): got autocast to \[torch.bfloat16\]"),
    "draws": (symbolic, lambda x: x + torch.rand(WIDTH), r"module 2 \(Layer\): got random numbers that do not depend"),
    "a custom function": (
        exported,
        negated,
        r"module 2 \(Layer\): got the custom autograd function Negated",
    ),
    "a region in a region": (exported, nested, r"module 2 \(Layer\): got gradients that are switched off"),
}


@pytest.mark.parametrize("what", LOST)
def test_what_a_front_end_loses_is_refused_by_name(what):
    front_end, then, message = LOST[what]
    with pytest.raises(fpipe.CaptureError, match=message):
        build(case(then), one_f_one_b(ranks=2, microbatches=2), 4, capture=front_end)


def test_what_a_front_end_keeps_is_not_refused():
    built = _, model, inputs, targets = build(case(negated), one_f_one_b(2, 2), 4, capture=same)
    assert_same(run(*built), loop(model, mse, inputs, targets, 2))


def other(model, inputs):
    return nn.ModuleDict({"other": model})


def failing(model, inputs):
    raise ValueError("no such model")


WRONG = {
    "no module": (lambda model, inputs: (model, inputs), "got tuple, expected a module"),
    "other names": (other, "parameter other.0.linear.weight: got one that the model does not have"),
    "another result": (lambda model, inputs: model[:2], "the model: got a graph that returns|changes"),
    "an error": (failing, "the front end failing could not read it: no such model"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_front_ends_are_told_what_is_wrong(what):
    front_end, message = WRONG[what]
    with pytest.raises(fpipe.CaptureError, match=message):
        build(case(lambda x: x[:, :2]), one_f_one_b(ranks=1, microbatches=2), 4, capture=front_end)


@pytest.mark.parametrize("capture", [lambda model: model, lambda *given: given, lambda a, b, c=3: a])
def test_a_function_must_say_which_of_the_two_it_is(capture):
    with pytest.raises(fpipe.InputError, match=r"\(model, inputs\) -> module, or a graph made by hand, a function"):
        build(case(torch.tanh), one_f_one_b(ranks=2, microbatches=2), 4, capture=capture)
