# SPDX-License-Identifier: Apache-2.0
"""Start ranks as forks of one process, which has imported what they run: importing torch takes each process seconds.

    python -m benchmarks.common.forks warm|fresh MODULE COUNT ARGUMENT...

Rank r runs `python -m MODULE ARGUMENT...`, with the environment that torchrun would give to it; a fresh one imports
everything by itself. The store of that environment is the caller's. If a rank fails, the others are stopped.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import sys
from importlib import import_module


def start(way: str, module: str, arguments: list[str], rank: int) -> int:
    """Fork a rank, and return its process."""
    if child := os.fork():
        return child
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if way == "fresh":
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
    sys.argv[1:] = arguments
    del sys.modules[module]  # it runs as a script now
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


def warm_up(module: str) -> None:
    """Import what all ranks need."""
    import_module(module)
    if "fpipe" in sys.modules:
        from fpipe.tensors.torch_private import import_tracer

        import_tracer()
    gc.freeze()


def main(way: str, module: str, count: str, *arguments: str) -> int:
    """Run the ranks; return the exit code of the first that failed, or zero."""
    if way == "warm":
        warm_up(module)
    children = {start(way, module, [*arguments], rank) for rank in range(int(count))}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        while children:
            child, status = os.wait()
            children.remove(child)
            if code := os.waitstatus_to_exitcode(status):
                return code
    finally:
        for child in children:
            os.kill(child, signal.SIGTERM)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
