# SPDX-License-Identifier: Apache-2.0
"""Update buffers as the backward of a checkpointed function does.

That backward reruns the function, which updates its buffers a second time. `fpipe.capture.trace.buffer_checkpoints`
says why a stage reruns the function at the end of its forward instead.

Runs when a pipeline is built; the operation that it returns runs in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fpipe.ir.captured import Operation, Tensors
from fpipe.ir.tape import Frame


def rerun_for_buffers(frame: Frame) -> Operation:
    """Return the operation that updates buffers as the backward of the checkpointed function in `frame` does."""
    invocation = copy(frame.invocation)
    invocation.function = _call

    def run(key: int, *tensors: Tensor) -> Tensors:
        with saved_tensors_hooks(_discard, _discard):
            invocation(tensors)
        return ()

    return Operation(frame.invocation.reads, (), run)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _discard(saved: object) -> Any:
    """Return `None` in place of a tensor that autograd saves or reads back."""
