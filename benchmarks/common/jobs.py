# SPDX-License-Identifier: Apache-2.0
"""Jobs that take turns: each side of a contest in processes of its own, and never two of them at work.

So none finds the memory that another has left, and what the machine does meanwhile hits all alike.

    found = taken("benchmarks.script", 4, sides, dict.fromkeys(names, 9))    # in the process that starts them

    for name in names:                                                       # in a rank: SIDE and names are its
        for _ in turns(side, name, 9):                                       # arguments
            measure()
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from benchmarks.common import ranks

PORT: Final = "BENCHMARK_PORT"
HOST, LONG, MOMENT = "127.0.0.1", timedelta(minutes=2), 0.02


def taken(
    module: str, count: int, sides: Sequence[str], rounds: Mapping[str, int], **environment: str
) -> dict[str, list[Any]]:
    """By side, what each rank of `python -m module SIDE ROUND ...` has reported; `rounds`: how many turns each has."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=LONG)
    own = {**environment, PORT: str(store.port)}
    with ThreadPoolExecutor(len(sides)) as pool:
        jobs = {side: pool.submit(ranks.start, module, count, side, *rounds, **own) for side in sides}
        for name, length in rounds.items():
            for side, job in jobs.items():
                _await(store, f"{name}: {side} is ready", job)
            for turn in range(length):
                for side in sides if turn % 2 else reversed(sides):
                    store.set(f"{name}: {side} takes turn {turn}", "")
                    _await(store, f"{name}: {side} has taken turn {turn}", jobs[side])
            store.set(f"{name} is over", "")
        return {side: job.result() for side, job in jobs.items()}


def turns(side: str, name: str, length: int) -> Iterator[int]:
    """In every rank of a side: its turns in the named round, between which the others have theirs."""
    store = dist.TCPStore(HOST, int(os.environ[PORT]), is_master=False, timeout=LONG)
    _all_say(store, f"{name}: {side} is ready")
    for turn in range(length):
        store.wait([f"{name}: {side} takes turn {turn}"])
        yield turn
        _all_say(store, f"{name}: {side} has taken turn {turn}")
    store.wait([f"{name} is over"])


def _all_say(store: dist.TCPStore, what: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        store.set(what, "")


def _await(store: dist.TCPStore, what: str, job: Future[Any]) -> None:
    """Until it is said, or the job has failed."""
    while not store.check([what]):
        if job.done():
            raise RuntimeError(f"a job ended before {what!r}") from job.exception()
        time.sleep(MOMENT)
