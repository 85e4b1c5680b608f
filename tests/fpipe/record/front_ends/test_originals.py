# SPDX-License-Identifier: Apache-2.0
"""A loss that reads Python state of the original model, which the forward changes in the copy, is refused.

What the forward has left there before the pipeline was built, or doesn't change, may be read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from schedules import one_f_one_b
from tests.common.cases import WIDTH, mse


class Box:
    """An object of the user's."""

    gain = 1.0


class Model(nn.Module):
    """Two linears; the forward leaves something behind."""

    def __init__(self, leave: Callable[[Any], None]) -> None:
        super().__init__()
        self.a, self.b, self.__dict__["leave"] = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), leave
        self.gain, self.table, self.box, self.pairs = 1.0, {"gain": 1.0}, Box(), [Box()]

    def forward(self, x: Tensor) -> Tensor:
        """Run both."""
        self.leave(self)
        made: Tensor = self.b(self.a(x).relu())
        return made

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Weigh the loss by an attribute."""
        return mse(outputs, targets) * self.gain


def setting(name: str) -> Callable[[Any], None]:
    """Return what leaves 2 in an attribute, a dict, an object, or an object in a list."""

    def leave(model: Any) -> None:
        if name == "gain":
            model.gain = 2.0
        elif name == "table":
            model.table["gain"] = 2.0
        else:
            (model.box if name == "box" else model.pairs[0]).gain = 2.0

    return leave


def found(model: Any, name: str) -> Callable[[], float]:
    """Return what reads it through the model."""
    return {
        "gain": lambda: model.gain,
        "table": lambda: model.table["gain"],
        "box": lambda: model.box.gain,
        "pairs": lambda: model.pairs[0].gain,
    }[name]


def held(model: Any, name: str) -> Callable[[], float]:
    """Return what reads it without the model."""
    table, box, pairs = model.table, model.box, model.pairs
    return {"table": lambda: table["gain"], "box": lambda: box.gain, "pairs": lambda: pairs[0].gain}[name]


def pipeline(model: nn.Module, loss: Any) -> fpipe.Pipeline:
    """Return a pipeline of two stages."""
    x, y = torch.randn(2, 8, WIDTH)
    return fpipe.pipeline(model, example=(x,), targets=y, loss=loss, schedule=one_f_one_b(2, 4), cuts=["b"])


def weighted(gain: Callable[[], float]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss that is multiplied by what `gain` returns."""
    return lambda outputs, targets: mse(outputs, targets) * gain()


@pytest.mark.parametrize(
    ("name", "reader"),
    [("gain", found), *[(name, reader) for name in ("table", "box", "pairs") for reader in (found, held)]],
)
def test_losses_that_read_what_the_forward_changes_are_refused(name: str, reader: Any) -> None:
    model = Model(setting(name))
    gain = reader(model, name)
    with pytest.raises(fpipe.CaptureError, match=rf"module \(root\) \(Model\), attribute '{name}': got a use of it"):
        pipeline(model, weighted(gain))
    assert gain() == 1.0, "the original is as it was"
    model(torch.ones(1, WIDTH))
    assert gain() == 2.0
    x, y = torch.randn(2, 8, WIDTH)
    assert fpipe.verify(pipeline(model, weighted(gain)), model, (x,), y, steps=2).eager


def test_methods_of_the_model_that_read_what_the_forward_changes_are_refused() -> None:
    model = Model(setting("gain"))
    with pytest.raises(fpipe.CaptureError, match="attribute 'gain': got a use of it from outside the model"):
        pipeline(model, model.loss)


def test_hooks_that_close_over_the_model_read_its_changed_state() -> None:
    model = Model(setting("gain"))
    model.b.register_forward_hook(lambda _, args, made: made * model.gain)
    x, y = torch.randn(2, 8, WIDTH)
    assert fpipe.verify(pipeline(model, mse), model, (x,), y).eager


@pytest.mark.parametrize("name", ["gain", "table", "box", "pairs"])
def test_losses_may_read_state_that_the_forward_does_not_change(name: str) -> None:
    model = Model(setting("table" if name == "gain" else "gain"))
    x, y = torch.randn(2, 8, WIDTH)
    assert fpipe.verify(pipeline(model, weighted(found(model, name))), model, (x,), y).eager


def test_state_set_to_an_equal_number_is_unchanged() -> None:
    model = Model(lambda model: setattr(model, "gain", float("1")))
    x, y = torch.randn(2, 8, WIDTH)
    assert fpipe.verify(pipeline(model, model.loss), model, (x,), y).eager
