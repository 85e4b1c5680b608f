# SPDX-License-Identifier: Apache-2.0
"""Torch's modes around a step and inside a model: gradients enabled or not, inference mode, and autocast."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b
from tests.common.cases import mse
from tests.common.loops import loop
from tests.common.options import grouped
from tests.common.running import require_eager
from tests.common.sizes import covering, sampled

BACKWARDS = pytest.mark.parametrize("backward", ["autograd", "graph"])

CUTS = (["1"], ["1.inside"])


class Asking(nn.Module):
    """Computes something else if gradients are disabled, or if its input requires none; may switch them itself."""

    def __init__(self):
        super().__init__()
        self.before, self.inside = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.before(x)
        h = h + (1 if torch.is_grad_enabled() else 2)
        h = h * (3 if h.requires_grad else 4)
        with torch.no_grad():
            h = h + (5 if torch.is_grad_enabled() else self.before(x))
        with torch.enable_grad():
            h = h + (7 if (h * self.inside.weight.sum()).requires_grad else 8)
        return self.inside(h)


def build(cuts, frozen=(), **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Asking())
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    how = one_f_one_b(ranks=2, microbatches=4)
    loss = nn.functional.mse_loss
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=loss, schedule=how, cuts=cuts, **grouped(options))
    return model, pipe, (x,), y


def run_alone(model, x):
    return torch.cat([model(rows) for rows in x.split(2)])


@sampled(2)
@pytest.mark.parametrize(
    ("cuts", "options"),
    [
        (["1"], {}),
        (["1.inside"], {}),
        (["1.inside"], {"backward": "graph"}),
        (["1"], {"capture": "export"}),
        (["1.inside"], {"capture": "dynamo"}),
    ],
)
def test_an_evaluation_answers_as_without_gradients(cuts, options):
    model, pipe, inputs, y = build(cuts, **options)
    with torch.no_grad():
        expected = run_alone(model.eval(), *inputs)
    assert same_bits(fpipe.evaluate(pipe)(*pipe.init(model), inputs, y).outputs, expected)
    assert same_bits(fpipe.predict(pipe)(*pipe.init(model), inputs), expected)


@sampled(2)
@covering(cuts=CUTS, backward=["autograd", "graph"], frozen=[("0",), ("0", "1.before")])
def test_training_answers_as_with_gradients_even_in_a_frozen_stage(cuts, backward, frozen):
    model, pipe, inputs, y = build(cuts, frozen=frozen, backward=backward)
    with torch.no_grad():  # around the build, which makes no difference
        pipe = pipe.rebuilt(model)
    fpipe.verify(pipe, model, inputs, y)
    out, _ = fpipe.value_and_grad(pipe, outputs=True)(*pipe.init(model), inputs, y)
    assert same_bits(out.outputs, run_alone(model, *inputs).detach())


@pytest.mark.parametrize("cuts", CUTS)
def test_a_hook_on_what_requires_a_gradient_is_no_obstacle_to_an_evaluation(cuts):
    def forward(self, x):
        h = self.before(x)
        if h.requires_grad:
            h.register_hook(lambda grad: None)
        return self.inside(h)

    kind = type("Hooking", (Asking,), {"forward": forward})
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Linear(8, 8), kind()), torch.randn(2, 8, 8)
    how = one_f_one_b(ranks=2, microbatches=4)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=nn.functional.mse_loss, schedule=how, cuts=cuts)
    with torch.no_grad():
        expected = run_alone(model, x)
    assert same_bits(fpipe.evaluate(pipe)(*pipe.init(model), (x,), y).outputs, expected)


@BACKWARDS
def test_a_module_that_is_a_frozen_stage_is_asked_with_gradients_enabled(backward):
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(Asking().requires_grad_(False), nn.Linear(8, 8)), torch.randn(2, 8, 8)
    how = one_f_one_b(ranks=2, microbatches=4)
    pipe = fpipe.pipeline(
        model,
        example=(x,),
        targets=y,
        loss=nn.functional.mse_loss,
        schedule=how,
        cuts=["1"],
        gradients=fpipe.Gradients(backward=backward),
    )
    out, _ = fpipe.value_and_grad(pipe, outputs=True)(*pipe.init(model), (x,), y)
    assert same_bits(out.outputs, run_alone(model, x).detach())


# ----------------------------------------------------------------------------------------------------- inference mode


HOW = one_f_one_b(ranks=2, microbatches=2)


def plain_parts():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), torch.randn(4, 4), torch.randn(4, 4)


def build_plain(model, x, y, backward):
    return fpipe.pipeline(
        model, example=(x,), targets=y, loss=mse, schedule=HOW, cuts=["2"], gradients=fpipe.Gradients(backward=backward)
    )


@BACKWARDS
def test_steps_with_gradients_are_refused_in_inference_mode(backward):
    model, x, y = plain_parts()
    pipe = build_plain(model, x, y, backward)
    state = pipe.init(model)
    for function in (fpipe.value_and_grad(pipe), fpipe.reference(pipe)):
        with torch.inference_mode(), pytest.raises(fpipe.InputError, match=r"got torch\.inference_mode around it"):
            function(*state, (x,), y)
    with torch.inference_mode(), pytest.raises(fpipe.InputError, match=r"got torch\.inference_mode around it"):
        fpipe.verify(pipe, model, (x,), y)
    got, grads = fpipe.value_and_grad(pipe)(*state, (x,), y)
    assert same_bits(got.loss, loop(model, mse, (x,), y, 2).loss)
    assert len(grads) == 4


@BACKWARDS
def test_evaluating_and_building_work_in_inference_mode(backward):
    model, x, y = plain_parts()
    with torch.inference_mode():
        pipe = build_plain(model, x, y, backward)
        state = pipe.init(model)
        inside = fpipe.evaluate(pipe)(*state, (x,), y)
    outside = fpipe.evaluate(pipe)(*pipe.init(model), (x,), y)
    assert same_bits(inside.loss, outside.loss)
    assert same_bits(inside.outputs, outside.outputs)
    _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), y)
    want = loop(model, mse, (x,), y, 2).grads
    assert grads.keys() == want.keys()
    assert all(same_bits(grads[name], want[name]) for name in want)


# ----------------------------------------------------------------------------------------------------------- autocast


WIDTH, WORDS = 8, 16


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


def build_language(model, backward, cut):
    torch.manual_seed(0)
    ids, targets = torch.randint(WORDS, (4, 6)), torch.randint(WORDS, (4, 6))
    how = one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(
        model,
        example=(ids,),
        targets=targets,
        loss=loss,
        schedule=how,
        cuts=[cut],
        gradients=fpipe.Gradients(backward=backward),
    )
    return pipe, ids, targets


@sampled(2)
@covering(cut=["a", "b", "head"], backward=["autograd", "graph"])
def test_a_tied_embedding_may_be_cut_apart_under_one_autocast(cut, backward):
    pipe, ids, targets = build_language(model := Language(inside=True), backward, cut)
    assert fpipe.verify(pipe, model, (ids,), targets).eager


class Twice(Language):
    """Uses the weight in two multiplications."""

    def forward(self, ids):
        with torch.autocast("cpu", torch.bfloat16):
            h = functional.one_hot(ids, WORDS).float() @ self.embed.weight
            return self.head(self.b(h).sin())


def test_a_weight_that_is_cast_on_both_sides_of_a_cut_is_refused():
    with pytest.raises(fpipe.CutError, match="one autocast"):
        build_language(Twice(), "autograd", "head")


@sampled(1)
@covering(cut=["a", "b", "head"], backward=["autograd", "graph"])
def test_autocast_around_a_step_is_autocast_around_the_forward(cut, backward):
    """One pipeline, in turns."""
    pipe, ids, targets = build_language(model := Language(), backward, cut)
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

    within, _, _ = build_language(like := Language(inside=True), backward, cut)
    like.load_state_dict(model.state_dict())
    expected, wanted = fpipe.value_and_grad(within, outputs=True)(*within.init(like), (ids,), targets)
    assert torch.equal(mixed.outputs, expected.outputs)
    assert torch.equal(mixed.loss, expected.loss)
    assert all(torch.equal(grads[name], grad) for name, grad in wanted.items())


@sampled(1)
@BACKWARDS
def test_autocast_around_building_a_pipeline_changes_nothing(backward):
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        pipe, ids, targets = build_language(model := Language(), backward, "b")
        assert "float32" in str(pipe)
    step, _ = fpipe.value_and_grad(pipe, outputs=True)(*pipe.init(model), (ids,), targets)
    assert step.outputs.dtype is torch.float32
    assert fpipe.verify(pipe, model, (ids,), targets).eager


class Reusing(nn.Module):
    """Multiplies by its weight twice under autocast, and once after it."""

    def __init__(self, between):
        super().__init__()
        self.weight, self.between = nn.Parameter(torch.randn(WIDTH, WIDTH)), between

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = x @ self.weight
            if self.between == "gradients disabled":
                with torch.no_grad():
                    x.sum()
            elif self.between == "autocast off":
                with torch.autocast("cpu", enabled=False):
                    x = x.float().sin()
            if self.between != "another autocast":
                x = x @ self.weight
        if self.between == "another autocast":
            with torch.autocast("cpu", torch.bfloat16):
                x = x @ self.weight
        return x.float() @ self.weight


@pytest.mark.parametrize("between", ["gradients disabled", "autocast off", "another autocast"])
def test_casts_are_shared_within_one_autocast_and_not_between_two(between):
    """Else gradients would be added before or after they are cast back."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Reusing(between), Reusing(between)), torch.randn(4, WIDTH)
    require_eager(model, (x,), backward="autograd")
