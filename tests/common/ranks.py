# SPDX-License-Identifier: Apache-2.0
"""Start ranks as forks of one process.

    python ranks.py MODULE COUNT FOLDER ARGUMENT...

Importing torch and the cases takes seconds of each process, and forking takes none. Rank r calls `MODULE.main(r,
ARGUMENT...)`, prints to `FOLDER`/log-r, and ends as any process does; the exit codes of all go to `FOLDER`/codes.json.
"""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parents[2]))

T = TypeVar("T")
PATIENCE = 600  # seconds that the others get after one has failed


def fork(count: int) -> tuple[int | None, dict[int, int]]:
    """Fork `count` times; return the rank in a child, and in the parent None and the ranks by process id."""
    children: dict[int, int] = {}
    for rank in range(count):
        child = os.fork()
        if not child:
            return rank, {}
        children[child] = rank
    return None, children


def redirect(log: Path) -> None:
    """Send what this process prints from now on to a file."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(target, stream)


def wait(
    children: dict[int, int],
    limit: float = math.inf,
    patience: float = math.inf,
    silent: Collection[int] = (),
    is_stuck: Callable[[int], bool] = lambda process: True,
) -> tuple[list[int], bool]:
    """Return the exit codes of all children, by rank, and whether any hung; kill those that do not end.

    - `limit`, `patience`: the seconds after which ranks hang: from now, and from when another has failed.
    - `silent`: ranks that may never end; they are killed, if they are stuck, once all others have ended.
    """
    codes, deadline, is_hung = dict[int, int](), time.monotonic() + limit, False
    while len(codes) < len(children):
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in children:
            codes[children[child]] = os.waitstatus_to_exitcode(status)
            deadline = min(deadline, time.monotonic() + patience) if any(codes.values()) else deadline
            continue
        is_hung = is_hung or time.monotonic() > deadline
        if is_hung or children.values() - codes.keys() <= {*silent}:
            for one, rank in children.items():
                if rank not in codes and (is_hung or is_stuck(one)):
                    os.kill(one, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[rank] for rank in range(len(children))], is_hung


def read_ends(folder: Path, count: int) -> list[Any]:
    """Return what each rank has written to `FOLDER`/end-r.json, or nothing."""
    ends = [folder / f"end-{rank}.json" for rank in range(count)]
    return [json.loads(end.read_text()) if end.exists() else {} for end in ends]


def run_all(folder: Path, cases: Iterable[T], run: Callable[[int, T], dict[str, Any]]) -> None:
    """Run cases, print how each went, and write their outcomes to `FOLDER`/outcomes.json."""
    outcomes = []
    for k, case in enumerate(cases):
        began = time.monotonic()
        outcomes.append(run(k, case))
        took = time.monotonic() - began
        outcomes[-1]["seconds"] = took
        print(f"{case}: {took:.1f} s: {outcomes[-1]['wrong'] or 'as promised'}", flush=True)
        (folder / "outcomes.json").write_text(json.dumps(outcomes))


def main(module: str, count: str, folder: str, *arguments: str) -> None:
    """Run the ranks and wait for them; in a child, be one of them."""
    from fpipe.tensors.torch_private import import_tracer

    worker = import_module(module)
    import_tracer()  # else each rank would
    gc.freeze()
    rank, children = fork(int(count))
    if rank is None:
        Path(folder, "codes.json").write_text(json.dumps(wait(children, patience=PATIENCE)[0]))
    else:
        redirect(Path(folder, f"log-{rank}"))
        worker.main(rank, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
