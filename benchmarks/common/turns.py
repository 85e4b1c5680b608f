# SPDX-License-Identifier: Apache-2.0
"""Interleaved timing, so that other work on the machine disturbs all sides equally."""

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
    """Return the accelerator, if there is one, or the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else found


def seconds() -> float:
    """Return the CPU time; with an accelerator, the wall time once all launched work is done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
        return time.perf_counter()
    return time.process_time()


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable garbage collection inside the `with` block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def timed(function: Function, clock: Callable[[], float] = seconds) -> float:
    """Return the seconds a call takes."""
    start = clock()
    function()
    return clock() - start


def medians(functions: Mapping[str, Function], rounds: int) -> dict[str, float]:
    """Return the median time of each function in seconds.

    Each is called once untimed right before it is timed, so that none pays for the cache contents left by another.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    with without_collection():
        for _ in range(rounds):
            for name, function in functions.items():
                function()
                times[name].append(timed(function))
    return {name: statistics.median(found) for name, found in times.items()}
