# SPDX-License-Identifier: Apache-2.0
"""Run the recorded calls of a checkpointed function under torch's own checkpoint.

The calls take every tensor that they read as an argument, so the rerun in the backward needs no Python of the user, and
no tensors in modules.

Problem. The rerun changes buffers again. On one device, it comes before the next microbatch; in a pipeline, forwards of
later microbatches come in between, and buffers are threaded through forwards alone.

Idea. The rerun works on copies of the buffers. What a normalization adds to its statistics depends only on the
microbatch, so the second change comes right after the stage's forward: `rerun_for_buffers`.

Runs when a pipeline is built; the operations run in every step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fpipe.record.captured import Operation, Tensors, Value


def checkpoint_calls(
    calls: Operation, settings: Mapping[str, Any], buffers: Collection[Value], changed: Collection[Value]
) -> Operation:
    """Return the operation that runs `calls` under a checkpoint with these `settings`.

    `buffers` are those among its inputs that anyone changes in place, `changed` those that the calls change.
    """
    copied = [k for k, value in enumerate(calls.reads) if value in changed]
    passed = [k for k, value in enumerate(calls.reads) if value not in buffers]

    def run(key: int, *tensors: Tensor) -> Tensors:
        has_run = False

        def function(*given: Tensor) -> Tensors:
            nonlocal has_run
            arguments = [*tensors]
            for k, tensor in zip(passed, given, strict=True):
                arguments[k] = tensor
            for k in copied if has_run else ():
                arguments[k] = arguments[k].clone()
            has_run = True
            return calls.call(key, *arguments)

        # As on one device, a rerun reads buffers as the forward left them. torch requires that nobody writes to the
        # arguments of a checkpoint, so buffers are not among them.
        made: Tensors = checkpoint(function, *[tensors[k] for k in passed], use_reentrant=False, **settings)
        return made

    return calls._replace(call=run)


def rerun_for_buffers(calls: Operation) -> Operation:
    """Return the operation that changes buffers as the rerun of `calls` in a backward does, and makes nothing."""

    def run(key: int, *tensors: Tensor) -> Tensors:
        with saved_tensors_hooks(_discard, _discard):
            calls.call(key, *tensors)
        return ()

    return Operation(calls.reads, (), run)


def _discard(saved: object) -> Any:
    """Return `None` in place of a tensor that autograd saves or reads back."""
