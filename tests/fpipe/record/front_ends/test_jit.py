# SPDX-License-Identifier: Apache-2.0
"""Functions made by `torch.jit.script` are called as one torch call; modules made by torch.jit are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from schedules import one_f_one_b
from tests.common.cases import WIDTH, mse

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning"),  # since torch 2.14
]


def gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def thinned(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x, 0.5, True)


class Model(nn.Module):
    """Two linears, with a function of what they make and of the batch."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.a.register_forward_hook(lambda module, args, made: call(made))
        self.b.register_forward_hook(lambda module, args, made: call(made) * call(made.detach()))
        self.register_forward_pre_hook(lambda module, args: (call(args[0]), *args[1:]))

    def forward(self, x: Tensor) -> Tensor:
        """Run both."""
        made: Tensor = self.b(self.a(x))
        return made


def pipeline(model: nn.Module, **options: Any) -> tuple[fpipe.Pipeline, Tensor, Tensor]:
    """Return a pipeline of two stages, and a batch."""
    x, y = torch.randn(2, 8, WIDTH)
    how = one_f_one_b(2, 4)
    return fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=how, cuts=["b"], **options), x, y


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_scripted_functions_are_exact(backward: Any) -> None:
    scripted = torch.jit.script(gelu)
    model = Model(scripted)
    pipe, x, y = pipeline(model, backward=backward)
    assert fpipe.verify(pipe, model, (x,), y, steps=3).eager


def test_scripted_functions_that_draw_are_refused() -> None:
    scripted = torch.jit.script(thinned)
    with pytest.raises(fpipe.CaptureError, match=r"torch.jit.script function 'thinned' that draws random numbers"):
        pipeline(Model(scripted))


@pytest.mark.parametrize("made", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, WIDTH))])
def test_modules_of_torch_jit_are_refused(made: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.ModuleDict({"a": made(nn.Linear(WIDTH, WIDTH)), "b": nn.Linear(WIDTH, WIDTH)})
    with pytest.raises(fpipe.InputError, match=r"model a: got a module of torch\.jit, Linear, expected one in Python"):
        pipeline(model)
