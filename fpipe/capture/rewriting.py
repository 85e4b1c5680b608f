# SPDX-License-Identifier: Apache-2.0
"""Checkpointed functions that change buffers, such as those with batch normalization.

Problem. On one device such a function changes its buffers twice for each microbatch: in the forward, and again when the
backward runs it. In a pipeline forwards of later microbatches come in between, and buffers are threaded through
forwards alone.

Idea. What a normalization adds to its statistics depends on the microbatch only, so the second change may come right
after the first: the function runs once more behind its forward, and all that it makes is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fpipe.capture.contract import Step, Tensors
from fpipe.capture.tape import Span, Tape


class Rewriting:
    """Which checkpointed functions of a tape change buffers, and are run again by a backward.

    `writers` are the positions of the units that change buffers.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape, self.writers = tape, tape.rewriters

    def inside(self, span: Span) -> bool:
        """Whether a checkpointed function inside a span, or the span itself, is one."""
        return self.of(span) or any(map(self.inside, span.inner))

    def of(self, span: Span) -> bool:
        """Whether a span is one."""
        writes = any(span.start <= position < span.stop for position in self.writers)
        return span.checkpoint and writes and any(self.tape.fakes[v].requires_grad for v in span.returned.values())

    def step(self, span: Span, step: Step, seeded: Callable[[Step], Step]) -> Step:
        """Return the step, which changes buffers as the backward would; `seeded` makes it draw the same numbers."""
        plain = copy(span.invocation)
        plain.function = _plainly

        def once_more(key: int, *tensors: Tensor) -> Tensors:
            with saved_tensors_hooks(_dropped, _dropped):
                plain(tensors)
            return ()

        second = seeded(Step(span.invocation.reads, (), once_more))

        def call(key: int, *tensors: Tensor) -> Tensors:
            made = step.call(key, *tensors)
            second.call(key, *tensors)
            return made

        return step._replace(call=call)


def _plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _dropped(saved: object) -> Any:
    """What is left of a tensor that autograd saves, and of what was left."""
