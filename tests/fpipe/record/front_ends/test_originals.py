# SPDX-License-Identifier: Apache-2.0
"""A loss that reads Python state of the original model, which the forward changes in the copy, is refused.

What the forward has left there before the pipeline was built, or doesn't change, may be read.
"""

import pytest
import torch
from torch import nn

import fpipe
from tests.common.cases import WIDTH, mse
from tests.common.running import require_eager, staged
from tests.common.sizes import sampled


class Box:
    """An object of the user's."""

    gain = 1.0


class Model(nn.Module):
    """Two linears; the forward leaves something behind."""

    def __init__(self, leave):
        super().__init__()
        self.a, self.b, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), leave
        self.gain, self.table, self.box, self.pairs = 1.0, {"gain": 1.0}, Box(), [Box()]

    def forward(self, x):
        self.leave(self)
        return self.b(self.a(x).relu())

    def loss(self, outputs, targets):
        return mse(outputs, targets) * self.gain


def batch():
    x, y = torch.randn(2, 8, WIDTH)
    return (x,), y


def weighted(gain):
    """A loss that is multiplied by what `gain` returns."""
    return lambda outputs, targets: mse(outputs, targets) * gain()


SETTING = {
    "gain": lambda model: setattr(model, "gain", 2.0),
    "table": lambda model: model.table.update(gain=2.0),
    "box": lambda model: setattr(model.box, "gain", 2.0),
    "pairs": lambda model: setattr(model.pairs[0], "gain", 2.0),
}


def through_the_model(model, name):
    return {
        "gain": lambda: model.gain,
        "table": lambda: model.table["gain"],
        "box": lambda: model.box.gain,
        "pairs": lambda: model.pairs[0].gain,
    }[name]


def without_the_model(model, name):
    table, box, pairs = model.table, model.box, model.pairs
    return {"table": lambda: table["gain"], "box": lambda: box.gain, "pairs": lambda: pairs[0].gain}[name]


@sampled(2)
@pytest.mark.parametrize(
    ("name", "reader"),
    [*[(name, through_the_model) for name in SETTING], *[(name, without_the_model) for name in [*SETTING][1:]]],
)
def test_losses_that_read_what_the_forward_changes_are_refused(name, reader):
    model = Model(SETTING[name])
    gain = reader(model, name)
    with pytest.raises(fpipe.CaptureError, match=rf"module \(root\) \(Model\), attribute '{name}': got a use of it"):
        staged(model, *batch(), ["b"], loss=weighted(gain))
    assert gain() == 1.0, "the original is as it was"
    model(torch.ones(1, WIDTH))
    assert gain() == 2.0
    require_eager(model, *batch(), steps=2, cuts=["b"], loss=weighted(gain))


def test_methods_of_the_model_that_read_what_the_forward_changes_are_refused():
    model = Model(SETTING["gain"])
    with pytest.raises(fpipe.CaptureError, match="attribute 'gain': got a use of it from outside the model"):
        staged(model, *batch(), ["b"], loss=model.loss)


def test_hooks_that_close_over_the_model_read_its_changed_state():
    model = Model(SETTING["gain"])
    model.b.register_forward_hook(lambda _, args, made: made * model.gain)
    require_eager(model, *batch(), cuts=["b"])


@sampled(2)
@pytest.mark.parametrize("name", SETTING)
def test_losses_may_read_state_that_the_forward_does_not_change(name):
    model = Model(SETTING["table" if name == "gain" else "gain"])
    require_eager(model, *batch(), cuts=["b"], loss=weighted(through_the_model(model, name)))


def test_state_set_to_an_equal_number_is_unchanged():
    model = Model(lambda model: setattr(model, "gain", float("1")))
    require_eager(model, *batch(), cuts=["b"], loss=model.loss)
