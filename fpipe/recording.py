# SPDX-License-Identifier: Apache-2.0
"""Measured timelines, in the form of the simulated ones.

A span is the wall-clock time of one compute action, waiting apart; `schedules.summarize` folds spans whether
they were simulated or measured. On an accelerator this is the time to launch, not to compute.
"""

from __future__ import annotations

from collections.abc import Callable

from schedules import Action, Span


def spans_of(rank: int, record: Callable[[Span], None]) -> Callable[[Action, float, float], None]:
    """What an `Execution` of `rank` calls, so that `record` gets a span, in seconds, for each compute action."""

    def recorded(action: Action, start: float, end: float) -> None:
        """Transfers only post, and take no time to speak of."""
        if action.peer is None:
            record(Span(rank, action, start, end))

    return recorded
