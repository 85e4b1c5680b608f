# SPDX-License-Identifier: Apache-2.0
"""A change that no comparison sees is found by recording again."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import fpipe
from fpipe.pipelines.recheck import SHARE
from schedules import one_f_one_b


class Scaled(nn.Module):
    """Multiplies by a number that `find` finds in `state`."""

    def __init__(self, state, find):
        super().__init__()
        self.inner, self.state, self.find = nn.Linear(4, 4), state, find

    def forward(self, x):
        return self.inner(x) * self.find(self.state)


class Ticks:
    """Counts in an iterator, which is copied neither for the capture nor for the comparison."""

    def __init__(self):
        self.next = itertools.count().__next__

    def __deepcopy__(self, memo):
        return self


def later(ticks):
    for _ in range(50):
        ticks.next()


def fill(array):
    array[0] = 7


HIDDEN = {
    "a counter in an iterator": (Ticks, lambda ticks: 1 + ticks.next() // 40, later),
    "an array": (lambda: np.ones(4), lambda array: float(array[0]), fill),
}


def build(what):
    make, find, change = HIDDEN[what]
    state = make()
    model, x = nn.Sequential(nn.Linear(4, 4), Scaled(state, find)), torch.randn(4, 4)
    how = one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=how, cuts=["1"])
    return pipe, model, x, lambda: change(model[1].state)


@pytest.mark.parametrize("what", HIDDEN)
def test_a_change_that_nobody_sees_is_found_on_request(what):
    pipe, _, _, change = build(what)
    pipe.recheck()
    change()
    with pytest.raises(fpipe.InputError, match=r"module 1: got mul\[\d.*\], expected mul\[1.*\], as when the"):
        pipe.recheck()


def test_a_later_step_finds_it_once_the_time_of_steps_has_paid_for_it():
    pipe, model, x, change = build("an array")
    step, state = fpipe.value_and_grad(pipe), pipe.init(model)
    step(*state, (x,))
    change()
    step(*state, (x,))
    assert 0 < pipe.rechecks.spent < 1
    pipe.rechecks.spent += pipe.rechecks.cost / SHARE
    with pytest.raises(fpipe.InputError, match="as when the model was recorded"):
        step(*state, (x,))


def test_a_save_and_the_end_of_a_pipeline_find_it(tmp_path):
    pipe, model, _, change = build("an array")
    params, _ = pipe.init(model)
    change()
    pipe.rechecks.spent = pipe.rechecks.cost
    with pytest.raises(fpipe.InputError, match="as when the model was recorded"):
        fpipe.save(pipe, tmp_path / "run", params=params)
    assert not (tmp_path / "run").exists()
    with pytest.raises(fpipe.InputError, match="as when the model was recorded"):
        pipe.close()
    assert pipe.ranks.is_closed


def test_the_end_of_a_pipeline_does_not_hide_an_error():
    pipe, _, _, change = build("an array")
    with pytest.raises(KeyError, match="mine"), pipe:  # noqa: PT012
        change()
        pipe.rechecks.spent = pipe.rechecks.cost
        raise KeyError("mine")
    assert pipe.ranks.is_closed


def test_recording_again_finds_nothing_where_nothing_has_changed():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)), torch.randn(8, 4)
    how = one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(model, example=(x,), loss=lambda y: y.square().mean(), schedule=how, cuts=["1"])
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    _, grads = step(*state, (x,), seed=0)
    fpipe.evaluate(pipe)(*state, (x,))
    model.eval()
    pipe.recheck()
    model.train()
    _, again = step(*state, (x,), seed=0)
    assert all(torch.equal(grads[name], again[name]) for name in grads)


class Counting:
    """A class that counts out of sight of a snapshot."""

    calls = 0


class CountsLonger(nn.Module):
    """A model that counts its calls with long batches only, and scales by the count."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        if x.shape[1] > 6:
            Counting.calls += 1
        return self.outer(self.inner(x) * (1 + Counting.calls))


def test_state_that_changes_only_with_another_length_is_refused_at_its_first_batch():
    model = CountsLonger()
    pipe = fpipe.pipeline(
        model,
        example=(torch.randn(4, 4, 8),),
        loss=lambda out: out.square().mean(),
        schedule=one_f_one_b(ranks=2, microbatches=2),
        cuts=["outer"],
    )
    step, state = fpipe.value_and_grad(pipe), pipe.init(model)
    for length in (4, 5):
        step(*state, (torch.randn(4, length, 8),))
    with pytest.raises(fpipe.InputError, match="calls"):
        step(*state, (torch.randn(4, 9, 8),))
