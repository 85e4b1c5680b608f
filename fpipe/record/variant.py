# SPDX-License-Identifier: Apache-2.0
"""Variants of a model, each captured and run separately.

Runs when a pipeline is built and in every step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

Casts: TypeAlias = tuple[tuple[str, torch.dtype], ...]
"""Pairs of a device type and the dtype that autocast casts to."""


@dataclass(frozen=True)
class Variant:
    """A mode of running the model: in training or evaluation, with or without the loss, with or without the outputs.

    `casts`: the autocast that model and loss run under. `scaled`: whether the backward starts from a scale that the
    step is passed, not from 1. `sums`: the dtype in which gradients are added, if not that of the parameter.
    """

    training: bool
    loss: bool
    outputs: bool
    casts: Casts = ()
    scaled: bool = False
    sums: torch.dtype | None = None

    @property
    def capture(self) -> Variant:
        """The variant that is captured for this one: outputs, scale and sums don't change what the model computes."""
        return replace(self, outputs=True, scaled=False, sums=None)

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of parameters of `dtype` are added: never a lower precision."""
        if self.sums is None or not dtype.is_floating_point:
            return dtype
        return torch.promote_types(dtype, self.sums)


TRAINING = Variant(training=True, loss=True, outputs=False)
EVALUATION = Variant(training=False, loss=False, outputs=True)
