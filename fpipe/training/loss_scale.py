# SPDX-License-Identifier: Apache-2.0
"""The scale of a loss whose gradients are computed in float16.

Problem. Small gradients underflow in float16, so the loss is multiplied by a scale before the backward, and gradients
are divided by it afterwards. If one of them overflowed, the update is skipped and the scale reduced; after many good
steps it grows. A `torch.amp.GradScaler` on each rank looks at that rank's gradients only: one rank skips an update that
another one makes, and from then on their scales differ.

Idea. The scale is a value, and whether gradients are finite is one answer for all ranks, `fpipe.all_finite`. The next
scale is a function of both.

Invariant: scales are numbers of float32, computed with the roundings of `torch.amp.GradScaler`.

Runs in every step, after the backward.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace

from torch import Tensor

from fpipe.errors import InputError
from fpipe.pipelines.inputs import State
from fpipe.tensors.arguments import describe_argument, require_arguments, require_tensors


@dataclass(frozen=True)
class LossScale:
    """The scale of a loss, and how it changes.

    - `scale`: the factor of the loss. Pass it to the step.
    - `growth`: by what it is multiplied after `interval` good steps in a row; `backoff`: after one that was not good.
    - `good`: the number of good steps in a row so far.

    Bit for bit as `torch.amp.GradScaler` does on one device:

    >>> import torch, fpipe
    >>> loss_scale = fpipe.LossScale(1024.0, interval=2)
    >>> loss_scale.unscale({"weight": torch.tensor([512.0])})
    {'weight': tensor([0.5000])}
    >>> loss_scale = loss_scale.next(True).next(True)
    >>> loss_scale.scale, loss_scale.next(torch.tensor(False)).scale
    (2048.0, 1024.0)

    Raise `InputError` for numbers with which the scale would not stay positive, grow and shrink.
    """

    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    good: int = 0

    def __post_init__(self) -> None:
        require_arguments(LossScale.__init__, vars(self))
        for name, holds, expected in (
            ("scale", 0 < self.scale < math.inf, "a positive number"),
            ("growth", 1 < self.growth < math.inf, "a number above 1, and finite"),
            ("backoff", 0 < self.backoff < 1, "a number between 0 and 1"),
            ("interval", self.interval >= 1, "a positive integer"),
            ("good", 0 <= self.good < self.interval, "an integer from 0 to interval - 1"),
        ):
            if not holds:
                raise InputError(f"{name}: got {getattr(self, name)!r}, expected {expected}. Change it.")
        object.__setattr__(self, "scale", _as_float32(self.scale))

    def unscale(self, grads: State, donate: bool = False) -> State:
        """Return the gradients divided by the scale; in place, if `donate`.

        Ask `fpipe.all_finite` before: a gradient that overflowed stays infinite.
        """
        require_arguments(LossScale.unscale, locals())
        require_tensors("grads", grads)
        factor = _as_float32(1 / self.scale)
        return {name: grad.mul_(factor) if donate else grad * factor for name, grad in grads.items()}

    def next(self, finite: bool | Tensor) -> LossScale:
        """Return the scale for the next step, given whether all gradients of this one were finite, on all ranks."""
        require_arguments(LossScale.next, locals())
        if isinstance(finite, Tensor) and finite.numel() != 1:
            raise InputError(
                f"finite: got {describe_argument(finite)}, expected one value. Pass what fpipe.all_finite returned."
            )
        if not finite:
            return replace(self, scale=_as_float32(self.scale * self.backoff), good=0)
        if self.good + 1 < self.interval:
            return replace(self, good=self.good + 1)
        larger = _as_float32(self.scale * self.growth)
        return replace(self, scale=larger if math.isfinite(larger) else self.scale, good=0)


def _as_float32(number: float) -> float:
    return ctypes.c_float(number).value
