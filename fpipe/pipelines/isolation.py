# SPDX-License-Identifier: Apache-2.0
"""The isolation in which a model is captured: what runs before and after it, and beside it, is as without it.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fpipe.capture.eager_types import hide_fakes
from fpipe.ir.variant import Variant
from fpipe.pipelines.autocast import suspend_autocast
from fpipe.runtime.turns import wait_for_turn
from fpipe.tensors import random


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


@contextmanager
def postpone_collection() -> Iterator[None]:
    """Turn the garbage collector off inside, for all threads; leave it off if it was off before.

    A capture makes hundreds of thousands of objects, most of which stay. They make the collector walk all objects of
    the process again and again, for a tenth of the time or more, and find nothing.

    >>> with postpone_collection():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
