# SPDX-License-Identifier: Apache-2.0
"""Start ranks as forks of one process.

    python ranks.py MODULE COUNT FOLDER ARGUMENT...

Importing torch and the cases takes seconds of each process, and forking takes none. Rank r calls `MODULE.main(r,
ARGUMENT...)`, prints to `FOLDER`/log-r, and ends as any process does; the exit codes of all go to `FOLDER`/codes.json.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

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


def wait(children: dict[int, int]) -> list[int]:
    """Return the exit codes of all children, by rank; kill those that do not end after another has failed."""
    codes, deadline = dict[int, int](), float("inf")
    while len(codes) < len(children):
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            codes[children[child]] = os.waitstatus_to_exitcode(status)
            deadline = min(deadline, time.monotonic() + PATIENCE) if any(codes.values()) else deadline
            continue
        if time.monotonic() > deadline:
            for child, rank in children.items():
                os.kill(child, signal.SIGKILL) if rank not in codes else None
        time.sleep(0.05)
    return [codes[rank] for rank in range(len(children))]


def main(module: str, count: str, folder: str, *arguments: str) -> None:
    """Run the ranks and wait for them; in a child, be one of them."""
    worker = import_module(module)
    gc.freeze()
    rank, children = fork(int(count))
    if rank is None:
        Path(folder, "codes.json").write_text(json.dumps(wait(children)))
    else:
        redirect(Path(folder, f"log-{rank}"))
        worker.main(rank, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
