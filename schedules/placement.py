# SPDX-License-Identifier: Apache-2.0
"""Where stages live: a placement maps every stage to a rank.

A placement is a function `(ranks, chunks) -> Placement`; `chunks` is the number of stages that each rank holds. Give
one to `@schedule(placement=...)`, or write your own that returns a `Placement`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol


@dataclass(frozen=True)
class Placement:
    """Stage `s` lives on rank `homes[s]`, of `ranks` ranks.

    >>> vee(ranks=3, chunks=2).homes
    (0, 1, 2, 2, 1, 0)
    """

    ranks: int
    homes: tuple[int, ...]

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.homes)

    @cached_property
    def _held(self) -> tuple[tuple[int, ...], ...]:
        held: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, rank in enumerate(self.homes):
            held[rank].append(stage)
        return tuple(tuple(stages) for stages in held)

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, in stage order.

        >>> looped(ranks=2, chunks=2).stages_on(1)
        (1, 3)
        """
        return self._held[rank]


class Place(Protocol):
    """What `@schedule` takes as `placement`: builds a `Placement` of `ranks * chunks` stages."""

    def __call__(self, ranks: int, chunks: int = ...) -> Placement:
        """Place `chunks` stages on each of `ranks` ranks."""


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
