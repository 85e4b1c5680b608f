# SPDX-License-Identifier: Apache-2.0
"""Models whose layers sleep: they take as long as they should on any number of ranks, whatever cores a machine has.

A layer's forward, input half and weight half each last for a time of their own. The computation beside it is tiny.
They sleep in an operator, which a recorded stage calls in every step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from fpipe.stages.graph.phases import LIGHT

WIDTH: Final = 8


@torch.library.custom_op("sleeping::rest", mutates_args=())
def rest(x: Tensor, seconds: float) -> Tensor:
    """Return a copy after a time."""
    time.sleep(seconds)
    return x.clone()


@rest.register_fake
def _rest_at_once(x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


class Times(NamedTuple):
    """The seconds of a layer's forward, and of the two halves of its backward."""

    forward: float
    input: float
    weight: float


class _Rest(torch.autograd.Function):
    """The identity, which sleeps in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, back: float) -> Tensor:
        ctx.back = back
        return cast("Tensor", rest(x, forward))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return rest(grads[0], ctx.back), None, None


class _RestLater(torch.autograd.Function):
    """A view of a weight, whose backward sleeps."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, back: float) -> Tensor:
        ctx.back = back
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return rest(grads[0], ctx.back), None


class SleepingLayer(nn.Module):
    """A linear layer that lasts."""

    def __init__(self, times: Times) -> None:
        super().__init__()
        self.times, self.weight = times, nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product with the weight."""
        rested: Tensor = _Rest.apply(x, self.times.forward, self.times.input)
        return rested @ _RestLater.apply(self.weight, self.times.weight)


@contextmanager
def weights_may_rest() -> Iterator[None]:
    """Let a weight half sleep, as it runs other operators after products, inside the `with` block."""
    with patch("fpipe.stages.graph.phases.LIGHT", LIGHT | {torch.ops.sleeping.rest.default}):
        yield


def sleeping_model(layers: Sequence[Times]) -> nn.Sequential:
    """Return a model of such layers; the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(*[SleepingLayer(times) for times in layers])


def draw_layers(seed: int, fewest: int, most: int, shortest: float, longest: float) -> list[Times]:
    """Return the times of `fewest` to `most` layers, each drawn from `shortest` to `longest` by itself.

    >>> [len(draw_layers(seed, 6, 12, 0.001, 0.007)) for seed in range(3)]
    [12, 7, 12]
    """
    drawn = random.Random(seed)
    count = drawn.randint(fewest, most)
    return [Times(*[drawn.uniform(shortest, longest) for _ in range(3)]) for _ in range(count)]
