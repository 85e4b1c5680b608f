# SPDX-License-Identifier: Apache-2.0
"""The placements of the literature: functions `(ranks, chunks) -> Placement`, where `chunks` is the stages per rank."""

from __future__ import annotations

from schedules.arguments import require_shape
from schedules.language.placement import Placement, linear


def looped(ranks: int, chunks: int = 1) -> Placement:
    """Return a round robin: stage `s` on rank `s mod P` (Megatron's interleaving, arXiv 2104.04473, section 2.2).

    >>> looped(ranks=2, chunks=2).homes
    (0, 1, 0, 1)
    """
    require_shape("looped", ranks, chunks)
    return Placement(ranks, tuple(stage % ranks for stage in range(ranks * chunks)))


def vee(ranks: int, chunks: int = 2) -> Placement:
    """Return a zigzag: alternate chunks go up and down the ranks (V-shaped, arXiv 2405.15362, section 3).

    >>> vee(ranks=2, chunks=2).homes
    (0, 1, 1, 0)
    """
    require_shape("vee", ranks, chunks)
    there, back = tuple(range(ranks)), tuple(reversed(range(ranks)))
    return Placement(ranks, tuple(rank for chunk in range(chunks) for rank in (back if chunk % 2 else there)))


def wave(ranks: int, waves: int = 1) -> Placement:
    """Return `waves` passes up and back down the ranks: a vee of `2 * waves` chunks (Hanayo, arXiv 2308.15762).

    >>> wave(ranks=2, waves=2).homes
    (0, 1, 1, 0, 0, 1, 1, 0)
    """
    require_shape("wave", ranks, waves, "waves")
    return vee(ranks, 2 * waves)


def bidirectional(ranks: int, chunks: int = 1) -> Placement:
    """Return two opposite routes, for even and odd microbatches (Chimera, arXiv 2107.06925, section 3).

    >>> bidirectional(ranks=3).routes
    ((0, 1, 2), (2, 1, 0))
    """
    require_shape("bidirectional", ranks, chunks)
    down = linear(ranks, chunks)
    return Placement(ranks, down.homes, (tuple(ranks - 1 - rank for rank in down.homes),))
