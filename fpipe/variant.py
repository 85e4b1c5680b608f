# SPDX-License-Identifier: Apache-2.0
"""What a model is captured and driven for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

Casts: TypeAlias = tuple[tuple[str, torch.dtype], ...]
"""By kind of device, the dtype that autocast casts to."""


@dataclass(frozen=True)
class Variant:
    """What a plan is for: training or evaluation, with the loss or not, with the outputs or not.

    `casts`: the autocast that model and loss run under.
    """

    training: bool
    loss: bool
    outputs: bool
    casts: Casts = ()


TRAINING = Variant(training=True, loss=True, outputs=False)
EVALUATION = Variant(training=False, loss=False, outputs=True)
