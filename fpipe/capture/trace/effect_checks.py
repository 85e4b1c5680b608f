# SPDX-License-Identifier: Apache-2.0
"""Refuse effects of operators that would be lost in a pipeline, or that stages cannot repeat.

Runs when a pipeline is built.
"""

from __future__ import annotations

from collections.abc import Callable

from fpipe.errors import CaptureError
from fpipe.tensors.effects import Effects


def require_allowed(effects: Effects, here: Callable[[], str]) -> None:
    """Raise `CaptureError` for a change of an unregistered tensor, or a draw from another generator than torch's."""
    if effects.unregistered:
        raise CaptureError(
            f"{here()}: got an in-place change of a tensor that is neither parameter nor buffer, expected changes of "
            "registered buffers only. The change would be lost. Use register_buffer."
        )
    if effects.foreign:
        raise CaptureError(
            f"{here()}: got a random operation with a generator argument, expected torch's default generator, which is "
            "seeded from the step's seed. Drop the argument."
        )


def require_no_barrier(collective: str, here: Callable[[], str]) -> None:
    """Raise `CaptureError` if a collective is a barrier."""
    if collective == "barrier":
        raise CaptureError(
            f"{here()}: got a barrier of torch.distributed, expected none, because each stage runs on some of the "
            "processes only. Call it outside of the model."
        )


def require_kept(is_lost: bool, collective: str, here: Callable[[], str]) -> None:
    """Raise `CaptureError` if what a collective writes `is_lost`."""
    if is_lost:
        raise CaptureError(
            f"{here()}: got a collective ({collective}) that writes to a parameter, a buffer or a tensor from outside "
            "of the module, expected one that writes to a tensor created in the module. The change would be lost. Pass "
            "it a clone, and use the clone, or copy it back with copy_()."
        )
