# SPDX-License-Identifier: Apache-2.0
"""Stages that record the same, with other parameters, share what is made of their graphs; what is recorded decides."""

import pytest
import torch
from torch import nn

import fpipe
from fpipe.stages import metadata
from schedules import one_f_one_b, zb_h1
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.running import run, run_reference

RANKS = 5


class Layer(nn.Module):
    """A layer that scales by a number, which no name or shape shows."""

    def __init__(self, scale=0.5, before=True):
        super().__init__()
        self.linear, self.scale, self.before = nn.Linear(4, 4), scale, before

    def forward(self, x):
        """Scale before or after the product."""
        return x + (self.linear(x * self.scale) if self.before else self.linear(x) * self.scale)


class Held(Layer):
    """The same, adding a constant that it made itself."""

    def forward(self, x):
        """Add zeros."""
        return super().forward(x) + torch.zeros(4)


def build(layers, how=None, backward="graph"):
    torch.manual_seed(0)
    model, x = nn.Sequential(*layers), torch.randn(10, 4)
    cuts = [str(k) for k in range(1, RANKS)]
    gradients = fpipe.Gradients(backward=backward)
    how = how or one_f_one_b(RANKS, microbatches=RANKS)
    pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=how, cuts=cuts, gradients=gradients)
    return pipe, model, (x,), None


def forwards(pipe):
    """Return the number of each stage's forward, from 0 on; equal ones are shared."""
    found = {}
    return [found.setdefault(id(stage.functions.forward), len(found)) for stage in pipe.stages]


@pytest.mark.parametrize("how", [one_f_one_b(RANKS, microbatches=RANKS), zb_h1(RANKS, microbatches=RANKS)], ids=repr)
def test_stages_of_one_form_share_functions_and_are_exact(how):
    """The first receives no cotangent to pass on, and the last has the loss."""
    built = build([Layer() for _ in range(RANKS)], how)
    assert forwards(built[0]) == [0, 1, 1, 1, 2]
    assert_same(run(*built), run_reference(*built))
    kind = "backward_input" if how.factory is zb_h1 else "backward"
    functions = {getattr(stage.functions, kind) for stage in built[0].stages[1:4]}
    assert len(functions) == 1


def frozen():
    layer = Layer()
    layer.linear.bias.requires_grad_(False)
    return layer


OTHERS = {
    "another number": lambda: Layer(0.25),
    "the other sign": lambda: Layer(-0.5),
    "a number of another kind": lambda: Layer(1),
    "another order": lambda: Layer(before=False),
    "a frozen parameter": frozen,
    "a constant": Held,
}


@pytest.mark.parametrize("other", OTHERS)
def test_stages_that_record_anything_else_share_nothing(other):
    scale = 1.0 if other == "a number of another kind" else 0.5
    built = build([Layer(scale), Layer(scale), OTHERS[other](), Layer(scale), Layer(scale)])
    assert forwards(built[0]) == [0, 1, 2, 1, 3]
    assert_same(run(*built), run_reference(*built))


def test_stages_that_train_share_nothing_with_frozen_ones_of_their_form():
    """Else their outputs would pass for ones that need no gradient."""
    built = build([*[Layer().requires_grad_(False) for _ in range(2)], *[Layer() for _ in range(3)]])
    got = run(*built)
    assert got.grads.keys() == {f"{k}.linear.{name}" for k in (2, 3, 4) for name in ("weight", "bias")}
    assert_same(got, loop(built[1], torch.mean, built[2], None, RANKS))


class Summing(nn.Module):
    """A layer that sums over rows, so that its cotangent is one row that is repeated without memory."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2, 4))

    def forward(self, x):
        """Add the sum of all rows."""
        return self.bias + x.sum(0)


@pytest.fixture
def watches(monkeypatch):
    """A list that gets an entry for each forward of a stage on fake tensors."""
    made = []

    class Watch(metadata.ForwardWatch):
        def __init__(self):
            super().__init__()
            made.append(self)

    monkeypatch.setattr(metadata, "ForwardWatch", Watch)
    return made


@pytest.mark.parametrize("backward", ["graph", "autograd"])
def test_stages_of_one_form_run_once_on_fake_tensors(watches, backward):
    pipe, *_ = build([Layer() for _ in range(RANKS)], backward=backward)
    assert len(watches) == 3, "the first, those between, and the last"
    specs = [(stage.totals, stage.wiring.cotangents, stage.wiring.outputs) for stage in pipe.stages]
    assert [specs[1]] * 2 == specs[2:4] != specs[:2]


def test_stages_of_one_form_with_other_cotangents_run_apart(watches):
    """What stage 2 receives is laid out in another way than what stage 1 does, which therefore runs on its own."""
    built = build([Layer(), Layer(), Layer(), Summing(), Layer()])
    assert len(watches) == 5
    assert forwards(built[0]) == [0, 1, 2, 3, 4]
    assert_same(run(*built), run_reference(*built))


def test_stages_of_one_form_are_compiled_once():
    compiled = []

    def compiler(module, examples):
        compiled.append(module)
        return module.forward

    pipe, model, inputs, _ = build([Layer() for _ in range(RANKS)], backward=compiler)
    fpipe.value_and_grad(pipe)(*pipe.init(model), inputs)
    assert len(compiled) == 2 + 3, (
        "a forward of the last and one of all others; a backward of these two, and of the first"
    )
