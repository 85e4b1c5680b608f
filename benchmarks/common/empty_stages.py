# SPDX-License-Identifier: Apache-2.0
"""Time the executor of any version of fpipe on stages that do nothing, in a process of its own.

    python benchmarks/common/empty_stages.py FOLDER

FOLDER is a tree of the sources. Only its core is imported, so torch is not. For every line on standard input, whose
number says how many steps to run, the processor time of a compute action in them is printed, in nanoseconds.
"""

from __future__ import annotations

import gc
import sys
import time
from types import ModuleType
from typing import Any

STAGES, MICROBATCHES = 4, 32


class Empty:
    """A stage of a chain whose functions return immediately."""

    shares: tuple[()] = ()
    shared_by: tuple[()] = ()
    totals: tuple[()] = ()

    def __init__(self, s: int, crossing: Any) -> None:
        def between(a: int, b: int) -> list[Any]:
            return [crossing(a, b, (None,), ((),))] if 0 <= min(a, b) <= max(a, b) < STAGES else []

        self.gets, self.gives = between(s - 1, s), between(s, s + 1)
        self.pulls, self.pulled_by = between(s, s - 1), between(s + 1, s)
        self.results = ((),) * (s == STAGES - 1)

    def forward(self, *_: object) -> tuple[tuple[int], tuple[()], int]:
        """Return one output."""
        return (0,), (), 0

    def backward(self, *_: object) -> tuple[tuple[int], tuple[()]]:
        """Return one cotangent."""
        return (0,), ()

    def complete(self, total: object) -> object:
        """Return the sum."""
        return total


def main(folder: str) -> None:
    """Answer the lines of standard input."""
    package = ModuleType("fpipe")  # its own would import all rooms
    package.__path__ = [f"{folder}/fpipe"]
    sys.modules["fpipe"] = package
    sys.path.insert(0, folder)
    from fpipe.runtime.contract import StageCrossing
    from fpipe.runtime.executor import Execution, Inputs
    from fpipe.runtime.instructions import link
    from fpipe.runtime.local import LocalTransport, drive
    from schedules import lower, one_f_one_b

    how = one_f_one_b(ranks=STAGES, microbatches=MICROBATCHES)
    stages: list[Any] = [Empty(s, StageCrossing) for s in range(STAGES)]
    program, nothing = lower(how), dict.fromkeys(range(STAGES), ())
    inputs = Inputs([nothing] * MICROBATCHES, [nothing] * MICROBATCHES, lambda s, i: (), [0] * MICROBATCHES)
    linked = [link(program.actions(rank), {rank: stages[rank]}, how.placement) for rank in range(how.ranks)]
    gc.disable()
    for line in sys.stdin:
        start = time.process_time_ns()
        for _ in range(int(line)):
            transport = LocalTransport()
            drive([Execution(rank, one, transport, inputs) for rank, one in enumerate(linked)])
        took = time.process_time_ns() - start
        gc.collect()
        print(took / int(line) / (2 * STAGES * MICROBATCHES), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
