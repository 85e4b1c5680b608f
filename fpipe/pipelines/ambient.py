# SPDX-License-Identifier: Apache-2.0
"""Autocast and inference mode around a step.

Autocast has the same effect as around a plain forward: the model and the loss run under it, and the backward does not.
So it is turned off for the step, and becomes part of what the model is captured for. In inference mode there are no
gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from fpipe.errors import InputError
from fpipe.ir.variant import Casts, Variant

KINDS = ("cpu", "cuda")


@contextmanager
def lifted(variant: Variant) -> Iterator[Variant]:
    """Turn off autocast inside, and yield the variant in which the model runs under it instead."""
    casts = ambient()
    with ExitStack() as stack:
        for kind, _ in casts:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield replace(variant, casts=casts)


def require_gradients() -> None:
    """Raise `InputError` in inference mode, which keeps nothing for a backward."""
    if torch.is_inference_mode_enabled():
        raise InputError(
            "a step: got torch.inference_mode around it, expected none: it computes gradients. Call it outside, or "
            "call evaluate(pipe)."
        )


def ambient() -> Casts:
    """Return the device types for which autocast is on, and its dtypes."""
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in KINDS if torch.is_autocast_enabled(kind))
