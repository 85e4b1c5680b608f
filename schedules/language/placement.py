# SPDX-License-Identifier: Apache-2.0
"""Placements: which rank holds each stage.

Placements are made by functions `(ranks, chunks) -> Placement`, where `chunks` is the number of stages per rank. Pass
one to `@schedule(placement=...)`, or write your own.

In a bidirectional schedule every stage lives on two ranks, and the microbatch alone determines which replica runs it:
microbatch `i` takes route `i mod R` of `R` routes, where a route assigns one rank to every stage. There may be any
number of routes, and the same route several times: `(a, a, b)` sends every third microbatch another way. So stage and
microbatch still identify an action, and a transfer's text still determines both of its ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from schedules.arguments import is_size, require_shape
from schedules.errors import SizeError


@dataclass(frozen=True)
class Placement:
    """A map from stages to ranks: stage `s` is on rank `homes[s]`, and on each further route on rank `mirrors[k][s]`.

    Raise `SizeError` for a rank that does not exist.

    >>> from schedules import bidirectional
    >>> [bidirectional(ranks=3).home(0, i) for i in range(4)]
    [0, 2, 0, 2]
    >>> [Placement(2, (0, 1), ((0, 1), (1, 0))).home(0, i) for i in range(6)]
    [0, 0, 1, 0, 0, 1]
    """

    ranks: int
    homes: tuple[int, ...]
    mirrors: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not is_size(self.ranks):
            expected = "an integer of at least 1"
            raise SizeError.of("Placement", "ranks", self.ranks, expected, "Choose the number of ranks.")
        if not isinstance(self.mirrors, tuple):
            raise SizeError.of("Placement", "mirrors", self.mirrors, "routes, in a tuple", "Write ((1, 0),).")
        for homes in self.routes:
            if not self._has_homes(homes):
                count = len(self.homes) if isinstance(self.homes, tuple) else "the"
                expected = f"a rank from 0 to {self.ranks - 1} for each of {count} stages, in a tuple"
                raise SizeError.of("Placement", "homes", homes, expected, "Assign every stage to one of the ranks.")

    def _has_homes(self, homes: object) -> bool:
        if not isinstance(homes, tuple) or len(homes) != len(self.homes) or not is_size(len(homes), 0):
            return False
        return all(is_size(rank, 0, self.ranks - 1) for rank in homes)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.homes)

    @cached_property
    def routes(self) -> tuple[tuple[int, ...], ...]:
        """For each route, the rank of every stage; microbatch `i` takes route `i mod len(routes)`."""
        return (self.homes, *self.mirrors)

    def home(self, stage: int, microbatch: int) -> int:
        """Return the rank that runs `stage` for `microbatch`."""
        return self.routes[microbatch % len(self.routes)][stage]

    def replicas(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that hold `stage`, each once, in route order, which is the order gradients are added in.

        >>> from schedules import bidirectional
        >>> bidirectional(ranks=3).replicas(0), bidirectional(ranks=3).replicas(1)
        ((0, 2), (1,))
        """
        return tuple(dict.fromkeys(route[stage] for route in self.routes))

    def last(self, stage: int, rank: int, microbatches: int) -> int:
        """Return the last of so many microbatches that `rank` runs through `stage`.

        >>> Placement(2, (0, 1), ((1, 0),)).last(0, rank=0, microbatches=6)
        4
        """
        return next(i for i in reversed(range(microbatches)) if self.home(stage, i) == rank)

    @cached_property
    def _stages_by_rank(self) -> tuple[tuple[int, ...], ...]:
        held: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage in range(self.stages):
            for rank in self.replicas(stage):
                held[rank].append(stage)
        return tuple(tuple(stages) for stages in held)

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` holds, in order.

        >>> from schedules import looped
        >>> looped(ranks=2, chunks=2).stages_on(1)
        (1, 3)
        """
        return self._stages_by_rank[rank]


class Placer(Protocol):
    """The type of `placement` in `@schedule`: a function of `ranks`, and of other sizes of the schedule by name."""

    def __call__(self, ranks: int) -> Placement:
        """Return a placement on `ranks` ranks."""


def linear(ranks: int, chunks: int = 1) -> Placement:
    """Return contiguous runs of stages: with one chunk, stage `s` on rank `s` (GPipe, arXiv 1811.06965).

    >>> linear(ranks=2, chunks=2).homes
    (0, 0, 1, 1)
    """
    require_shape("linear", ranks, chunks)
    return Placement(ranks, tuple(stage // chunks for stage in range(ranks * chunks)))
