# SPDX-License-Identifier: Apache-2.0
"""Count what a process holds, and what it runs; and require that a loop leaves no more than before."""

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fpipe
from tests.common.options import grouped

LINGER = 20.0  # seconds until threads that were told to end have ended


class Held(NamedTuple):
    """The numbers of a process's threads, descriptors, and objects that Python's collector tracks."""

    threads: int
    descriptors: int
    objects: int


def count_held() -> Held:
    """Count, once all garbage is collected: a tensor in a cycle takes two collections."""
    gc.collect()
    gc.collect()
    return Held(len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), len(gc.get_objects()))


def resident() -> int:
    """The bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def require_no_growth(run: Callable[[int], None], warm: int, times: int) -> int:
    """Call `run(k)` `warm` times and then `times` times; return by how many bytes the latter let the process grow.

    Raise unless threads and descriptors are at most as many as after warming up, and objects grow by less than one in
    every other call. A few are those of this function.
    """
    for k in range(warm):
        run(k)
    before, bytes_before = count_held(), resident()
    for k in range(times):
        run(warm + k)
    now, end = count_held(), time.monotonic() + LINGER
    while (now.threads > before.threads or now.descriptors > before.descriptors) and time.monotonic() < end:
        time.sleep(0.05)
        now = count_held()
    assert now.threads <= before.threads, (before, now)
    assert now.descriptors <= before.descriptors, (before, now)
    assert now.objects < before.objects + max(times // 2, 4), (before, now)
    return resident() - bytes_before


@contextmanager
def uncollected() -> Iterator[Counter[type]]:
    """Count by class, into the counter, what Python's collector has to free of what this context drops."""
    found = Counter[type]()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found.update(map(type, gc.garbage))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def build_small(schedule, **options):
    """Build a pipeline of two layers; return it with a step on `rows` rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    pipe = fpipe.pipeline(model, example=(torch.ones(4, 4),), loss=torch.mean, schedule=schedule, **grouped(options))
    (params, buffers), step = pipe.init(model), fpipe.value_and_grad(pipe)
    return pipe, lambda rows=4: step(params, buffers, (torch.ones(rows, 4),))


class Operators(TorchDispatchMode):
    """Count the operators that run."""

    def __init__(self):
        super().__init__()
        self.called = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called[func] += 1
        return func(*args, **(kwargs or {}))
