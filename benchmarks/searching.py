# SPDX-License-Identifier: Apache-2.0
"""How good searched schedules are: against the schedules of the literature in the same memory, and against the bound.

    python -m benchmarks.searching                        # the cells below, up to a minute each
    python -m benchmarks.searching --seconds 1 --ranks 8  # fewer of 1, as for the page

1. Costs measured on 8 GPUs (arXiv 2401.10241, table 5), on 8 and 16 ranks, in the memory of four families each.
2. Two data centers of 4 ranks each with a slow link between them (arXiv 2507.00217, table 5, case 1): the best time
   per microbatch, over placements that know of the link and others that do not. The times that are reported there come
   from another model of transfers; I and W are fitted to the first row.
3. Uneven stages: random costs, on a line and on a vee, in the memory of 1F1B and in half of it.
4. Small random problems (p <= 4, m <= 8), in memory from the least to plenty: against CP-SAT, which begins at one
   microbatch at a time and gets five seconds for each.
5. The same with 4 ranks of two stages that differ in size, in memory from the least that fits to a quarter more.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from math import inf
from random import Random
from typing import Any, NamedTuple, TypeAlias

from benchmarks.common.rounds import rounds
from benchmarks.common.rows import most, row
from schedules import (
    Costs,
    Link,
    Placement,
    Problem,
    Schedule,
    SearchResult,
    Sizes,
    cp_sat,
    linear,
    looped,
    one_f_one_b,
    search,
    simulate,
    v_half,
    vee,
    zb_h1,
    zb_h2,
    zb_v,
)
from schedules.playing.instance import make_instance
from schedules.searching.units import take_turns

MEASURED = (
    (24, 18.522, 18.086, 9.337, 0.601),
    (32, 18.513, 18.086, 9.331, 0.626),
    (64, 18.546, 18.097, 9.321, 0.762),
    (24, 29.718, 29.444, 19.927, 0.527),
    (32, 29.802, 29.428, 19.530, 0.577),
    (64, 29.935, 29.621, 19.388, 0.535),
)
FORWARD, INPUT_HALF, WEIGHT_HALF = 0.038, 0.0465, 0.0206
REPORTED = {(0, 0): 0.118, (0.25, 0.25): 0.127, (0.25, 2): 0.177, (2, 0.25): 0.148, (2, 2): 0.196}
APART = tuple(((a, b), 1.0 if (a < 4) != (b < 4) else 0.0) for a in range(8) for b in range(8) if a != b)
PLACEMENTS = {
    "line": linear(8),
    "vee": vee(8),
    "loop": looped(8, 2),
    "a loop in each data center": Placement(8, (0, 1, 2, 3) * 2 + (4, 5, 6, 7) * 2),
    "a vee in each data center": Placement(8, (0, 1, 2, 3, 3, 2, 1, 0, 4, 5, 6, 7, 7, 6, 5, 4)),
}


Draw: TypeAlias = Callable[[int], tuple[Costs, Placement, int, dict[str, Any]]]
"""Returns the arguments of a search for a seed."""


class Cell(NamedTuple):
    """A family, and the search in its memory."""

    family: Schedule
    makespan: float
    found: SearchResult
    seconds: float


def compete(family: Schedule, costs: Costs, split: bool, seconds: float) -> Cell:
    """Return a family and what a search finds in as much memory."""
    timeline, start = simulate(family, costs), time.perf_counter()
    memory = max(timeline.peak_memory)
    problem = Problem(costs, family.placement, family.microbatches, memory, split=split)
    found = search(problem, seconds=seconds)
    return Cell(family, timeline.makespan, found, time.perf_counter() - start)


def share(costs: Costs, parts: int) -> Costs:
    """Return the costs of a part of a stage."""
    times: dict[str, Any] = {kind: costs.time(kind, 0) / parts for kind in "FBIW"}
    return Costs(**times, comm=costs.comm)


def published(seconds: float, counts: Sequence[int]) -> Iterator[Cell]:
    for ranks in counts:
        for M, F, I, W, comm in MEASURED:  # noqa: E741 - the action's name
            costs = Costs(F=F, B=I + W, I=I, W=W, comm=comm)
            yield compete(one_f_one_b(ranks, M), costs, False, seconds)
            yield compete(zb_h1(ranks, M), costs, True, seconds)
            yield compete(zb_h2(ranks, M), costs, True, seconds)
            yield compete(zb_v(ranks, M), share(costs, 2), True, seconds)


def uneven(seconds: float, most_ranks: int) -> Iterator[Cell]:
    random = Random(0)
    for ranks, M in [one for one in ((4, 8), (8, 32), (16, 64)) if one[0] <= most_ranks]:
        for family, split in ((one_f_one_b(ranks, M), False), (zb_h1(ranks, M), True), (v_half(ranks, M), True)):
            F = tuple(random.uniform(0.5, 2) for _ in range(family.stages))
            I, W = (tuple(f * random.uniform(0.6, 1.1) for f in F) for _ in range(2))  # noqa: E741
            costs = Costs(F=F, I=I, W=W, B=tuple(map(sum, zip(I, W, strict=True))), comm=0.1)
            yield compete(family, costs, split, seconds)


def draw_small(seed: int) -> tuple[Costs, Placement, int, dict[str, Any]]:
    """Return the arguments of a search for a small random problem."""
    random = Random(seed)
    ranks, chunks = random.randint(2, 4), random.choice((1, 2, 2))
    placement = linear(ranks) if chunks == 1 else random.choice((looped(ranks, 2), vee(ranks)))
    forward, half, rest = (tuple(float(random.randint(1, 8)) for _ in range(placement.stages)) for _ in range(3))
    whole = tuple(map(sum, zip(half, rest, strict=True)))
    costs = Costs(F=forward, I=half, W=rest, B=whole, comm=random.choice((0, 0, 1, 2, 4)))
    memory = random.choice((1, 1.5, 2, 2.5, 3, inf) if chunks == 2 else (1, 2, 3, inf))
    return costs, placement, random.randint(2, 8), {"memory": memory, "split": random.random() < 0.8}


def draw_tight(seed: int) -> tuple[Costs, Placement, int, dict[str, Any]]:
    """Return the arguments of a search for a small random problem in little memory."""
    random = Random(seed)
    placement = random.choice((looped(4, 2), vee(4)))
    forward, half, rest, held = (tuple(float(random.randint(1, 8)) for _ in range(8)) for _ in range(4))
    whole = tuple(map(sum, zip(half, rest, strict=True)))
    costs = Costs(F=forward, I=half, W=rest, B=whole, comm=random.choice((0, 0, 1, 2, 4)))
    sizes = Sizes(activation=held, residual=tuple(size * random.choice((0.25, 0.5, 1)) for size in held))
    least = (sum(held[s] for s in placement.stages_on(rank)) for rank in range(4))
    memory = tuple(room * random.uniform(1, 1.25) for room in least)
    more = {"memory": memory, "sizes": sizes, "split": random.random() < 0.8}
    return costs, placement, random.randint(4, 8), more


class Answers(NamedTuple):
    """What a search finds alone, what CP-SAT finds alone, and whether each proves it."""

    searched: float
    is_proved: bool
    solved: float
    is_solved: bool

    @property
    def ratio(self) -> float:
        """The searched time over that of CP-SAT."""
        return self.searched / self.solved


def answer(
    costs: Costs, placement: Placement, microbatches: int, more: dict[str, Any], seconds: float, limit: float
) -> Answers:
    """Let a search and CP-SAT solve a problem, in so many seconds each."""
    problem = Problem(costs, placement, microbatches, **more)
    found = search(problem, seconds=seconds)
    instance = make_instance(problem)
    solved = cp_sat(instance, take_turns(instance), limit, 0)
    best = solved.contender.makespan
    return Answers(found.makespan, found.gap < 1e-9, best, solved.bound >= best * (1 - 1e-9))


def compare_small(title: str, draw: Draw, number: int, seconds: float, limit: float = 5.0) -> list[Answers]:
    """Print what a search finds alone, and CP-SAT alone, for problems drawn at random."""
    print(f"\n### {title}\n\n| problem | searched | proved | CP-SAT | proved |\n|---|---|---|---|---|")
    done = []
    for seed in range(number):
        costs, placement, M, more = draw(seed)
        one = answer(costs, placement, M, more, seconds, limit)
        searched, solved = (("no", "yes")[is_proved] for is_proved in (one.is_proved, one.is_solved))
        name = f"{seed}: {placement.homes}, {M} microbatches"
        print(f"| {name} | {one.searched:g} | {searched} | {one.solved:g} | {solved} |", flush=True)
        done.append(one)
    return done


def print_cells(title: str, cells: Iterator[Cell]) -> list[Cell]:
    print(f"\n### {title}\n\n| family | its time | searched | gap to the bound | seconds | from |")
    print("|---|---|---|---|---|---|")
    done = []
    for one in cells:
        found = one.found
        times = f"{one.makespan:.4g} | {found.makespan / one.makespan:.4f} | {100 * found.gap:.2f} %"
        print(f"| `{one.family!r}` | {times} | {one.seconds:.1f} | {found.origin.partition('(')[0]} |", flush=True)
        done.append(one)
    return done


def slow_links(seconds: float) -> dict[tuple[float, float], float]:
    """Print the seconds per microbatch for each delay and placement; return the best of each delay."""
    print("\n### Two data centers\n\n| latency + bandwidth | " + " | ".join(PLACEMENTS) + " | reported |")
    print("|---" * (len(PLACEMENTS) + 2) + "|")
    best, found = {}, dict[float, list[float]]()  # by the sum of both, which is all that counts in the simulator
    for delays, reported in REPORTED.items():
        link = Link(latency=sum(delays) * FORWARD, slow=APART)
        whole = Costs(F=FORWARD, I=INPUT_HALF, W=WEIGHT_HALF, B=INPUT_HALF + WEIGHT_HALF, comm=link)
        if sum(delays) not in found:
            problems = [Problem(share(whole, one.stages // 8), one, 16, memory=8) for one in PLACEMENTS.values()]
            found[sum(delays)] = [search(one, seconds=seconds).makespan / 16 for one in problems]
        best[delays] = min(found[sum(delays)])
        cells = " | ".join(f"{value:.4f}" for value in found[sum(delays)])
        print(f"| {delays[0]:g} + {delays[1]:g} | {cells} | {reported} |", flush=True)
    return best


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each search; default 60")
    counts = "of the published costs; the most of uneven stages"
    parser.add_argument("--ranks", type=int, nargs="+", default=(8, 16), help=counts)
    options = parser.parse_args()
    with redirect_stdout(StringIO()) as details:  # rows come before
        print("\n## Searched schedules")
        drawn = rounds(8)
        literature = print_cells("Published costs", published(options.seconds, options.ranks))
        print_cells("Uneven stages", uneven(options.seconds, max(options.ranks)))
        small = compare_small("Small problems", draw_small, drawn, min(options.seconds, 5.0))
        tight = compare_small("Small problems in little memory", draw_tight, drawn, min(options.seconds, 5.0))
        best = slow_links(options.seconds)
    worst = max(one.found.makespan / one.makespan for one in literature)
    gap = 100 * max(one.found.gap for one in literature)
    print(row(f"searched / family, worst of {len(literature)} cells", "ratio", round(worst, 9), None, most(1.0)))
    print(row(f"gap to the bound, worst of {len(literature)} cells", "%", gap, None, most(2)))
    over = max(best[delays] / REPORTED[delays] for delays in best)
    print(row("slow links, worst of 5 against the best reported", "ratio", over, None, most(1.0)))
    for name, answers in (("small problems", small), ("small problems in little memory", tight)):
        worst, unproved = max(one.ratio for one in answers), sum(not one.is_proved for one in answers)
        print(row(f"{name}, worst of {len(answers)} against CP-SAT", "ratio", round(worst, 9), None, most(1.0)))
        print(row(f"{name} that the search does not prove", f"of {drawn}", unproved, None, most(1)))
    print(details.getvalue())
