# SPDX-License-Identifier: Apache-2.0
"""Torch's modes around a step and around a capture, and what else a capture must leave as it was.

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

from fpipe.collector import postpone_collection
from fpipe.errors import InputError
from fpipe.network.ranks import wait_for_turn
from fpipe.record.fakes.eager_types import hide_fakes
from fpipe.record.variant import Casts, Variant
from fpipe.tensors import random
from fpipe.tensors.torch_private import saved_tensor_hooks

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
            "it outside inference mode, or call evaluate(pipe)."
        )


def is_autograd_watched() -> bool:
    """Return whether saved-tensor hooks or anomaly detection are on: both need a graph of autograd's in every step."""
    return torch.is_anomaly_enabled() or saved_tensor_hooks(False) is not None


def active_casts() -> Casts:
    """Return the device types for which autocast is on, each with its dtype."""
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in DEVICE_TYPES if torch.is_autocast_enabled(kind))


@contextmanager
def isolate(variant: Variant) -> Iterator[None]:
    """Preserve torch's modes and generators inside, and make other threads wait."""
    with (
        torch.inference_mode(False),
        suspend_autocast(variant),
        wait_for_turn(),
        postpone_collection(),
        hide_fakes(),
        random.preserve_generators([torch.device("cpu")]),  # the model may seed the generator
    ):
        yield
