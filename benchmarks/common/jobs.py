# SPDX-License-Identifier: Apache-2.0
"""Jobs that take turns: each side of a contest in separate processes, only one side running at a time.

So no side runs in memory that another has left behind, and other work on the machine affects all sides equally.

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
    """Run `python -m module SIDE ROUND ...` for each side, with `rounds` turns of each round.

    Return, by side, what each rank has reported.
    """
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
    """Yield a side's turns in the named round, alternating with the other sides; call it on every rank of the side."""
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
    """Wait until `what` is set. Raise `RuntimeError` if the job has ended before."""
    while not store.check([what]):
        if job.done():
            raise RuntimeError(f"a job ended before {what!r}") from job.exception()
        time.sleep(MOMENT)
