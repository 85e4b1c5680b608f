# SPDX-License-Identifier: Apache-2.0
"""Looped placement: every rank holds several chunks of the model, and a microbatch loops over the ranks.

Idea. Stages are `V` times shorter than with one chunk per rank, so a pipeline over the same ranks fills and drains in
`1 / V` of the time. Microbatches go in rounds: once the last of a round has entered a rank's first chunk, the first
comes back for its second. In a round of fewer microbatches than ranks, the ranks would wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain, pairwise

from schedules.arguments import is_size
from schedules.errors import SizeError
from schedules.families.one_forward_one_backward import Maker, alternate, group_passes
from schedules.families.placements import looped
from schedules.language.actions import Action, B, F, I, W
from schedules.language.schedule import Limits, schedule


def rounds(ranks: int, microbatches: int) -> list[range]:
    """Return as many rounds of at least `P` microbatches as possible, longer ones first; one round if `M < P`.

    >>> rounds(ranks=4, microbatches=9), rounds(ranks=4, microbatches=3)
    ([range(0, 5), range(5, 9)], [range(0, 3)])
    """
    count = max(1, microbatches // ranks)
    size, longer = divmod(microbatches, count)
    starts = [i * size + min(i, longer) for i in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def legs(forwards: range, backwards: range) -> list[tuple[Maker, int]]:
    """Return the steps forward through `forwards`, then backward through `backwards` from the last to the first."""
    return [*((F, stage) for stage in forwards), *((B, stage) for stage in reversed(backwards))]


def _count_ahead(rank: int, ranks: int, groups: list[range], chunks: int, each: int) -> int:
    """Return the forwards to run ahead: those before the first of the last chunk, plus `each` for every later rank."""
    return (chunks - 1) * len(groups[0]) + each * (ranks - 1 - rank)


def _in_rounds(rank: int, ranks: int, groups: list[range], chunks: int, each: int, backward: Maker) -> Iterator[Action]:
    """Return 1F1B in rounds, chunk by chunk."""
    stages = range(rank, ranks * chunks, ranks)
    forwards = group_passes([(F, stage) for stage in stages], groups)
    backwards = group_passes([(backward, stage) for stage in reversed(stages)], groups)
    return alternate(_count_ahead(rank, ranks, groups, chunks, each), forwards, backwards)


def _ticks_in_rounds(
    stage: int, ranks: int, groups: list[range], chunks: int, each: int, more: int = 0
) -> tuple[list[int], list[int]]:
    """Return the ticks of a stage under `_in_rounds`, or if all forwards come first, those of `more` microbatches.

    A forward and a backward begin every two ticks. While a rank does both, the next rank does the same forward `each`
    ticks later, and the same backward as much earlier. Forwards that run ahead, and backwards after the last forward,
    take two ticks from rank to rank. If a round has enough microbatches, the next chunk follows without a wait.
    """
    chunk, rank = divmod(stage, ranks)
    turn, end = _count_ahead(rank, ranks, groups, chunks, each), chunks * groups[-1].stop
    drain = end - _count_ahead(rank, ranks, groups[-1:], chunks, each)
    if len(groups) == 1:  # leave room for as many microbatches as ranks
        turn += (chunks - 1) * (max(ranks, end // chunks) - end // chunks)
        groups = [range(max(ranks, end // chunks))]
    start = 2 * (_count_ahead(0, ranks, groups, chunks, each) + more) - 2 * rank
    near, far = (2 - each) * rank, (2 - each) * (ranks - 1)
    wait = max(0, 2 * (ranks - len(groups[-1])))
    forwards, backwards = list[int](), list[int]()
    for k, group in enumerate(groups):
        first, size = chunks * group.start, len(group)
        early = far + wait * (chunks - chunks * k - chunk)
        late = far + wait * (chunks - chunks * (len(groups) - 1 - k) - chunk)
        forwards += _step(first + chunk * size, size, turn, 2 * rank - early, 2 * rank - near)
        backwards += _step(first + (chunks - 1 - chunk) * size, size, drain, start + near, start + late)
    return forwards, backwards


def _step(first: int, size: int, turn: int, before: int, after: int) -> Iterator[int]:
    """Return two ticks for each of so many passes; other ticks from the pass at the `turn` on."""
    cut = sorted((first, turn, first + size))[1]
    return chain(range(2 * first + before, 2 * cut + before, 2), range(2 * cut + after, 2 * (first + size) + after, 2))


def _interleaved_ticks(stage: int, ranks: int, microbatches: int, chunks: int) -> tuple[list[int], list[int]]:
    return _ticks_in_rounds(stage, ranks, rounds(ranks, microbatches), chunks, min(chunks, 2))


def _breadth_first_ticks(stage: int, ranks: int, microbatches: int, chunks: int) -> tuple[list[int], list[int]]:
    return _ticks_in_rounds(stage, ranks, [range(microbatches)], chunks, 2, microbatches)


def _zero_bubble_ticks(stage: int, ranks: int, microbatches: int, chunks: int) -> tuple[list[int], list[int]]:
    return _gis_ticks(stage, ranks, microbatches, chunks, ranks)


def _gis_ticks(stage: int, ranks: int, microbatches: int, chunks: int, group: int) -> tuple[list[int], list[int]]:
    return _ticks_in_rounds(stage, ranks, rounds(min(ranks, group), microbatches), chunks, 1)


def _interleaved_memory(rank: int, ranks: int, microbatches: int, chunks: int) -> float:
    ahead = _count_ahead(rank, ranks, rounds(ranks, microbatches), chunks, min(chunks, 2))
    return min(ahead + 1, chunks * microbatches) / chunks


def _zero_bubble_memory(rank: int, ranks: int, microbatches: int, chunks: int) -> float:
    return _gis_memory(0, ranks, microbatches, chunks, ranks)


def _gis_memory(rank: int, ranks: int, microbatches: int, chunks: int, group: int) -> float:
    ahead = _count_ahead(rank, ranks, rounds(min(ranks, group), microbatches), chunks, 1)
    return min(ahead + 1, chunks * microbatches) / chunks


def _require_group(ranks: int, microbatches: int, chunks: int, group: int) -> None:
    if not is_size(group, (ranks + 1) // 2):
        expected = f"an integer of at least {(ranks + 1) // 2}: half of the ranks, so that none waits forever"
        raise SizeError.of(
            "gis", "group", group, expected, f"Choose group={ranks}, with which ranks are idle the least."
        )


@schedule(placement=looped, limits=Limits(memory=_interleaved_memory), ticks=_interleaved_ticks)
def interleaved_1f1b(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """Interleaved 1F1B: 1F1B on `V` chunks per rank, in rounds (Megatron-LM, arXiv 2104.04473, section 2.2).

    Idle time per rank: `(P - 1 + (V - 1) max(0, P - M)) (F + B)` for chunks that take `F` and `B`, which is `1 / V`
    of that of `one_f_one_b` if `M >= P`. Peak memory on rank `r`: `min(((V - 1) g + 2 (P - 1 - r) + 1) / V, M)`
    microbatches, where `g` is the length of the first round: `P` if `P` divides `M`, and always less than `2 P`. With
    one chunk it is `one_f_one_b`, which has `P - 1 - r` instead of `2 (P - 1 - r)`.

    >>> print(interleaved_1f1b(ranks=2, microbatches=2, chunks=2))
    rank 0 |0F0 0F1 2F0 2F1 .   .   2B0     .   2B1     0B0     0B1     |
    rank 1 |.   1F0 1F1 3F0 3B0     3F1 3B1     1B0     1B1     .   .   |
    """
    return _in_rounds(rank, ranks, rounds(ranks, microbatches), chunks, min(chunks, 2), B)


@schedule(
    placement=looped,
    limits=Limits(memory=lambda rank, ranks, microbatches, chunks: microbatches),
    ticks=_breadth_first_ticks,
)
def breadth_first(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """All microbatches through one chunk before the next: all forwards, then all backwards (arXiv 2211.05953).

    A stage runs all its microbatches in a row, so its weights are gathered and its gradients reduced once, which suits
    sharded data parallelism. Idle time per rank: `(P - 1 + (V - 1) max(0, P - M)) (F + B)` for chunks of `F` and `B`.
    Peak memory: all `M` microbatches on every rank. With one chunk it is `gpipe`.

    >>> print(breadth_first(ranks=2, microbatches=2, chunks=2))
    rank 0 |0F0 0F1 2F0 2F1 .   .   .   2B0     2B1     0B0     0B1     |
    rank 1 |.   1F0 1F1 3F0 3F1 3B0     3B1     1B0     1B1     .   .   |
    """
    stages = range(rank, ranks * chunks, ranks)
    return group_passes(legs(stages, stages), [range(microbatches)])


@schedule(placement=looped, limits=Limits(memory=_zero_bubble_memory), ticks=_zero_bubble_ticks)
def interleaved_zero_bubble(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """Interleaved 1F1B, backward split, rank `r` deferring `r` weight gradients (arXiv 2401.10241).

    Cotangents leave before the weight gradients are computed, and the deferred ones fill the time in which the pipeline
    drains; with one chunk it is ZB-H1 of section 2. Idle time per rank if `M >= P` and `W <= F`:
    `(P - 1) (F + I - min(I, W))` for chunks that take `F`, `I` and `W`. Peak memory on every rank:
    `min(((V - 1) g + P) / V, M)` microbatches, where `g` is the length of the first round as in `interleaved_1f1b`.

    >>> print(interleaved_zero_bubble(ranks=2, microbatches=2, chunks=2))
    rank 0 |0F0 0F1 2F0 2F1 .   2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1 |
    rank 1 |.   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1 |
    """
    owed = deque[Action]()
    for action in _in_rounds(rank, ranks, rounds(ranks, microbatches), chunks, 1, I):
        yield action
        if action.kind == "I":
            owed.append(W(action.stage, action.microbatch))
        if len(owed) > rank:
            yield owed.popleft()
    yield from owed


@schedule(placement=looped, limits=Limits(memory=_gis_memory), requires=_require_group, ticks=_gis_ticks)
def gis(rank: int, ranks: int, microbatches: int, chunks: int = 2, group: int = 1024) -> Iterator[Action]:
    """Interleaved 1F1B, backward split, one forward ahead for each later rank (GIS, arXiv 2503.01328, section 3.1).

    `interleaved_1f1b` runs two ahead, since a whole backward comes back late; the halves make that superfluous. Rounds
    have at least `g = min(group, P)` microbatches. Fewer need less memory, and make ranks wait: `P / 2` (GIS-H) is the
    least. Idle time per rank if `g` divides `M > g`, for chunks that take `I = W` and `F <= I + W`:
    `(P - 1) (F + I) + (P - g) (V - 1) (F + I - W)`; no more than that if `W < I <= F + W`. Peak memory on rank `r`:
    `min(((V - 1) n + P - r) / V, M)` microbatches, where `n` is the length of the first round: `g` if `g` divides `M`.

    >>> print(gis(ranks=2, microbatches=2, chunks=2))
    rank 0 |0F0 0F1 2F0 2F1 .   2I0 2W0 .   2I1 2W1 0I0 0W0 0I1 0W1 |
    rank 1 |.   1F0 1F1 3F0 3I0 3W0 3F1 3I1 3W1 1I0 1W0 1I1 1W1 .   |
    """
    for action in _in_rounds(rank, ranks, rounds(min(ranks, group), microbatches), chunks, 1, I):
        yield action
        if action.kind == "I":
            yield W(action.stage, action.microbatch)
