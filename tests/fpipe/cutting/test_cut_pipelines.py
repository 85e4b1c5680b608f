# SPDX-License-Identifier: Apache-2.0
"""Pipelines are cut where `cuts`, `stages` and `unsplittable` say, and compute what one device does."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe import CutError
from fpipe.record.variant import Variant
from schedules import gpipe
from tests.common.cases import WIDTH, mse
from tests.common.comparison import Result, assert_same
from tests.common.loops import eval_loop, loop
from tests.common.options import grouped
from tests.common.running import run
from tests.common.sizes import sampled


def pipeline(model, x, how=None, **where):
    how = how or gpipe(ranks=4, microbatches=2)
    return fpipe.pipeline(model, example=(x,), targets=x, loss=mse, schedule=how, **grouped(where))


@sampled(1)
@pytest.mark.parametrize("capture", ["export", "modules"])
def test_an_index_names_a_part_of_a_sequence(capture):
    layer = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(layer, nn.Identity(), nn.Tanh(), layer, nn.Linear(WIDTH, WIDTH))
    x = torch.randn(4, WIDTH)
    pipe = pipeline(model, x, gpipe(ranks=3, microbatches=2), cuts=[3, 4], recording=fpipe.Recording(front_end=capture))
    assert [stage.parameters for stage in pipe.stages] == [
        ("0.weight", "0.bias"),
        ("0.weight", "0.bias"),
        ("4.weight", "4.bias"),
    ]
    assert_same(run(pipe, model, (x,), x), loop(model, mse, (x,), x, 2))


class Net(nn.Module):
    """Blocks of different sizes between a first and a last layer."""

    def __init__(self, *sizes):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, n), nn.GELU(), nn.Linear(n, WIDTH)) for n in sizes)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def begins(pipe):
    """Return the first parameter of each stage but the first."""
    return [stage.parameters[0] for stage in pipe.stages[1:]]


@sampled(1)
@pytest.mark.parametrize(
    ("where", "first"),
    [
        ({"cuts": nn.Sequential}, ["blocks.1.0", "blocks.2.0", "blocks.4.0"]),
        ({"cuts": "blocks.*"}, ["blocks.1.0", "blocks.2.0", "blocks.4.0"]),
        ({"cuts": "blocks.*.2"}, ["blocks.0.2", "blocks.1.2", "blocks.3.2"]),
        ({"cuts": [1, "blocks.2.2", 6]}, ["blocks.0.0", "blocks.2.2", "last"]),
        ({"unsplittable": ["blocks.*"]}, ["blocks.1.0", "blocks.2.0", "blocks.4.0"]),
        ({"unsplittable": nn.Sequential}, ["blocks.1.0", "blocks.2.0", "blocks.4.0"]),
    ],
)
def test_stages_begin_where_the_arguments_say(where, first):
    model, x = Net(8, 32, 8, 8, 16), torch.randn(4, WIDTH)
    pipe = pipeline(model, x, **where)
    assert begins(pipe) == [f"{name}.weight" for name in first]
    assert_same(run(pipe, model, (x,), x), loop(model, mse, (x,), x, 2))


@sampled(2)
@pytest.mark.parametrize(
    ("where", "words"),
    [
        (
            {"cuts": [1, "blocks.1.2", 4], "unsplittable": nn.Sequential},
            "'blocks.1.2', inside 'blocks.1' (Sequential): ",
        ),
        (
            {"unsplittable": Net},
            "the number of modules that run one after the other, the loss among them. No stage may",
        ),
        ({"unsplittable": Net}, "No stage may begin inside the model (Net): it can't be cut, because of unsplittable"),
        (
            {"cuts": [1, 2, 5]},
            "got 5, expected an index below 5, counted from zero: the model itself calls first",
        ),
        ({"unsplittable": ["blocks.7"]}, "unsplittable: got 'blocks.7', expected the name of a module"),
        ({"unsplittable": ["x.*"]}, "unsplittable: got 'x.*', which no call of a module matches"),
    ],
)
def test_pipelines_that_cannot_be_cut_as_asked_are_refused(where, words):
    with pytest.raises(CutError) as caught:
        pipeline(Net(8, 8, 8), torch.randn(4, WIDTH), **where)
    assert words in str(caught.value)


class Running(nn.Module):
    """Writes a slice of one tensor in every layer, so that it cannot be cut between the first write and the last."""

    def __init__(self):
        super().__init__()
        self.before = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.after = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x):
        x = self.before(x)
        out = torch.zeros_like(x)
        for k, layer in enumerate(self.layers):
            x = layer(x)
            out[:, k] = x[:, k]
        return self.after(x + out)


def test_even_cuts_avoid_places_that_cannot_be_cut():
    model, x = Running(), torch.randn(4, WIDTH)
    for how in (gpipe(ranks=4, microbatches=2), gpipe(ranks=7, microbatches=2)):
        pipe = pipeline(model, x, how)
        assert len([name for name in begins(pipe) if "layers" in name]) < 3
        assert_same(run(pipe, model, (x,), x), loop(model, mse, (x,), x, 2))
    with pytest.raises(CutError, match=r"stage \d: got a value from another stage that is modified in place"):
        pipeline(model, x, cuts=["layers.1", "layers.2", "layers.3"])
    with pytest.raises(
        CutError,
        match=r"rejected. stage \d: got a value from another stage that is modified in place",
    ):
        pipeline(model, x, cuts="layers.*")


def test_a_model_is_cut_at_the_same_modules_in_eval_mode():
    layers = [nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.Linear(WIDTH, WIDTH)]
    model, x = nn.Sequential(*layers), torch.randn(4, WIDTH)
    pipe = pipeline(model, x, gpipe(ranks=3, microbatches=2), cuts=[1, 3])
    got = fpipe.evaluate(pipe)(*pipe.init(model), (x,), x)
    assert_same(Result(got.loss, got.outputs, {}, got.buffers), eval_loop(model, mse, (x,), x, 2))


class Checkpointed(nn.Module):
    """A layer, and two that are recomputed in the backward."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return checkpoint(lambda x: self.c(self.b(x).tanh()), self.a(x), use_reentrant=False)


def test_no_stage_begins_inside_a_checkpoint():
    model, x = nn.Sequential(*[Checkpointed() for _ in range(3)]), torch.randn(4, WIDTH)
    pipe = pipeline(model, x, gpipe(ranks=3, microbatches=2), cuts=Checkpointed)
    assert begins(pipe) == ["1.a.weight", "2.a.weight"]
    assert_same(run(pipe, model, (x,), x), loop(model, mse, (x,), x, 2))
    with pytest.raises(CutError, match="got 2 calls of the class Checkpointed at which a stage can begin"):
        pipeline(model, x, cuts=Checkpointed)
    with pytest.raises(CutError, match=r"cuts: got '0\.c', inside '0' \(Checkpointed\): "):
        pipeline(model, x, gpipe(ranks=2, microbatches=2), cuts="0.c")
    pipe = pipeline(model, x, gpipe(ranks=6, microbatches=2))
    assert not [name for name in begins(pipe) if name.split(".")[1] == "c"]


class HalvedInTraining(nn.Module):
    """A model whose even cut differs between modes: training has a large layer in the middle, which eval mode skips."""

    def __init__(self):
        super().__init__()
        self.first, self.aside, self.last = nn.Linear(4, 4), nn.Linear(4, 40), nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        if self.training:
            x = x + self.aside(x).mean()
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x)


def test_evaluation_is_cut_where_training_is():
    """Ranks hold the parameters of the stages of training, so the stages of eval mode must not read others."""
    x, variant = torch.randn(4, 4), Variant(training=False, loss=True, outputs=True)
    how = gpipe(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(HalvedInTraining(), example=(x,), loss=torch.mean, schedule=how, stages=2)
    for stage, trained in zip(pipe.plan(variant).assembly.stages, pipe.stages, strict=True):
        assert set(stage.parameters) <= set(trained.parameters)
    batching = pipe.captures.batchings[True]
    microbatch = batching.split(batching.example)[0]
    captured, positions = pipe.captures.of(variant, microbatch).captured, pipe.captures.positions(variant, microbatch)
    assert pipe.captures.cuts.positions(captured, pipe.model) != positions, "by itself it would be cut elsewhere"
