# SPDX-License-Identifier: Apache-2.0
"""State outside the model: globals, classes and the loss, which a pipeline reads again or requires to be unchanged."""

import pytest
from torch import nn

import fpipe
from schedules import one_f_one_b
from tests.common import watched_models
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.watched_models import TABLE, WAYS, Block, Loss, batch, build, run_step


def counted_loss(weight):
    def loss(outputs, targets):
        return (outputs - targets).square().mean() * weight

    def change(value):
        nonlocal weight
        weight = value

    return loss, change


def test_by_autograd_a_loss_reads_current_values():
    loss, change = counted_loss(1.0)
    pipe, model, _, x, y = build(loss=loss)
    run_step(pipe, model, x, y)
    change(3.0)
    assert_same(run_step(pipe, model, x, y), loop(model, loss, (x,), y, 3))


def test_by_autograd_a_loss_reads_its_current_attributes(monkeypatch):
    pipe, model, loss, x, y = build()
    run_step(pipe, model, x, y)
    loss.weight = 3.0
    monkeypatch.setitem(TABLE, "scale", 0.5)
    monkeypatch.setattr(Block, "kind", 2.0)  # blocks run as themselves
    assert_same(run_step(pipe, model, x, y), loop(model, loss, (x,), y, 3))


def test_changing_what_a_recorded_loss_closes_over_is_an_error():
    loss, change = counted_loss(1.0)
    pipe, model, _, x, y = build("graph", loss=loss)
    run_step(pipe, model, x, y)
    change(3.0)
    words = r"counted_loss.<locals>.loss, which closes over 'weight': got 3.0, expected 1.0, as when it was captured"
    with pytest.raises(fpipe.InputError, match=words + r".*pass it with the batch.*pipe\.rebuilt"):
        run_step(pipe, model, x, y)
    assert_same(run_step(pipe.rebuilt(model), model, x, y), loop(model, loss, (x,), y, 3))


OUTSIDE = {
    "a global": (
        lambda m, patch: patch.setattr(watched_models, "FACTOR", 2.0),
        r"global 'FACTOR': got 2.0, expected 1.0",
    ),
    "a global table": (lambda m, patch: patch.setitem(TABLE, "scale", 2.0), r"'TABLE'\['scale'\]: got 2.0, expected 1"),
    "a class": (lambda m, patch: patch.setattr(Block, "kind", 2.0), r"class Block, attribute 'kind': got 2.0, expect"),
    "a loss": (lambda m, patch: patch.setattr(m, "weight", 2.0), r"the 'loss'.weight: got 2.0, expected 1.0"),
    "a function": (
        lambda m, patch: patch.setattr(watched_models, "shifted", max),
        r"global 'shifted': got max, expected sh",
    ),
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_changing_state_outside_the_model_that_a_graph_has_read_is_an_error(what, monkeypatch):
    change, words = OUTSIDE[what]
    pipe, model, loss, x, y = build("graph")
    run_step(pipe, model, x, y)
    change(loss, monkeypatch)
    with pytest.raises(fpipe.InputError, match=words):
        run_step(pipe, model, x, y)
    monkeypatch.undo()
    assert_same(run_step(pipe, model, x, y), loop(model, loss, (x,), y, 3))


def test_changing_state_that_a_cut_module_has_read_is_an_error(monkeypatch):
    pipe, model, _, x, y = build("autograd")
    monkeypatch.setattr(watched_models, "FACTOR", 2.0)
    with pytest.raises(fpipe.InputError, match=r"global 'FACTOR': got 2.0, expected 1.0"):
        run_step(pipe, model, x, y)


def test_changing_a_loss_module_is_noticed():
    for backward in WAYS:
        loss = nn.SmoothL1Loss()
        pipe, model, _, x, y = build(backward, loss=loss)
        loss.beta = 0.5
        if backward == "autograd":
            assert_same(run_step(pipe, model, x, y), loop(model, loss, (x,), y, 3))
        else:
            with pytest.raises(
                fpipe.InputError, match=r"\(SmoothL1Loss\) of the loss, attribute 'beta': got 0.5, expe"
            ):
                run_step(pipe, model, x, y)


@pytest.mark.parametrize("capture", ["export", "dynamo", "fx"])
def test_front_ends_that_make_a_graph_notice_every_change(capture, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 2))
    x, y = batch()
    loss = Loss()
    how = one_f_one_b(ranks=2, microbatches=3)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=loss, schedule=how, cuts=["2"], capture=capture)
    run_step(pipe, model, x, y)
    for change, words in [
        (lambda: setattr(model[1], "p", 0.5), r"module 1 \(Dropout\), attribute 'p': got 0.5"),
        (lambda: model[0].requires_grad_(False), r"module 0 \(Linear\), parameter 'weight'"),
        (lambda: setattr(loss, "weight", 2.0), r"the 'loss'.weight: got 2.0"),
    ]:
        change()
        with pytest.raises(fpipe.InputError, match=words):
            run_step(pipe, model, x, y)
        pipe = pipe.rebuilt(model)
