# SPDX-License-Identifier: Apache-2.0
"""Where stages live: a placement maps every stage to a rank.

A placement is a function `(ranks, chunks) -> Placement`; `chunks` is the number of stages that each rank holds. Give
one to `@schedule(placement=...)`, or write your own that returns a `Placement`.

In a bidirectional schedule every stage lives on two ranks. Which of its replicas works on a microbatch is a matter of
the microbatch alone: microbatch `i` takes route number `i mod R` of `R` routes, a route being one home for every stage.
So stage and microbatch still name an action, and a transfer's two ends are still known from its text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from schedules.errors import SizeError


@dataclass(frozen=True)
class Placement:
    """Stage `s` lives on rank `homes[s]`, of `ranks` ranks, and for a second route on that which a mirror names.

    Raises `SizeError` for a rank that does not exist, or more than two routes.

    >>> vee(ranks=3, chunks=2).homes
    (0, 1, 2, 2, 1, 0)
    >>> [bidirectional(ranks=3).home(0, i) for i in range(4)]
    [0, 2, 0, 2]
    """

    ranks: int
    homes: tuple[int, ...]
    mirrors: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if len(self.mirrors) > 1:
            raise SizeError.of("Placement", "mirrors", self.mirrors, "one at most", "Use two routes.")
        for homes in self.routes:
            if len(homes) != len(self.homes) or not all(0 <= rank < self.ranks for rank in homes):
                expected = f"a rank from 0 to {self.ranks - 1} for each of {len(self.homes)} stages"
                raise SizeError.of("Placement", "homes", homes, expected, "Give every stage one of the ranks.")

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.homes)

    @cached_property
    def routes(self) -> tuple[tuple[int, ...], ...]:
        """Per route, the home of every stage; microbatch `i` takes route `i mod len(routes)`."""
        return (self.homes, *self.mirrors)

    def home(self, stage: int, microbatch: int) -> int:
        """The rank on which `stage` works on `microbatch`."""
        return self.routes[microbatch % len(self.routes)][stage]

    def replicas(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold `stage`, each once, in the order of routes: the order in which gradients are added.

        >>> bidirectional(ranks=3).replicas(0), bidirectional(ranks=3).replicas(1)
        ((0, 2), (1,))
        """
        return tuple(dict.fromkeys(route[stage] for route in self.routes))

    def route(self, stage: int, rank: int) -> int:
        """The first route on which `rank` holds `stage`."""
        return [homes[stage] for homes in self.routes].index(rank)

    @cached_property
    def _held(self) -> tuple[tuple[int, ...], ...]:
        held: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage in range(self.stages):
            for rank in self.replicas(stage):
                held[rank].append(stage)
        return tuple(tuple(stages) for stages in held)

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, in stage order.

        >>> looped(ranks=2, chunks=2).stages_on(1)
        (1, 3)
        """
        return self._held[rank]


class Place(Protocol):
    """What `@schedule` takes as `placement`: a function of `ranks`, and of other sizes of the schedule by name."""

    def __call__(self, ranks: int) -> Placement:
        """Place stages on `ranks` ranks."""


def linear(ranks: int, chunks: int = 1) -> Placement:
    """Contiguous runs of stages: with one chunk, stage `s` on rank `s` (GPipe, arXiv 1811.06965).

    >>> linear(ranks=2, chunks=2).homes
    (0, 0, 1, 1)
    """
    return Placement(ranks, tuple(stage // chunks for stage in range(ranks * chunks)))


def looped(ranks: int, chunks: int = 1) -> Placement:
    """Round and round: stage `s` on rank `s mod P` (Megatron's interleaved schedule, arXiv 2104.04473, section 2.2).

    >>> looped(ranks=2, chunks=2).homes
    (0, 1, 0, 1)
    """
    return Placement(ranks, tuple(stage % ranks for stage in range(ranks * chunks)))


def vee(ranks: int, chunks: int = 2) -> Placement:
    """There and back, again and again: each pass over the ranks turns round (V-shaped, arXiv 2405.15362, section 3).

    >>> vee(ranks=2, chunks=2).homes
    (0, 1, 1, 0)
    """
    there, back = tuple(range(ranks)), tuple(reversed(range(ranks)))
    return Placement(ranks, tuple(rank for chunk in range(chunks) for rank in (back if chunk % 2 else there)))


def wave(ranks: int, waves: int = 1) -> Placement:
    """There and back, `waves` times: a vee of `2 * waves` chunks (Hanayo, arXiv 2308.15762).

    >>> wave(ranks=2, waves=2).homes
    (0, 1, 1, 0, 0, 1, 1, 0)
    """
    return vee(ranks, 2 * waves)


def bidirectional(ranks: int, chunks: int = 1) -> Placement:
    """Two routes: even microbatches go down the ranks, odd ones up (Chimera, arXiv 2107.06925, section 3).

    >>> bidirectional(ranks=3).routes
    ((0, 1, 2), (2, 1, 0))
    """
    down = linear(ranks, chunks)
    return Placement(ranks, down.homes, (tuple(ranks - 1 - rank for rank in down.homes),))
