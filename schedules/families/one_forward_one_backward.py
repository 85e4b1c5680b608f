# SPDX-License-Identifier: Apache-2.0
"""One forward, one backward: a microbatch leaves before the next one enters.

Idea. Such a schedule is an order of forwards, an order of backwards, and the number of forwards a rank runs ahead.
`alternate` combines the three; the families differ only in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from types import MappingProxyType
from typing import TypeAlias, TypeVar

from schedules.errors import SizeError
from schedules.language.actions import Action, B, F, I, new_tuple
from schedules.language.placement import linear
from schedules.language.schedule import Limits, schedule

Element = TypeVar("Element")
Maker: TypeAlias = Callable[[int, int], Action]
_KIND_OF: Mapping[Maker, str] = MappingProxyType({F: "F", B: "B", I: "I"})


def alternate(ahead: int, forwards: Iterator[Element], backwards: Iterator[Element]) -> Iterator[Element]:
    """Return `ahead` forwards, then one forward and one backward in turn, then the remaining backwards.

    >>> list(alternate(1, iter("FGH"), iter("bcd")))
    ['F', 'G', 'b', 'H', 'c', 'd']
    """
    return chain(islice(forwards, ahead), chain.from_iterable(zip(forwards, backwards, strict=False)), backwards)


def group_passes(steps: Sequence[tuple[Maker, int]], groups: Iterable[range]) -> Iterator[Action]:
    """Return the passes group by group: all microbatches of a group through one step (kind, stage), then the next.

    >>> list(group_passes([(F, 0), (F, 4)], [range(2), range(2, 3)]))
    [F(0, 0), F(0, 1), F(4, 0), F(4, 1), F(0, 2), F(4, 2)]
    """
    return chain.from_iterable(_run(kind, stage, group) for group in groups for kind, stage in steps)


def _run(kind: Maker, stage: int, group: range) -> Iterator[Action]:
    """Return a pass for each microbatch of a group. Common kinds need no call for each, which takes longer."""
    if kind not in _KIND_OF:
        return map(kind, repeat(stage), group)
    fields = zip(repeat(_KIND_OF[kind]), repeat(stage), group, repeat(None), repeat(None), strict=False)
    return map(new_tuple, repeat(Action), fields)


@schedule(placement=linear, limits=Limits(memory=lambda rank, ranks, microbatches: min(ranks - rank, microbatches)))
def one_f_one_b(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """1F1B: fill until the first cotangent can come back, then alternate (arXiv 2006.09503, section 2).

    Idle time per rank: `(P - 1) (F + B)`, as in `gpipe`. Peak memory: `min(P - r, M)` microbatches on rank `r`.

    >>> print(one_f_one_b(ranks=2, microbatches=3))
    rank 0 |F0 F1 .  .  B0    F2 B1    .  B2    |
    rank 1 |.  F0 B0    F1 B1    F2 B2    .  .  |
    """
    every = [range(microbatches)]
    return alternate(ranks - 1 - rank, group_passes([(F, rank)], every), group_passes([(B, rank)], every))


@schedule(
    placement=linear, limits=Limits(memory=lambda rank, ranks, microbatches: min(2 * (ranks - rank) - 1, microbatches))
)
def eager_1f1b(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Eager 1F1B: two forwards ahead for each later rank, so that transfers overlap (arXiv 2211.05322, section 4).

    Idle time per rank: `(P - 1) (F + B + 2 comm)` if `2 comm <= F + B`; 1F1B idles longer whenever transfers take any
    time. Peak memory: `min(2 (P - r) - 1, M)` microbatches on rank `r`.

    >>> print(eager_1f1b(ranks=3, microbatches=4))
    rank 0 |F0 F1 F2 F3 .  .  .  B0    .  B1    .  B2    .  B3    |
    rank 1 |.  F0 F1 F2 .  B0    F3 B1    .  B2    .  B3    .  .  |
    rank 2 |.  .  F0 B0    F1 B1    F2 B2    F3 B3    .  .  .  .  |
    """
    every = [range(microbatches)]
    return alternate(2 * (ranks - 1 - rank), group_passes([(F, rank)], every), group_passes([(B, rank)], every))


def _require_positive_groups(ranks: int, microbatches: int, k: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise SizeError.of("kfkb", "k", k, "an integer of at least 1", "Choose k >= 1; with k=1 it is 1F1B.")


@schedule(
    placement=linear,
    limits=Limits(memory=lambda rank, ranks, microbatches, k: min(k * (ranks - rank), microbatches)),
    requires=_require_positive_groups,
)
def kfkb(rank: int, ranks: int, microbatches: int, k: int = 2) -> Iterator[Action]:
    """kFkB: 1F1B of groups of `k` microbatches, the last one smaller if need be (Ada-Grouper, arXiv 2303.01675).

    Idle time per rank: `(P - 1) (F + B + 2 comm)` if `2 comm <= (k - 1) (F + B)`: a group's transfers overlap with
    the rest of the group. Peak memory: `min(k (P - r), M)` microbatches on rank `r`. With `k=1` it is `one_f_one_b`.

    >>> print(kfkb(ranks=2, microbatches=5, k=2))
    rank 0 |F0 F1 F2 F3 .  B0    B1    F4 .  B2    B3    .  B4    |
    rank 1 |.  F0 F1 B0    B1    F2 F3 B2    B3    F4 B4    .  .  |
    """
    groups = [range(i, min(i + k, microbatches)) for i in range(0, microbatches, k)]
    for kind, group in alternate(ranks - 1 - rank, zip(repeat(F), groups), zip(repeat(B), groups)):
        yield from map(kind, repeat(rank), group)
