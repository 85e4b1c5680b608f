# SPDX-License-Identifier: Apache-2.0
"""Place stages where links differ: keep consecutive stages among ranks that fast links connect.

The families of schedules place stages as if all links were alike, so a loop or a vee crosses a slow link again and
again. With two data centers, say, a microbatch should pass through one, then the other: a line through all ranks, or a
loop or a vee inside each, crosses the slow link once in each direction. Orders for these placements are searched for.

Runs when a plan is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Final, TypeAlias

from fpipe.planning.candidates import Candidate, Room
from fpipe.planning.chain import partition_chain
from fpipe.planning.ordering import find_order
from fpipe.planning.prediction import Predictor
from schedules import Link, Placement

APART: Final = 2.0
"""Islands are told apart where links take at least this factor longer than the next faster ones."""
ISLAND_TRIES: Final = 100

Islands: TypeAlias = tuple[tuple[int, ...], ...]
"""Groups of ranks that fast links connect."""


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


def place_on_islands(predictor: Predictor, microbatches: int, ranks: int, room: Room) -> Iterator[Candidate]:
    """Yield a candidate for each placement on islands of ranks, if there are several, with an order of its own."""
    ranges = predictor.profile.ranges
    work = ranges.seconds("F") + ranges.seconds("I") + ranges.seconds("W")
    for placement in list_placements(find_islands(predictor.profile.link, ranks)):
        cuts = partition_chain(work, placement.stages, room.places, room.pinned)
        if cuts is None:
            continue
        found = find_order(predictor, placement, microbatches, cuts, room, ISLAND_TRIES)
        if found is not None:
            yield Candidate.of(predictor, found, cuts)
