# SPDX-License-Identifier: Apache-2.0
"""Draws in branches on data are keyed, are refused without a seed, and do not influence draws elsewhere."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import fpipe
from fpipe.tensors import random
from schedules import gpipe, one_f_one_b, zb_h1
from tests.common.cases import WIDTH, mse
from tests.common.comparison import assert_same
from tests.common.running import run, run_reference
from tests.common.unusual_models import Switch

SEED = 3


def switching(how, cuts=("1",), draw=functional.dropout):
    class First(nn.Linear):
        """Returns its input, so that the data decide the branch."""

        def forward(self, x):
            return x + 0 * super().forward(x)

    model = nn.Sequential(First(WIDTH, WIDTH), Switch(draw), nn.Linear(WIDTH, WIDTH))
    x = torch.ones(4, WIDTH)
    pipe = fpipe.pipeline(model, example=(x,), targets=x, loss=mse, schedule=how, cuts=cuts, unsplittable=Switch)
    return pipe, model, (torch.cat([x, -x]).roll(2, 0),), torch.cat([x, x])


def test_draws_that_only_data_decide_are_keyed_and_do_not_advance_the_generator():
    """The capture sees no draw at all."""
    results = []
    for how, cuts in ((gpipe(2, 4), ("1",)), (one_f_one_b(3, 4), ("1", "2")), (gpipe(1, 4), ())):
        pipe, model, inputs, targets = switching(how, cuts)
        model.load_state_dict(results[0][0] if results else model.state_dict())
        before = torch.get_rng_state()
        got = run(pipe, model, inputs, targets, seed=SEED)
        assert torch.equal(torch.get_rng_state(), before)
        assert_same(got, run_reference(pipe, model, inputs, targets, seed=SEED))
        assert torch.equal(torch.get_rng_state(), before)
        results.append((model.state_dict(), got))
        torch.rand(3)
    assert_same(results[0][1], results[1][1])
    assert_same(results[0][1], results[2][1])
    assert not torch.equal(got.outputs, run(pipe, model, inputs, targets, seed=SEED + 1).outputs)


def test_a_branch_that_draws_without_a_seed_is_refused_when_it_is_taken():
    pipe, model, (x,), targets = switching(one_f_one_b(2, 4))
    before = torch.get_rng_state()
    for function in (fpipe.value_and_grad(pipe), fpipe.reference(pipe)):
        function(*pipe.init(model), (-x.abs(),), targets)
        with pytest.raises(fpipe.InputError, match=r"seed: got none, .*because module 1 draws random"):
            function(*pipe.init(model), (x,), targets)
    assert torch.equal(torch.get_rng_state(), before)


def test_verify_runs_the_model_eagerly_unless_it_draws():
    pipe, model, (x,), targets = switching(one_f_one_b(2, 4))
    assert fpipe.verify(pipe, model, (-x.abs(),), targets, seed=SEED).eager
    before = torch.get_rng_state()
    found = fpipe.verify(pipe, model, (x,), targets, seed=SEED)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.reference
    assert not found.eager


def test_a_loss_that_branches_may_draw():
    def loss(out, y):
        return functional.dropout(out, 0.5).sum() if out.sum() > 0 else mse(out, y)

    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), torch.randn(16, WIDTH), None
    y = torch.randn(16, WIDTH)
    results = []
    for how in (gpipe(2, 8), one_f_one_b(1, 8)):
        pipe = fpipe.pipeline(
            model, example=(x,), targets=y, loss=loss, schedule=how, cuts=["1"][: how.stages - 1], unsplittable="loss"
        )
        results.append(run(pipe, model, (x,), y, seed=SEED))
        assert_same(results[-1], run_reference(pipe, model, (x,), y, seed=SEED))
    assert_same(*results)


class Telling(Switch):
    """Returns which branch it took, as a Python value."""

    def forward(self, x):
        return super().forward(x), bool(x.sum() > 0)


class Listening(nn.Module):
    """Draws once more if the returned value says so."""

    def __init__(self):
        super().__init__()
        self.telling, self.drop = Telling(functional.dropout), nn.Dropout(0.5)

    def forward(self, x):
        x, positive = self.telling(x)
        return self.drop(self.drop(x) if positive else x)


def test_draws_that_depend_on_a_returned_python_value_are_refused():
    model, x = nn.Sequential(nn.Identity(), Listening(), nn.Linear(WIDTH, WIDTH)), torch.ones(4, WIDTH)
    pipe = fpipe.pipeline(
        model, example=(x,), targets=x, loss=mse, schedule=gpipe(2, 2), cuts=["2"], unsplittable=Telling
    )
    run(pipe, model, (-x,), x, seed=SEED)
    with pytest.raises(
        fpipe.InputError,
        match=r"module 1.telling: got \[True\] among what it returned",
    ):
        run(pipe, model, (x,), x, seed=SEED)


def test_the_same_modules_are_skipped_at_random_under_any_schedule_and_cut():
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return x if torch.rand([]) < 0.5 else functional.dropout(self.linear(x), 0.5)

    model, x = nn.Sequential(*[Skipping() for _ in range(4)], nn.Linear(WIDTH, WIDTH)), torch.randn(8, WIDTH)
    results = []
    for how, cuts in ((zb_h1(3, 8), ["1", "3"]), (gpipe(1, 8), [])):
        pipe = fpipe.pipeline(model, example=(x,), targets=x, loss=mse, schedule=how, cuts=cuts, unsplittable=Skipping)
        results.append(run(pipe, model, (x,), x, seed=SEED))
        assert_same(results[-1], run_reference(pipe, model, (x,), x, seed=SEED))
    assert_same(*results)


class Sharing(nn.Module):
    """Uses a dropout module that others use, too, before it branches."""

    def __init__(self, drop):
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), drop

    def forward(self, x):
        x = self.drop(x)
        return self.linear(x) if x.sum() > 0 else x


def test_draws_in_branches_do_not_change_draws_outside(monkeypatch):
    drop, x, found = nn.Dropout(0.5), torch.ones(4, WIDTH), set()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), drop, Sharing(drop), drop)
    pipe = fpipe.pipeline(model, example=(x,), targets=x, loss=mse, schedule=gpipe(1, 2), unsplittable=Sharing)
    reseed = random.reseed

    def noted(key, label, device):
        found.add(label)
        reseed(key, label, device)

    monkeypatch.setattr(random, "reseed", noted)
    run(pipe, model, (x,), x, seed=SEED)
    assert found == {random.label("1", 0), random.stream_label("2", 0), random.label("1", 1)}
