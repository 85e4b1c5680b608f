# SPDX-License-Identifier: Apache-2.0
"""Orders and placements of a plan's own, beyond those of the literature.

Families of schedules suit equal stages. Once cuts, placement and number of microbatches are chosen, the costs of the
stages are known, and `schedules.search` finds an order for them. It neither recomputes nor holds stages twice, so
candidates that do keep their order.

Families also place stages as if all links were alike, so a loop or a vee crosses a slow link again and again. With two
data centers, say, a microbatch should pass through one, then the other: a line through all ranks, or a loop or a vee
inside each, crosses the slow link once in each direction. Orders for these placements are searched for, too.

Runs when a plan is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from time import monotonic
from typing import Final, TypeAlias

from fpipe.planning.candidates import Candidate, PlanProblem
from fpipe.planning.chain import partition_chain
from fpipe.stages.backends import splits
from schedules import Graph, Link, Placement, Schedule, SizeError, search
from schedules.checking.rules import kinds_of

ORDERED: Final = 3
"""The number of candidates that get an order of their own."""
ORDER_TRIES: Final = 300
ORDERABLE: Final = frozenset("FBIW")
APART: Final = 2.0
"""Islands are told apart where links take at least this factor longer than the next faster ones."""
ISLAND_TRIES: Final = 100
Islands: TypeAlias = tuple[tuple[int, ...], ...]
"""Groups of ranks that fast links connect."""


def list_orderable(found: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield the best candidates, of equal cuts and placement one, whose actions a search knows."""
    seen = set[object]()
    for one in found:
        key = one.schedule.placement, one.schedule.microbatches, one.cuts
        if key not in seen and _is_plain(one.schedule):
            seen.add(key)
            yield one
        if len(seen) == ORDERED:
            return


def _is_plain(schedule: Schedule) -> bool:
    return kinds_of(schedule) <= ORDERABLE and not schedule.placement.mirrors and schedule.slices == 1


def reorder(candidate: Candidate) -> Candidate | None:
    """Return the candidate with a faster order of the same stages, or `None` if none is found."""
    schedule = candidate.schedule
    if not candidate.fits:
        return None
    found = find_order(
        candidate.problem,
        schedule.placement,
        candidate.cuts,
        ORDER_TRIES,
        split=splits(schedule),
        graph=schedule.graph,
    )
    return found if found and found.fits and found.predicted.seconds < candidate.predicted.seconds else None


def find_order(
    problem: PlanProblem,
    placement: Placement,
    cuts: Sequence[int],
    tries: int,
    *,
    split: bool = True,
    graph: Graph | None = None,
) -> Candidate | None:
    """Return the best order found of stages placed like this, or `None` if none fits or time has run out."""
    seconds = problem.end - monotonic()
    if seconds <= 0:
        return None
    try:
        found = search(problem.pose(placement, cuts, split, graph), seconds=seconds, tries=tries)
    except SizeError:  # one microbatch does not fit
        return None
    return problem.try_out(found.schedule, cuts)


def find_islands(link: Link, ranks: int) -> Islands:
    """Return the groups of ranks that fast links connect; a single one if all links are about as fast.

    Links are fast up to the widest gap between their times. The slower direction of a pair counts.

    >>> slow = tuple(((a, b), 9.0) for a in range(4) for b in range(4) if a % 2 != b % 2)
    >>> find_islands(Link(latency=1, slow=slow), ranks=4)
    ((0, 2), (1, 3))
    """
    factor = dict(link.slow)
    pairs = [(a, b) for b in range(ranks) for a in range(b)]
    slower = {(a, b): max(factor.get((a, b), 1.0), factor.get((b, a), 1.0)) for a, b in pairs}
    steps = [(high / low if low else float("inf"), low) for low, high in pairwise(sorted({*slower.values()}))]
    gap, fastest = max(steps, default=(1.0, 1.0))
    if gap < APART:
        return (tuple(range(ranks)),)
    islands = [{rank} for rank in range(ranks)]
    for a, b in pairs:
        if slower[a, b] <= fastest:
            joined = islands[a] | islands[b]
            for rank in joined:
                islands[rank] = joined
    return tuple(sorted({tuple(sorted(one)) for one in islands}))


def list_placements(islands: Islands) -> Iterator[Placement]:
    """Yield a line through all islands, a loop in each, and a vee in each; nothing for a single island.

    >>> [placement.homes for placement in list_placements(((0, 2), (1, 3)))]
    [(0, 2, 1, 3), (0, 2, 0, 2, 1, 3, 1, 3), (0, 2, 2, 0, 1, 3, 3, 1)]
    """
    if len(islands) > 1:
        ranks = sum(map(len, islands))
        for routes in (islands, [one * 2 for one in islands], [one + one[::-1] for one in islands]):
            yield Placement(ranks, tuple(chain.from_iterable(routes)))


def place_on_islands(problem: PlanProblem) -> Iterator[Candidate]:
    """Yield a candidate for each placement on islands of ranks, if there are several, with an order of its own.

    There are none for slices, since a search orders whole microbatches.
    """
    if problem.slices > 1:
        return
    ranges = problem.profile.ranges
    work = ranges.seconds("F") + ranges.seconds("I") + ranges.seconds("W")
    for placement in list_placements(find_islands(problem.profile.link, problem.ranks)):
        cuts = partition_chain(work, placement.stages, problem.places, problem.pinned)
        found = None if cuts is None else find_order(problem, placement, cuts, ISLAND_TRIES)
        if found is not None:
            yield found
