# SPDX-License-Identifier: Apache-2.0
"""A case: a model with its batch, its loss and its cuts; and the batches and losses that cases share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Case:
    """A model in a zoo; `batch(rows)` makes (inputs, targets), and `cuts` makes four stages of it.

    `fronts` are the front ends that can capture it; `random` says that it draws random numbers, so that only the
    reference can be its equal.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, Any]]
    loss: Callable[..., Tensor]
    cuts: tuple[str, str, str]
    fronts: tuple[str, ...] = ("trace", "export", "fx", "dynamo")
    random: bool = False

    def at(self, stages: int) -> tuple[str, ...]:
        """Cuts that make one, two or four stages."""
        return {1: (), 2: self.cuts[1:2], 4: self.cuts}[stages]

    def make(self, rows: int) -> tuple[nn.Module, Any, Any]:
        """The model and a batch, always the same."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = self.build()
            return model, *self.batch(rows)


BACKWARDS = ("autograd", "graph")
PARTS = ("modules", "trace", "export", "fx", "dynamo")


WIDTH, WORDS, LENGTH = 4, 11, 3


def rows_of(width: int = WIDTH) -> Callable[[int], tuple[Any, Any]]:
    return lambda rows: ((torch.randn(rows, width),), torch.randn(rows, width))


def words(rows: int) -> tuple[Any, Any]:
    return (torch.randint(WORDS, (rows, LENGTH)),), torch.randint(WORDS, (rows, LENGTH))


def mse(outputs, targets):
    return functional.mse_loss(outputs, targets)


def cross_entropy(outputs, targets):
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
