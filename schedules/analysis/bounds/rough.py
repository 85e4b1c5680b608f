# SPDX-License-Identifier: Apache-2.0
"""The bounds that take no time to find: one microbatch, one rank, one rank's memory.

They use only how early the first pass of a kind can start on a rank, and how much must follow the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from schedules.playing.problem import PlacedStage, Problem


class Reason(NamedTuple):
    """A lower bound on the makespan, and why it holds."""

    makespan: float
    because: str


@dataclass(frozen=True)
class ChainTimes:
    """One microbatch alone: per stage, the time before its `forward` and `input_half`, and that after both started."""

    forward: tuple[float, ...]
    input_half: tuple[float, ...]
    after_forward: tuple[float, ...]
    after_input_half: tuple[float, ...]

    @property
    def longest(self) -> float:
        """The time from the first forward to the last weight half."""
        return max((start + after for start, after in zip(self.forward, self.after_forward, strict=True)), default=0.0)


def time_chain(problem: Problem) -> ChainTimes:
    """Return the earliest starts of the passes of one microbatch, and the least time from each start to the end.

    A forward needs the values of the stages that feed it; an input half needs its own forward, and the cotangents of
    the stages that use its values; a weight half needs its input half. Each needs the transfer of what comes from
    another rank. No order of a rank changes that.
    """
    stages = problem.stages
    forward, half = [0.0] * len(stages), [0.0] * len(stages)
    for n, one in enumerate(stages):
        arrivals = (forward[m] + stages[m].forward + transfer for m, transfer in one.fed_by)
        forward[n] = max(arrivals, default=0.0)
    for n in reversed(range(len(stages))):
        arrivals = (half[m] + stages[m].input_half + transfer for m, transfer in stages[n].pulled_by)
        half[n] = max(forward[n] + stages[n].forward, *arrivals, 0.0)
    after_forward, after_half = [0.0] * len(stages), [0.0] * len(stages)
    for n, one in enumerate(stages):
        waits = (transfer + after_half[m] for m, transfer in one.pulls)
        after_half[n] = one.input_half + max(one.weight_half, *waits, 0.0)
    for n in reversed(range(len(stages))):
        waits = (transfer + after_forward[m] for m, transfer in stages[n].feeds)
        after_forward[n] = stages[n].forward + max(after_half[n], *waits, 0.0)
    return ChainTimes(tuple(forward), tuple(half), tuple(after_forward), tuple(after_half))


def find_rough_bounds(problem: Problem) -> Iterator[Reason]:
    """Yield the bounds of one microbatch, of each rank, and of the memory of each rank that has a limit."""
    times = time_chain(problem)
    yield Reason(times.longest, f"one microbatch alone takes {times.longest:g}")
    for rank in range(problem.ranks):
        if problem.on(rank):
            yield _bound_rank(problem, times, rank)
            if problem.backward and problem.room[rank] < inf:
                yield _bound_memory(problem, times, rank)


def _bound_rank(problem: Problem, times: ChainTimes, rank: int) -> Reason:
    """Return the work of a rank, and the least time that it is idle before its work and after it.

    Before the first input half can start, at `back`, a rank runs forwards only: none before the first input can arrive,
    and together no more than fit into its memory, since nothing is given back yet. After the last input half, `rest`
    before the end, it runs weight halves only, of microbatches that were all in its memory when `rest` began. No
    schedule is shorter than one microbatch, so the two do not overlap.
    """
    numbers = problem.on(rank)
    stages, memory = [problem.stages[n] for n in numbers], problem.room[rank]
    work = sum(one.work for one in stages)
    head = min(times.forward[n] for n in numbers)
    if problem.backward:
        back = min(times.input_half[n] for n in numbers)
        early = _fit(memory, [(one.forward, one.activation, len(one.microbatches)) for one in stages])
        rest = min(times.after_input_half[n] - problem.stages[n].input_half for n in numbers)
        late = _fit(memory, [(one.weight_half, one.residual, len(one.microbatches)) for one in stages])
        before, after = max(head, back - early), max(0.0, rest - late)
    else:
        before, after = head, min(times.after_forward[n] - problem.stages[n].forward for n in numbers)
    text = f"rank {rank} works for {work:g}, is idle for {before:g} before its first input half"
    return Reason(before + work + after, f"{text} and for {after:g} after its last")


def _fit(memory: float, passes: list[tuple[float, float, int]]) -> float:
    """Return the most time that passes take which fit into memory together; each has a time, a size and a number."""
    total = 0.0
    for time, size, number in sorted(passes, key=lambda one: -one[0] / one[1] if one[1] else -inf):
        fitting = min(number, memory / size) if size else number
        memory -= fitting * size if size else 0.0
        total += fitting * time
    return total


def _bound_memory(problem: Problem, times: ChainTimes, rank: int) -> Reason:
    """Return the bound by memory over time: all activations of a rank, each as long as it must be held.

    A microbatch holds its activations from the start of its forward to the end of its input half at least, and what
    that leaves to the end of its weight half. The sum over all, memory times time, is at most the rank's memory times
    the time from its first forward to its last end (Little's law).
    """
    numbers, memory = problem.on(rank), problem.room[rank]
    held = sum(_hold_over_time(problem, n) * len(problem.stages[n].microbatches) for n in numbers)
    head = min(times.forward[n] for n in numbers)
    ends = (times.after_input_half[n] - problem.stages[n].input_half for n in numbers)
    tail = 0.0 if any(problem.stages[n].weight_half for n in numbers) else min(ends)
    needed = held / memory if held else 0.0
    text = f"rank {rank} holds {held:g} of memory times time, in {memory:g} of memory"
    return Reason(head + needed + tail, f"{text}, after {head:g} and before {tail:g}")


def _hold_over_time(problem: Problem, n: int) -> float:
    """Return the memory times time of one microbatch on one stage, at least."""
    one = problem.stages[n]
    until_half = _time_round_trip(problem.stages, n)
    return one.activation * until_half + one.residual * one.weight_half


def _time_round_trip(stages: tuple[PlacedStage, ...], n: int) -> float:
    """Return the least time from the start of a stage's forward to the end of its input half."""
    out = {n: stages[n].forward}  # from that start to the end of a forward that depends on it
    for m in range(n + 1, len(stages)):
        arrivals = [out[u] + transfer for u, transfer in stages[m].fed_by if u in out]
        if arrivals:
            out[m] = max(arrivals) + stages[m].forward
    back = dict[int, float]()
    for m in sorted(out, reverse=True):
        arrivals = [back[u] + transfer for u, transfer in stages[m].pulled_by if u in back]
        back[m] = max([out[m], *arrivals]) + stages[m].input_half
    return back[n]
