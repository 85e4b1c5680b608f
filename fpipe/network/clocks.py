# SPDX-License-Identifier: Apache-2.0
"""Compare the clocks of processes by round-trip messages.

Problem. `time.perf_counter` starts at a different time on every host.

Idea. Each process asks the first one for its time, several times, and uses the shortest round trip. The first process
read its clock some time between question and answer, so assuming the midpoint is off by at most half the trip. If the
clocks may be equal, the difference counts as zero, so that processes on one host, which share a clock, are not shifted;
then the error is at most the whole trip. On one idle host, a trip takes 150 to 200 microseconds over Gloo.

Runs when `timeline` is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Final, TypeAlias

import torch

from fpipe.network.waiting import Line

TRIPS: Final = 16
Trip: TypeAlias = tuple[float, float, float]
"""The time of the question by our clock, the time by their clock, and the time of the answer by ours."""


def measure_offset(line: Line) -> float:
    """Return how many seconds our clock is ahead of the first process's; every process of the line must call this."""
    if line.group.rank():
        return difference(_ask(line))
    for other in range(1, line.group.size()):
        _answer(line, other)
    return 0.0


def difference(trips: Iterable[Trip]) -> float:
    """Return how far our clock is ahead of theirs, by the shortest of these round trips; 0 if they may be equal.

    >>> difference([(10.0, 4.0, 14.0), (20.0, 13.0, 22.0)]), difference([(1.0, 1.5, 3.0)])
    (8.0, 0.0)
    """
    asked, theirs, back = min(trips, key=lambda trip: trip[2] - trip[0])
    return 0.0 if asked <= theirs <= back else (asked + back) / 2 - theirs


def _ask(line: Line) -> Iterator[Trip]:
    """Yield round trips to the first process."""
    time = torch.zeros(1, dtype=torch.float64, device=line.device)
    for _ in range(TRIPS):
        asked = perf_counter()
        line.send(time, 0)
        line.receive(time, 0)
        theirs = time.item()
        yield asked, theirs, perf_counter()


def _answer(line: Line, other: int) -> None:
    """Send another process our time, `TRIPS` times."""
    question = torch.zeros(1, dtype=torch.float64, device=line.device)
    for _ in range(TRIPS):
        line.receive(question, other)
        question.item()  # waits for its arrival, even if receives are only enqueued
        line.send(torch.tensor([perf_counter()], dtype=torch.float64, device=line.device), other)
