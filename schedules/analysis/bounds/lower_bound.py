# SPDX-License-Identifier: Apache-2.0
"""Bound the makespan from below: no schedule with these costs, on this placement, in this memory, takes less time.

Problem. A search can say how good its best schedule is, but not how good one could be.

Idea. Every schedule obeys the same few facts: passes take time and depend on each other, ranks do one thing at a time,
and their memory is limited. From these follow, for every pass, how early it can start and how long the schedule lasts
after it (`heads`), and for every rank, how long it must be idle. Each bound uses some of the facts and ignores the
others. The largest wins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from schedules.analysis.bounds.heads import find_heads
from schedules.analysis.bounds.machine import Passes, find_tightest
from schedules.analysis.bounds.network import QueueNetwork, connect_queues, reverse
from schedules.analysis.bounds.release import Heads
from schedules.analysis.bounds.rough import Reason, find_rough_bounds
from schedules.analysis.bounds.windows import add_idle, find_idle
from schedules.arguments import require_types
from schedules.errors import SizeError
from schedules.language.actions import Action
from schedules.playing.costs import ROUNDING
from schedules.playing.problem import Problem


@dataclass(frozen=True)
class Bound:
    """A lower bound on the makespan. `parts` are all bounds that were tried, with their reasons, largest first.

    >>> from schedules import Costs, linear
    >>> least = bound(Problem(Costs(F=1, B=2), linear(ranks=2), microbatches=3, split=False))
    >>> least.makespan
    12.0
    """

    parts: tuple[Reason, ...]

    @property
    def makespan(self) -> float:
        """The largest of the bounds: no schedule takes less time."""
        return self.parts[0].makespan

    @property
    def because(self) -> str:
        """The reason for the largest bound."""
        return self.parts[0].because


LEFT_OUT: Final = {
    "microbatches": "Leave them out, with the costs of the cheapest microbatch.",
    "slices": "Leave them out for a bound on schedules of whole microbatches.",
}
"""The costs that must be left out, and how to do without."""


def bound(problem: Problem) -> Bound:
    """Return a lower bound on the makespan of every schedule for a problem.

    It covers schedules of forwards and backwards, fused or not, of whole microbatches. Whatever else they do takes time
    and memory on top. Recomputation trades memory for time, and slices start earlier, so those are not covered.

    The bound is proved; only the last digits of its float may be too large. How near a schedule comes is not. Of random
    problems with 2 to 5 microbatches in the memory of 1 to 3, solved exhaustively, it was the optimum of 9 in 10 chains
    (at worst 6 % below), of 2 in 3 with two stages per rank (12 %), and of half of those with two routes (47 %).

    Raise `SizeError` if one microbatch alone does not fit into the memory of a rank: the message says the least that
    could.
    """
    require_types(bound, locals())
    network = _connect(problem)
    return _sort([*find_rough_bounds(problem), *_find_fine_bounds(problem, network)])


def rough_bound(problem: Problem) -> Bound:
    """Return the bound that `bound` finds without looking at single microbatches: often less, but at once.

    >>> from schedules import Costs, looped
    >>> rough_bound(Problem(Costs(F=1, B=2), looped(ranks=2, chunks=2), microbatches=4, split=False)).because
    'rank 1 works for 24, is idle for 1 before its first input half and for 2 after its last'
    """
    _connect(problem)
    return _sort(find_rough_bounds(problem))


def _connect(problem: Problem) -> QueueNetwork:
    """Return the network; raise `SizeError` for costs of slices, and if one microbatch does not fit into a rank."""
    for name, repair in LEFT_OUT.items():
        if given := getattr(problem.costs, name):
            expected = f"whole microbatches that cost the same, so no {name}"
            raise SizeError.of("bound", f"costs.{name}", given, expected, repair)
    network = connect_queues(problem)
    _require_room(problem, tuple(map(network.find_least_room, range(problem.ranks))))
    return network


def _require_room(problem: Problem, least: tuple[float, ...]) -> None:
    """Raise `SizeError` if a rank has less than the `least` room for activations that one microbatch needs.

    The message is about the rank that lacks most.
    """
    both = zip(problem.room, least, strict=True)
    short = [(needs - has, rank) for rank, (has, needs) in enumerate(both) if needs > has * (1 + ROUNDING)]
    if not short:
        return
    rank = max(short, key=lambda one: one[0])[1]
    unit = problem.ranks / problem.placement.stages if problem.sizes is None else 1.0
    weight = problem.weigh(rank)
    raise SizeError.of(
        "bound",
        "memory",
        float(f"{problem.room[rank] * unit + weight * (1 - ROUNDING):.12g}"),
        f"at least the {least[rank] * unit + weight:.12g} that rank {rank} needs for one microbatch",
        "Choose more memory, or smaller stages.",
    )


def _sort(reasons: Iterable[Reason]) -> Bound:
    """Return the bound of these reasons. Of those that differ by rounding only, the first comes first."""
    return Bound(tuple(sorted(reasons, key=lambda reason: -float(f"{reason.makespan:.9g}"))))


def _find_fine_bounds(problem: Problem, network: QueueNetwork) -> list[Reason]:
    """Return the bounds by heads and tails: of each rank's idle times and passes, and of the longest path."""
    mirrored = reverse(network)
    heads, tails = find_heads(network), find_heads(mirrored)
    ranks = [rank for rank in range(problem.ranks) if network.on(rank)]
    reasons = [_bound_passes(network, rank, heads, tails) for rank in ranks]
    reasons.append(_bound_path(problem, network, heads, tails))
    known = max(reason.makespan for reason in reasons)
    windows = (add_idle(find_idle(network, rank, heads), find_idle(mirrored, rank, tails), known) for rank in ranks)
    return [*(_bound_idle(network, rank, *idle) for rank, idle in zip(ranks, windows, strict=True)), *reasons]


def _bound_idle(network: QueueNetwork, rank: int, before: float, after: float) -> Reason:
    """Return the work of one rank and its idle times at both ends."""
    work = network.find_work(rank)
    text = f"rank {rank} works for {work:g}, is idle for {before:g} at first and for {after:g} at the end"
    return Reason(before + work + after, text)


def _bound_path(problem: Problem, network: QueueNetwork, heads: Heads, tails: Heads) -> Reason:
    """Return the longest of all paths through one pass: what must come before it, itself, and what must follow."""
    ends = (
        (head + one.time + tail, c, k)
        for c, one in enumerate(network.queues)
        for k, (head, tail) in enumerate(zip(heads[c], reversed(tails[c]), strict=True))
    )
    makespan, c, k = max(ends)
    one, stage = network.queues[c], problem.stages[network.queues[c].stage]
    kind = "B" if one.kind == "I" and not problem.split else one.kind
    name = Action(kind, stage.stage, stage.microbatches[k])
    idle = makespan - network.find_work(one.rank)
    text = f"rank {one.rank} is idle for {idle:g}: {name} starts at {heads[c][k]:g} at the earliest"
    return Reason(makespan, f"{text}, takes {one.time:g}, and {tails[c][one.passes - 1 - k]:g} follows")


def _bound_passes(network: QueueNetwork, rank: int, heads: Heads, tails: Heads) -> Reason:
    """Return the bound by the passes of one rank that together end the schedule latest."""
    passes = (
        Passes(head, network.queues[c].time, tail)
        for c in network.on(rank)
        for head, tail in zip(heads[c], reversed(tails[c]), strict=True)
    )
    head, work, tail = find_tightest(passes)
    text = f"passes of rank {rank} that take {work:g} start at {head:g} at the earliest, and {tail:g} follows the last"
    return Reason(head + work + tail, text)
