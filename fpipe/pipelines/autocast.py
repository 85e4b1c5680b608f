# SPDX-License-Identifier: Apache-2.0
"""Autocast and inference mode around a step.

Autocast has the same effect as around a plain forward: the model and the loss run under it, and the backward does not.
So autocast is turned off for the step, and becomes part of the variant that is captured. Inference mode is refused
around a training step.

Runs when a pipeline is built and in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Final

import torch

from fpipe.errors import InputError
from fpipe.ir.variant import Casts, Variant

DEVICE_TYPES: Final = ("cpu", "cuda")


@contextmanager
def suspend_autocast(variant: Variant) -> Iterator[Variant]:
    """Turn autocast off inside; yield the variant in which the model and the loss run under it."""
    casts = active_casts()
    with ExitStack() as stack:
        for device, _ in casts:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield replace(variant, casts=casts)


def require_gradients() -> None:
    """Raise `InputError` in inference mode, in which autograd records nothing for a backward."""
    if torch.is_inference_mode_enabled():
        raise InputError(
            "a step: got torch.inference_mode around it, expected grad mode: a training step computes gradients. Call "
            "it outside of inference mode, or call evaluate(pipe)."
        )


def active_casts() -> Casts:
    """Return the device types for which autocast is on, each with its dtype."""
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in DEVICE_TYPES if torch.is_autocast_enabled(kind))
