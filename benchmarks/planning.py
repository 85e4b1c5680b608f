# SPDX-License-Identifier: Apache-2.0
"""The cost of working with large schedules, compared with torch.distributed.pipelining in the same run.

    python -m benchmarks.planning          # arrays in full; loops and torch at a sixteenth of the microbatches
    python -m benchmarks.planning --full   # all in full: minutes

1. Generate, check, lower and simulate interleaved 1F1B for 256 ranks x 2 chunks x 1024 microbatches: 1.05 million
   compute actions, on one core, as arrays and in loops (without NumPy). Lowering as arrays places the transfers of all
   ranks; then every rank's program is read, four million actions in Python. In loops the two are one. Simulating
   checks again; arrays remember that the same schedule was read and checked. Torch generates, lowers and simulates the
   same schedule, and its lowering makes actions. Seconds are the clock's; below them, of the same run, the processor's.
2. Simulate 1F1B for 1,024 ranks, streaming, and measure the memory as the number of microbatches grows.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from inspect import isgenerator
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

from benchmarks.common.rows import figure, most, row
from schedules import (
    Action,
    Costs,
    Program,
    Schedule,
    check,
    interleaved_1f1b,
    lower,
    one_f_one_b,
    simulate,
)

RANKS, CHUNKS, MICROBATCHES = 256, 2, 1024
STEPS = ("generate", "check", "lower", "simulate")
READ = "read all programs"


class Seconds(NamedTuple):
    """The time of something by the clock, and that of the processor."""

    clock: float
    processor: float


def seconds(work: Callable[[], object]) -> Seconds:
    start = time.perf_counter(), time.process_time()
    work()
    return Seconds(time.perf_counter() - start[0], time.process_time() - start[1])


@contextmanager
def loops_only() -> Iterator[None]:
    """Hide NumPy."""
    with patch.dict(sys.modules, {"numpy": None}):
        yield


def exhaust(streams: Iterable[Iterable[object]]) -> None:
    for stream in streams:
        deque(stream, maxlen=0)


def lower_all(program: Program) -> list[Iterator[Action]]:
    """Return the streams of a program, its transfers placed; none if that takes reading them, which it then does."""
    streams = program.streams(range(program.schedule.ranks))
    if isgenerator(streams[0]):
        exhaust([zip_longest(*streams)])
        streams.clear()
    return streams


def ours(schedule: Schedule) -> dict[str, Seconds]:
    """Return the seconds to generate, check, lower and simulate a schedule, and to read its program."""
    ranks, program, streams = range(schedule.ranks), lower(schedule), list[Iterator[Action]]()
    return {
        "generate": seconds(lambda: exhaust(schedule.actions(rank) for rank in ranks)),
        "check": seconds(lambda: check(schedule)),
        "lower": seconds(lambda: streams.extend(lower_all(program))),
        "simulate": seconds(lambda: simulate(schedule, Costs(F=1, B=2))),
        READ: seconds(lambda: exhaust(streams)),
    }


def incumbents(ranks: int, chunks: int, microbatches: int, simulated: bool) -> dict[str, Seconds]:
    """Return the seconds torch takes to generate and lower the same schedule, and to simulate it if asked."""
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

    def lowering() -> None:  # the three passes in its general runtime
        sharded: dict[int, list[Any]] = {r: [*theirs._add_unshard_reshard(row)] for r, row in compute.items()}
        transfers({rank: theirs._add_reduce_grad(actions, microbatches) for rank, actions in sharded.items()})

    found["lower"] = seconds(lowering)
    if simulated:  # its simulator takes transfers, but no sharding actions
        lowered = transfers({rank: [*actions] for rank, actions in compute.items()})
        found["simulate"] = seconds(
            lambda: theirs._simulate_comms_compute(lowered, lambda stage: stage % ranks, ranks * chunks)
        )
    return found


def details(rows: dict[str, dict[str, Seconds]], actions: dict[str, int]) -> None:
    """Print the second table: the seconds of every step."""
    print("\n## Large schedules, in seconds\n\n| | actions |", " | ".join(STEPS), f"| all | us per action | {READ} |")
    print("|---" * (len(STEPS) + 5) + "|")
    for name, found in rows.items():
        for clock, what in enumerate((name, f"{name}, the processor's")):
            cells = [figure(found[step][clock]) if step in found else "" for step in STEPS]
            whole = total(found, clock)
            each, read = whole / actions[name] * 1e6, found[READ][clock] if READ in found else 0.0
            print(f"| {what} | {actions[name]:,} | {' | '.join(cells)} | {whole:.2f} | {each:.2f} | {figure(read)} |")


def total(found: dict[str, Seconds], clock: int) -> float:
    """Return the time of all steps, by the clock (0) or of the processor (1), without that of reading the program."""
    return sum(found[step][clock] for step in STEPS if step in found)


def streaming(ranks: int, microbatches: int) -> None:
    """Print actions per second, and Python's peak memory as microbatches grow, on fewer ranks."""
    schedule = one_f_one_b(ranks=ranks, microbatches=microbatches)
    took, actions = seconds(lambda: simulate(schedule)).clock, 2 * ranks * microbatches
    print(
        f"\nSimulating 1F1B for {ranks:,} ranks x {microbatches:,} microbatches takes {took:.1f} s: "
        f"{actions / took:,.0f} actions per second. Peak memory at 64 ranks:"
    )
    for some in (256, 1024):
        with loops_only():
            tracemalloc.start()
            simulate(one_f_one_b(ranks=64, microbatches=some))
            loops = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        tracemalloc.start()
        simulate(one_f_one_b(ranks=64, microbatches=some))
        arrays = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        print(f"- {some:,} microbatches: {loops / 1024:,.0f} KiB in loops, {arrays / 1024:,.0f} KiB as arrays")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="loops and torch at full size too")
    is_full = parser.parse_args().full
    rows, actions = {}, {}

    def add(name: str, microbatches: int, found: dict[str, Seconds]) -> None:
        rows[name], actions[name] = found, 2 * RANKS * CHUNKS * microbatches

    small = MICROBATCHES // 16
    for microbatches in (small, MICROBATCHES):
        made = interleaved_1f1b(ranks=RANKS, microbatches=microbatches, chunks=CHUNKS)
        if is_full or microbatches == small:
            with loops_only():
                add(f"ours in loops, {microbatches} microbatches", microbatches, ours(made))
        add(f"ours, {microbatches} microbatches", microbatches, ours(made))
    for microbatches in (small, *((MICROBATCHES,) if is_full else ())):
        found = incumbents(RANKS, CHUNKS, microbatches, simulated=microbatches == small)
        add(f"torch, {microbatches} microbatches", microbatches, found)
    loops, mine = ([name for name in rows if name.startswith(what)][-1] for what in ("ours in", "ours,"))
    *_, other = rows
    for what, steps in (("generate", ("generate",)), ("lower and read", ("lower", READ))):
        both = [
            sum(rows[name][k].clock for k in steps if k in rows[name]) / actions[name] * 1e6 for name in (mine, other)
        ]
        print(row(f"{what} interleaved 1F1B, {RANKS} ranks, per action", "us", both[0], both[1]))
    what = f"generate, check, lower and simulate, {actions[mine]:,} actions"
    print(row(what, "s", total(rows[mine], 0), None, most(1.5)))
    print(row("the same, the processor's time", "s", total(rows[mine], 1), None))
    print(row(f"after these, {READ}, four times as many actions", "s", rows[mine][READ].clock, None))
    print(row("the processor's time for that", "s", rows[mine][READ].processor, None))
    for clock, what in enumerate(("by the clock", "of the processor")):
        each = total(rows[loops], clock) / actions[loops] * 1e6
        print(row(f"generate to simulate in loops, without NumPy, per action, {what}", "us", each, None))
    details(rows, actions)
    streaming(1024, 1024)


if __name__ == "__main__":
    main()
