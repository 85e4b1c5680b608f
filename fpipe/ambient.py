# SPDX-License-Identifier: Apache-2.0
"""Autocast around a step.

It means what it means around a plain forward: the model and the loss run under it, and the backward does not. So it is
turned off for the step, and becomes part of what the model is captured for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from fpipe.variant import Casts, Variant

KINDS = ("cpu", "cuda")


@contextmanager
def lifted(variant: Variant) -> Iterator[Variant]:
    """Turn off autocast inside, and yield the variant in which the model runs under it instead."""
    casts = ambient()
    with ExitStack() as stack:
        for kind, _ in casts:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield replace(variant, casts=casts)


def ambient() -> Casts:
    """Return the kinds of devices for which autocast is on, and the dtypes."""
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in KINDS if torch.is_autocast_enabled(kind))
