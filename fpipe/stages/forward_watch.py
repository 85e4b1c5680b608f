# SPDX-License-Identifier: Apache-2.0
"""Watch a stage's forward for whatever limits how its backward can be run.

Runs when a plan is made: once per kind of microbatch, around each stage's forward on fake tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fpipe.record.fakes.assumed_values import VALUE_READS, AssumedValues
from fpipe.tensors.settings import settings


class ForwardWatch(TorchFunctionMode):
    """A function mode that records what keeps a stage from being recorded.

    - `varying`: values of tensors are read, so other values may give another graph.
    - `casting`: something runs under autocast.
    - `nesting`: torch makes nested tensors.
    - `setting`: torch's settings change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.varying = self.casting = self.nesting = self.setting = False
        self.before = settings().kernels

    def note(self, answers: AssumedValues) -> None:
        """Record whether values of tensors were assumed, and whether nested tensors were made."""
        self.varying |= answers.given
        self.nesting |= answers.nested

    @property
    def unrecordable(self) -> str:
        """The reason why the stage can't be recorded as a graph; empty if it may be possible."""
        if self.varying:
            return "it reads the values of tensors"
        if self.setting:
            return "it changes torch's settings for what it calls"
        return "an encoder with a padding mask nests tensors" if self.nesting else ""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.varying |= func in VALUE_READS
        self.setting |= settings().kernels != self.before
        self.casting |= any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        return func(*args, **(kwargs or {}))
