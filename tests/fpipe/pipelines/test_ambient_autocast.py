"""Autocast around a step, and around a forward with a weight that is looked up and multiplied with."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import fpipe
from schedules import one_f_one_b
from tests.common.sizes import covering

WIDTH, WORDS = 8, 16
BACKWARDS = pytest.mark.parametrize("backward", ["autograd", "graph"])
CUTS = pytest.mark.parametrize("cut", ["a", "b", "head"])


class Language(nn.Module):
    """The head's weight is the embedding's."""

    def __init__(self, inside=False):
        super().__init__()
        self.embed, self.inside = nn.Embedding(WORDS, WIDTH), inside
        self.a, self.b, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.inside or torch.is_autocast_enabled("cpu")):
            return self.head(self.b(self.a(self.embed(ids)).sin()).sin())


def loss(outputs, targets):
    return functional.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten())


def build(model, backward, cut):
    torch.manual_seed(0)
    ids, targets = torch.randint(WORDS, (4, 6)), torch.randint(WORDS, (4, 6))
    how = one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(
        model, example=(ids,), targets=targets, loss=loss, schedule=how, cuts=[cut], backward=backward
    )
    return pipe, ids, targets


@covering(cut=["a", "b", "head"], backward=["autograd", "graph"])
def test_a_tied_embedding_may_be_cut_apart_under_one_autocast(cut, backward):
    pipe, ids, targets = build(model := Language(inside=True), backward, cut)
    assert fpipe.verify(pipe, model, (ids,), targets).eager


class Twice(Language):
    """Uses the weight in two multiplications."""

    def forward(self, ids):
        with torch.autocast("cpu", torch.bfloat16):
            h = functional.one_hot(ids, WORDS).float() @ self.embed.weight
            return self.head(self.b(h).sin())


def test_a_weight_that_is_cast_on_both_sides_of_a_cut_is_refused():
    with pytest.raises(fpipe.CutError, match="one autocast"):
        build(Twice(), "autograd", "head")


@covering(cut=["a", "b", "head"], backward=["autograd", "graph"])
def test_autocast_around_a_step_is_autocast_around_the_forward(cut, backward):
    """One pipeline, in turns."""
    pipe, ids, targets = build(model := Language(), backward, cut)
    step, (params, buffers) = fpipe.value_and_grad(pipe, outputs=True), pipe.init(model)
    plain, _ = step(params, buffers, (ids,), targets)
    with torch.autocast("cpu", torch.bfloat16):
        assert fpipe.verify(pipe, model, (ids,), targets).eager
        mixed, grads = step(params, buffers, (ids,), targets)
        assert fpipe.evaluate(pipe)(params, buffers, (ids,)).outputs.dtype is torch.bfloat16
    again, _ = step(params, buffers, (ids,), targets)
    assert mixed.outputs.dtype is torch.bfloat16
    assert torch.equal(plain.outputs, again.outputs)
    assert again.outputs.dtype is torch.float32

    within, _, _ = build(like := Language(inside=True), backward, cut)
    like.load_state_dict(model.state_dict())
    expected, wanted = fpipe.value_and_grad(within, outputs=True)(*within.init(like), (ids,), targets)
    assert torch.equal(mixed.outputs, expected.outputs)
    assert torch.equal(mixed.loss, expected.loss)
    assert all(torch.equal(grads[name], grad) for name, grad in wanted.items())


@BACKWARDS
def test_autocast_around_building_a_pipeline_changes_nothing(backward):
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        pipe, ids, targets = build(model := Language(), backward, "b")
        assert "float32" in str(pipe)
    step, _ = fpipe.value_and_grad(pipe, outputs=True)(*pipe.init(model), (ids,), targets)
    assert step.outputs.dtype is torch.float32
    assert fpipe.verify(pipe, model, (ids,), targets).eager
