# SPDX-License-Identifier: Apache-2.0
"""Change buffers as the backward of a checkpointed function does.

A backward reruns the function, which changes its buffers once more; see `fpipe.capture.trace.buffer_checkpoints` for
why a stage reruns it at the end of its forward. That happens in every step.
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
    """Return the step that changes buffers as the backward of a checkpointed function does."""
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
    """Pack or unpack a tensor that autograd saves as `None`."""
