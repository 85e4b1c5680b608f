# SPDX-License-Identifier: Apache-2.0
"""Measure how long messages take between processes.

Every two processes send each other messages back and forth; half of a round trip is one transfer. In each round, every
process is busy with one other, as in a tournament, so that all pairs take no more rounds than there are processes.

Runs when a model is profiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from time import perf_counter
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

WARM_UP, ROUND_TRIPS = 2, 11
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


def measure_transfers(group: dist.ProcessGroup, device: torch.device, sizes: Sequence[int]) -> Tensor:
    """Return rows of this rank, another one, bytes, and the seconds of a transfer; every process must call this."""
    rank, world = dist.get_rank(group), dist.get_process_group_ranks(group)
    rows = []
    for pairs in pair_up(len(world)):
        for first, second in pairs:
            if rank in (first, second):
                other = second if rank == first else first
                rows += [
                    (rank, other, size, _measure_transfer(group, world[other], device, size, rank == first))
                    for size in sizes
                ]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), 4)


def _measure_transfer(group: dist.ProcessGroup, other: int, device: torch.device, size: int, begins: bool) -> float:
    """Return the median seconds that a message of `size` bytes takes; the process that `begins` sends first."""
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    times = []
    for _ in range(WARM_UP + max(3, min(ROUND_TRIPS, MOST_SENT // max(1, size)))):
        start = perf_counter()
        for sends in (begins, not begins):
            if sends:
                dist.send(message, dst=other, group=group)
            else:
                dist.recv(message, src=other, group=group)
                message[:1].cpu()  # waits for its arrival, even if receives are only enqueued
        times.append((perf_counter() - start) / 2)
    return median(times[WARM_UP:])
