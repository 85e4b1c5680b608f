# SPDX-License-Identifier: Apache-2.0
"""Measure the network: how long messages take, and how far the clocks of processes are apart.

Transfers. Every two processes send each other messages back and forth; half of a round trip is one transfer. In each
round, every process is busy with one other, as in a tournament, so that all pairs take no more rounds than there are
processes. A process pauses before it sends: in a step, messages come one by one, and the threads that move them sleep
in between. Waking them takes several times as long as a message that follows another.

Clocks. `time.perf_counter` starts at a different time on every host. Each process asks the first one for its time,
several times, and uses the shortest round trip. The first process read its clock some time between question and answer,
so assuming the midpoint is off by at most half the trip. If the clocks may be equal, the difference counts as zero, so
that processes on one host, which share a clock, are not shifted; then the error is at most the whole trip. On one idle
host, a trip takes 150 to 200 microseconds over Gloo.

Runs when a model is profiled, and when `timeline` is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from time import perf_counter, sleep
from typing import Final, TypeAlias

import torch
from torch import Tensor

from fpipe.network.waiting import Line, has_streams

WARM_UP, ROUND_TRIPS, POSTED = 2, 11, 25
PAUSE: Final = 2e-3
MOST_SENT: Final = 2**26
"""The bytes that the round trips of one size move at most, once they are more than a few."""


def pair_up(players: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs, in which each of so many players meets each other one once.

    >>> list(pair_up(4))
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    >>> list(pair_up(3))
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    order = [*range(players), *([players] if players % 2 else [])]  # who meets the additional player rests
    for _ in order[1:]:
        half = len(order) // 2
        pairs = zip(order[:half], reversed(order[half:]), strict=True)
        yield sorted((min(pair), max(pair)) for pair in pairs if max(pair) < players)
        order = [order[0], order[-1], *order[1:-1]]


def measure_transfers(line: Line, sizes: Sequence[int]) -> Tensor:
    """Return rows of this rank, another one, bytes, and the seconds of a transfer; every process must call this."""
    rank, rows = line.group.rank(), []
    for pairs in pair_up(line.group.size()):
        for first, second in pairs:
            if rank in (first, second):
                other = second if rank == first else first
                rows += [(rank, other, size, _measure_transfer(line, other, size, rank == first)) for size in sizes]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), 4)


def measure_posting(line: Line) -> float:
    """Return the seconds that this process takes to post a send and a receive; every process must call this.

    Return 0 for an accelerator, whose host posts ahead of time, and for a process that is left without a partner.
    """
    rank = line.group.rank()
    partners = {one: other for pair in next(pair_up(line.group.size())) for one, other in (pair, pair[::-1])}
    if has_streams(line.device) or rank not in partners:
        return 0.0
    return _measure_posting(line, partners[rank])


def _measure_posting(line: Line, other: int) -> float:
    """Return the median seconds to post a receive from the other process, and a send to it, each after a pause."""
    sent, got, times = torch.zeros(1), torch.zeros(1), []
    for _ in range(WARM_UP + POSTED):
        sleep(PAUSE)
        start = perf_counter()
        arriving = line.post_receive(got, other)
        received = perf_counter() - start
        sleep(PAUSE)
        start = perf_counter()
        leaving = line.post_send(sent, other)
        times.append(received + perf_counter() - start)
        for one in (arriving, leaving):
            line.wait(one)
    return median(times[WARM_UP:])


def _measure_transfer(line: Line, other: int, size: int, begins: bool) -> float:
    """Return the median seconds that a message of `size` bytes takes; the process that `begins` sends first."""
    message, times = torch.zeros(size, dtype=torch.uint8, device=line.device), []
    trip = _begin_trip if begins else _answer_trip
    for _ in range(WARM_UP + max(3, min(ROUND_TRIPS, MOST_SENT // max(1, size)))):
        times.append(trip(line, other, message))
    mine = torch.tensor(times, dtype=torch.float64, device=line.device)
    theirs = torch.zeros_like(mine)
    for sends in (begins, not begins):
        if sends:
            line.send(mine, other)
        else:
            line.receive(theirs, other)
    trips: list[float] = (mine + theirs)[WARM_UP:].tolist()
    return median(trips) / 2


def _begin_trip(line: Line, other: int, message: Tensor) -> float:
    """Send a message after a pause, and return the seconds until it has come back."""
    sleep(PAUSE)
    start = perf_counter()
    line.send(message, other)
    _receive(line, other, message)
    return perf_counter() - start


def _answer_trip(line: Line, other: int, message: Tensor) -> float:
    """Send a message back after a pause, and return the seconds that the pause took, as a negative number."""
    _receive(line, other, message)
    start = perf_counter()
    sleep(PAUSE)
    paused = perf_counter() - start
    line.send(message, other)
    return -paused


def _receive(line: Line, other: int, message: Tensor) -> None:
    line.receive(message, other)
    message[:1].cpu()  # waits for its arrival, even if receives are only enqueued


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
