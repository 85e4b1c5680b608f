# SPDX-License-Identifier: Apache-2.0
"""What it costs to work with large schedules, beside torch.distributed.pipelining in the same run.

    python benchmarks/schedules.py              # ours, whole; the incumbent at a sixteenth of the microbatches
    python benchmarks/schedules.py --incumbent  # the incumbent whole, too: minutes

1. Generate, check, lower and simulate interleaved 1F1B for 256 ranks x 2 chunks x 1024 microbatches: 1.05 million
   compute actions, on one core. The incumbent makes, lowers and simulates the same schedule.
2. Simulate 1F1B for 4,096 ranks, streaming, and the memory that it takes as microbatches grow.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]  # this file's name

from schedules import (  # noqa: E402
    Costs,
    Schedule,
    check,
    interleaved_1f1b,
    lower,
    one_f_one_b,
    simulate,
)

RANKS, CHUNKS, MICROBATCHES = 256, 2, 1024


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def exhaust(streams: Iterable[Iterable[object]]) -> None:
    for stream in streams:
        deque(stream, maxlen=0)


def ours(schedule: Schedule) -> dict[str, float]:
    """Seconds for each of the four."""
    ranks, program = range(schedule.ranks), lower(schedule)
    return {
        "generate": seconds(lambda: exhaust(schedule.actions(rank) for rank in ranks)),
        "check": seconds(lambda: check(schedule)),
        "lower": seconds(lambda: exhaust(program.actions(rank) for rank in ranks)),
        "simulate": seconds(lambda: simulate(schedule, Costs(F=1, B=2))),
    }


def incumbents(ranks: int, chunks: int, microbatches: int, simulated: bool) -> dict[str, float]:
    """Seconds for the incumbent's own order of the same schedule, its lowering and its simulator."""
    from torch.distributed.pipelining import schedules as theirs

    made: dict[int, Any] = {}
    stages = [SimpleNamespace(group_size=ranks, num_stages=ranks * chunks) for _ in range(chunks)]
    view: Any = SimpleNamespace(
        _n_microbatches=microbatches,
        pp_group_size=ranks,
        n_local_stages=len(stages),
        microbatches_per_round=ranks,
        number_of_rounds=max(1, microbatches // ranks),
    )

    def generate() -> None:
        for rank in range(ranks):
            made[rank] = theirs.ScheduleInterleaved1F1B._calculate_single_rank_operations(view, rank)

    found = {"generate": seconds(generate)}
    compute = {rank: [action for action in actions if action is not None] for rank, actions in made.items()}

    def transfers(rows: dict[int, Any]) -> dict[int, Any]:
        return theirs._add_send_recv(rows, lambda stage: stage % ranks, ranks * chunks)

    def lowering() -> None:  # the three passes of its general runtime
        sharded = {rank: theirs._add_unshard_reshard(actions) for rank, actions in compute.items()}
        transfers({rank: theirs._add_reduce_grad(actions, microbatches) for rank, actions in sharded.items()})

    found["lower"] = seconds(lowering)
    if simulated:  # its simulator takes transfers, and nothing of sharding
        lowered = transfers({rank: [*actions] for rank, actions in compute.items()})
        found["simulate"] = seconds(
            lambda: theirs._simulate_comms_compute(lowered, lambda stage: stage % ranks, ranks * chunks)
        )
    return found


def table(rows: dict[str, dict[str, float]], actions: dict[str, int]) -> None:
    steps = ("generate", "check", "lower", "simulate")
    print(
        f"{'seconds':<34}{'actions':>10}" + "".join(f"{step:>10}" for step in steps) + f"{'all':>10}{'us/action':>11}"
    )
    for name, found in rows.items():
        cells = "".join(f"{found[step]:>10.2f}" if step in found else f"{'-':>10}" for step in steps)
        whole = sum(found.values())
        print(f"{name:<34}{actions[name]:>10,}{cells}{whole:>10.2f}{whole / actions[name] * 1e6:>11.2f}")


def streaming(ranks: int, microbatches: int) -> None:
    """Actions per second, and the peak of Python's memory at growing numbers of microbatches on fewer ranks."""
    schedule = one_f_one_b(ranks=ranks, microbatches=microbatches)
    took, actions = seconds(lambda: simulate(schedule)), 2 * ranks * microbatches
    print(
        f"\nsimulate 1F1B, {ranks:,} ranks x {microbatches:,} microbatches: {took:.1f} s, "
        f"{actions / took:,.0f} actions per second"
    )
    for some in (256, 1024, 4096):
        tracemalloc.start()
        simulate(one_f_one_b(ranks=64, microbatches=some))
        print(
            f"peak memory at 64 ranks x {some:>5,} microbatches: {tracemalloc.get_traced_memory()[1] / 1024:,.0f} KiB"
        )
        tracemalloc.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--incumbent", action="store_true", help="the incumbent at full size too")
    whole = parser.parse_args().incumbent
    rows, actions = {}, {}

    def add(name: str, microbatches: int, found: dict[str, float]) -> None:
        rows[name], actions[name] = found, 2 * RANKS * CHUNKS * microbatches

    small = MICROBATCHES // 16
    for microbatches in (small, MICROBATCHES):
        made = interleaved_1f1b(ranks=RANKS, microbatches=microbatches, chunks=CHUNKS)
        add(f"ours, {microbatches} microbatches", microbatches, ours(made))
    for microbatches in (small, *((MICROBATCHES,) if whole else ())):
        found = incumbents(RANKS, CHUNKS, microbatches, simulated=microbatches == small)
        add(f"incumbent, {microbatches} microbatches", microbatches, found)
    table(rows, actions)
    streaming(4096, 4096)


if __name__ == "__main__":
    main()
