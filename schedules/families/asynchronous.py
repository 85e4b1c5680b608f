# SPDX-License-Identifier: Apache-2.0
"""No flush: update weights while microbatches are in flight.

Idea. A training step need not wait for the pipeline to drain. A rank updates its weights as soon as it has a gradient,
and stashes the versions that microbatches in flight started with, so that each runs its backward with the weights of
its forward. The price is memory for the versions, and stale gradients.
"""

from __future__ import annotations

from collections.abc import Iterator

from schedules.errors import SizeError
from schedules.families.one_forward_one_backward import one_f_one_b
from schedules.language.actions import Action, U
from schedules.language.placement import linear
from schedules.language.schedule import Limits, schedule


def _count_in_flight(rank: int, ranks: int, microbatches: int) -> int:
    return min(ranks - rank, microbatches)


@schedule(placement=linear, limits=Limits(memory=_count_in_flight, versions=_count_in_flight))
def pipedream(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """PipeDream: 1F1B that updates after every backward and stashes weights (arXiv 1806.03377, section 3.3).

    Without a flush, a rank idles only before its first microbatch and after its last, for `(P - 1) (F + B)`, whatever
    the number of microbatches. Peak memory: `min(P - r, M)` microbatches on rank `r`, and at most as many versions of
    its weights: the newest, and those that the other `P - r - 1` microbatches in flight started with.

    >>> print(pipedream(ranks=2, microbatches=3))
    rank 0 |F0 F1 .  .  B0   uF2 B1   u.  B2   u|
    rank 1 |.  F0 B0   uF1 B1   uF2 B2   u.  .  |
    """
    for action in one_f_one_b.generator(rank, ranks, microbatches):
        yield action
        if action.kind == "B":
            yield U(rank, action.microbatch)


def _require_two_versions(ranks: int, microbatches: int, accumulate: int) -> None:
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < ranks:
        repair = f"Choose accumulate >= {ranks}: with less, microbatches in flight need a third version of the weights."
        raise SizeError.of("pipedream_2bw", "accumulate", accumulate, f"an integer of at least {ranks}", repair)


@schedule(
    placement=linear,
    limits=Limits(
        memory=lambda rank, ranks, microbatches, accumulate: _count_in_flight(rank, ranks, microbatches),
        versions=lambda rank, ranks, microbatches, accumulate: 2,
    ),
    requires=_require_two_versions,
    version=lambda microbatch, accumulate, **sizes: max(microbatch // accumulate - 1, 0),
)
def pipedream_2bw(rank: int, ranks: int, microbatches: int, accumulate: int = 8) -> Iterator[Action]:
    """PipeDream-2BW: 1F1B that updates after every `accumulate` microbatches (arXiv 2006.09503, section 3.1).

    Idle time and peak memory are those of `pipedream`, except for the weights: microbatch k uses version
    `max(k // accumulate - 1, 0)` on every rank, also where a newer one is there, so two versions are enough and all
    gradients are one update old. The last update uses the remaining gradients. `accumulate` must be at least `P`.

    >>> print(pipedream_2bw(ranks=2, microbatches=4, accumulate=2))
    rank 0 |F0 F1 .  .  B0    F2 B1   uF3 B2    .  B3   u|
    rank 1 |.  F0 B0    F1 B1   uF2 B2    F3 B3   u.  .  |
    """
    for action in one_f_one_b.generator(rank, ranks, microbatches):
        yield action
        i = action.microbatch
        if action.kind == "B" and ((i + 1) % accumulate == 0 or i + 1 == microbatches):
            yield U(rank, i)
