# SPDX-License-Identifier: Apache-2.0
"""Unsplittable modules may branch on data: they run as a whole, whichever branch the capture took."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import fpipe
from schedules import gpipe, one_f_one_b
from tests.common.cases import WIDTH, mse, rows_of
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.running import run
from tests.common.unusual_models import AT, INSIDE, Block, Stack, branching


@dataclass
class Made:
    """The output of one module."""

    h: Tensor


class Wrapping(Block):
    def forward(self, x):
        return Made(super().forward(x))


def test_unsplittable_modules_may_branch_on_data():
    """Unsplittable modules run as a whole; the branch that they took at capture does not matter."""
    inputs, targets = rows_of()(6)
    model = Stack(branching)
    how = gpipe(ranks=4, microbatches=3)
    pipe = fpipe.pipeline(
        model, example=inputs, targets=targets, loss=mse, schedule=how, cuts=AT, unsplittable=["blocks.*"]
    )
    assert_same(run(pipe, model, inputs, targets), loop(model, mse, inputs, targets, how.microbatches))
    with pytest.raises(fpipe.CutError, match=r"blocks\.0"):
        fpipe.pipeline(
            model, example=inputs, targets=targets, loss=mse, schedule=how, cuts=INSIDE, unsplittable=["blocks.*"]
        )


class Either(nn.Module):
    """Uses one weight or the other, and counts the uses of the first in a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if x.sum() > 0:
            self.count.add_(1)
            return self.first(x)
        return self.second(x)


def test_a_module_may_return_any_registered_type():
    """A module that returns a dataclass can be called as a whole."""

    class Unpacking(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Wrapping(lambda m, x: torch.tanh(x) if x.sum() > 0 else -x), Block()

        def forward(self, x):
            return self.b(self.a(x).h)

    inputs, targets = rows_of()(4)
    model, how = Unpacking(), gpipe(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(
        model, example=inputs, targets=targets, loss=mse, schedule=how, cuts=["b"], unsplittable=Wrapping
    )
    assert_same(run(pipe, model, inputs, targets), loop(model, mse, inputs, targets, 2))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_branch_may_return_its_argument(sign):
    """The capture records one branch, and a step may take either."""

    class Maybe(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return {"h": self.linear(x), "x": x} if sign * x.sum() > 0 else {"h": x, "x": x}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.maybe, self.last = nn.Linear(WIDTH, WIDTH), Maybe(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            out = self.maybe(self.first(x))
            return self.last(out["h"]) + out["x"]

    torch.manual_seed(0)
    model, x, how = Model(), torch.randn(8, WIDTH), one_f_one_b(ranks=3, microbatches=8)
    pipe = fpipe.pipeline(
        model, example=(x,), targets=x, loss=mse, schedule=how, cuts=["maybe", "last"], unsplittable=["maybe"]
    )
    fpipe.verify(pipe, model, (x,), x)


def test_either_branch_gets_its_gradients():
    """Whichever branch the capture took. A weight that no microbatch uses gets none."""
    inputs, targets = (torch.cat([torch.ones(2, WIDTH), -torch.ones(4, WIDTH)]),), torch.randn(6, WIDTH)
    model = nn.Sequential(Either(), nn.Linear(WIDTH, WIDTH), Either())
    how = one_f_one_b(ranks=3, microbatches=3)
    pipe = fpipe.pipeline(
        model, example=inputs, targets=targets, loss=mse, schedule=how, cuts=["1", "2"], unsplittable=Either
    )
    got, want = run(pipe, model, inputs, targets), loop(model, mse, inputs, targets, 3)
    assert want.buffers["0.count"] == 1
    assert_same(got, want)
    assert fpipe.verify(pipe, model, inputs, targets).eager


class Experts(nn.Module):
    """A mixture of experts whose router chooses an expert for each row, so that shapes depend on data."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x):
        probabilities = self.router(x).softmax(-1)
        chosen, out = probabilities.argmax(-1), torch.zeros_like(x)
        for k in (torch.nn.functional.one_hot(chosen, 3).sum(0) > 0).nonzero():
            rows = chosen == k[0]
            out[rows] = self.experts[int(k)](x[rows]) * probabilities[rows].max(-1, keepdim=True).values
        return out


def test_experts_may_see_any_rows():
    inputs, targets = rows_of()(9)
    model, how = nn.Sequential(Experts(), Block(), Experts()), one_f_one_b(ranks=3, microbatches=3)
    pipe = fpipe.pipeline(
        model, example=inputs, targets=targets, loss=mse, schedule=how, cuts=["1", "2"], unsplittable=Experts
    )
    assert_same(run(pipe, model, inputs, targets), loop(model, mse, inputs, targets, 3))
