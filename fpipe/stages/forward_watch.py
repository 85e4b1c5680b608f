# SPDX-License-Identifier: Apache-2.0
"""What a stage's forward does that limits how its backward can be run. Seen once, when a pipeline is built."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fpipe.capture.assumed_values import VALUE_READS, AssumedValues
from fpipe.tensors.settings import settings
from fpipe.torch_private import TENSOR_METHODS

GRAD_FN: Any = TENSOR_METHODS["grad_fn"].__get__
"""The function that torch calls to get a tensor's `grad_fn`."""


class ForwardWatch(TorchFunctionMode):
    """Records what keeps a backward from being split or recorded.

    - `hooked`: nodes of the autograd graph may have hooks, which run only in autograd's backward.
    - `varying`: values of tensors are read, so other values may give another graph.
    - `casting`: something runs under autocast.
    - `nesting`: torch makes nested tensors.
    - `setting`: torch's settings change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hooked = self.varying = self.casting = self.nesting = self.setting = False
        self.before = settings().kernels

    def note(self, answers: AssumedValues) -> None:
        """Record the questions about values that were answered."""
        self.varying |= answers.given
        self.nesting |= answers.nested

    @property
    def unrecordable(self) -> str:
        """Why no graph can represent what was seen; empty if one may."""
        if self.varying:
            return "it reads the values of tensors"
        if self.setting:
            return "it changes torch's settings for what it calls"
        return "an encoder with a padding mask nests tensors" if self.nesting else ""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.hooked |= func in (Tensor.register_hook, GRAD_FN)
        self.varying |= func in VALUE_READS
        self.setting |= settings().kernels != self.before
        self.casting |= any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        return func(*args, **(kwargs or {}))
