# SPDX-License-Identifier: Apache-2.0
"""What a model is captured and driven for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """What a plan is for: training or evaluation, with the loss or not, with the outputs or not."""

    training: bool
    loss: bool
    outputs: bool


TRAINING = Variant(training=True, loss=True, outputs=False)
