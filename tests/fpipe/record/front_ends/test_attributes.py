# SPDX-License-Identifier: Apache-2.0
"""Python attributes on tensors: those of parameters and buffers may not be read, those that a forward sets may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from schedules import one_f_one_b
from tests.common.cases import WIDTH, mse
from tests.common.sizes import covering


class Model(nn.Module):
    """Two linears, and a factor that is read somewhere."""

    def __init__(self, factor: Callable[[Any], float]) -> None:
        super().__init__()
        self.a, self.b, self.__dict__["factor"] = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), factor
        self.register_buffer("table", torch.ones(WIDTH))
        self.b.weight.gain = self.table.gain = 2.0

    def forward(self, x: Tensor) -> Tensor:
        """Run both."""
        made: Tensor = self.b(self.a(x)) * self.factor(self) * self.table
        return made


def pipeline(model: nn.Module, **options: Any) -> tuple[fpipe.Pipeline, Tensor, Tensor]:
    """Return a pipeline of two stages, and a batch."""
    x, y = torch.randn(2, 8, WIDTH)
    how = one_f_one_b(2, 4)
    return fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=how, cuts=["b"], **options), x, y


@pytest.mark.parametrize("capture", ["trace", "export", "dynamo"])
@pytest.mark.parametrize(
    "factor",
    [
        lambda model: getattr(model.b.weight, "gain", 1.0),
        lambda model: 2.0 if hasattr(model.table, "gain") else 1.0,
    ],
)
def test_reading_attributes_of_parameters_and_buffers_is_refused(factor: Any, capture: str) -> None:
    with pytest.raises(fpipe.CaptureError, match=r"parameter or buffer of shape .*reads its attribute 'gain'"):
        pipeline(Model(factor), capture=capture)


def test_attributes_that_nobody_reads_are_allowed() -> None:
    model = Model(lambda model: getattr(model.b.weight, "scale", 3.0))
    pipe, x, y = pipeline(model)
    assert fpipe.verify(pipe, model, (x,), y).eager


class Marking(nn.Module):
    """A linear that marks what it makes."""

    def __init__(self, mark: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.__dict__["mark"] = nn.Linear(WIDTH, WIDTH), mark

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        made: Any = self.linear(x)
        made.gain = self.mark(made)
        return made  # type: ignore[no-any-return]


class Reading(nn.Module):
    """A linear, times what its argument is marked with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        made: Tensor = self.linear(x) * getattr(x, "gain", 1.0)
        return made


@covering(
    mark=[lambda made: 2.0, lambda made: made.mean()],
    cuts=[["1"], ["2"], ["1", "2"], ["2", "3"]],
    backward=["autograd", "graph"],
)
def test_attributes_that_a_forward_sets_are_found_across_cuts(mark: Any, cuts: list[str], backward: Any) -> None:
    model = nn.Sequential(Marking(mark), Reading(), Marking(mark), Reading())
    x, y = torch.randn(2, 8, WIDTH)
    how = one_f_one_b(len(cuts) + 1, 4)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=how, cuts=cuts, backward=backward)
    assert fpipe.verify(pipe, model, (x,), y, steps=2).eager
