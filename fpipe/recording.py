# SPDX-License-Identifier: Apache-2.0
"""Measured timelines, in the form of the simulated ones.

A span is the wall-clock time of one call of a stage function, waiting apart; `schedules.summarize` folds spans whether
they were simulated or measured. On an accelerator this is the time to launch, not to compute.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from fpipe.executor import Compute
from schedules import Action, Span


def timed(rank: int, record: Callable[[Span], None]) -> Compute:
    """A way to call the stage functions of `rank` that records a span, in seconds, for each compute action."""

    def compute(action: Action, function: Callable[..., Any], *arguments: Any) -> Any:
        start = perf_counter()
        out = function(*arguments)
        record(Span(rank, action, start, perf_counter()))
        return out

    return compute
