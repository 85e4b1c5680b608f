# SPDX-License-Identifier: Apache-2.0
"""Variants of a model, each captured and run separately.

Runs when a pipeline is built and in every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

Casts: TypeAlias = tuple[tuple[str, torch.dtype], ...]
"""Pairs of a device type and the dtype that autocast casts to."""


@dataclass(frozen=True)
class Variant:
    """A mode of running the model: in training or evaluation, with or without the loss, with or without the outputs.

    `casts`: the autocast that model and loss run under.
    """

    training: bool
    loss: bool
    outputs: bool
    casts: Casts = ()


TRAINING = Variant(training=True, loss=True, outputs=False)
EVALUATION = Variant(training=False, loss=False, outputs=True)
