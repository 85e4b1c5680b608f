# SPDX-License-Identifier: Apache-2.0
"""Timing in turns, so that whatever else the machine does disturbs all that is compared alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

Function = Callable[[], Any]


def device() -> torch.device:
    """The accelerator, if there is one, or the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else found


def seconds() -> float:
    """Processor time; on an accelerator the time on the clock, when all that was launched is done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
        return time.perf_counter()
    return time.process_time()


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage collection in between."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def timed(function: Function, clock: Callable[[], float] = seconds) -> float:
    """Seconds that a call takes."""
    start = clock()
    function()
    return clock() - start


def medians(functions: Mapping[str, Function], rounds: int) -> dict[str, float]:
    """The median time of each function in seconds.

    Each is timed right after a call of its own, so that none pays for what the one before it left in the caches.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    with without_collection():
        for _ in range(rounds):
            for name, function in functions.items():
                function()
                times[name].append(timed(function))
    return {name: statistics.median(found) for name, found in times.items()}
