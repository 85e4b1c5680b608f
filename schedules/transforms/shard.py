# SPDX-License-Identifier: Apache-2.0
"""Gather sharded weights before they are read, and free them afterwards.

Problem. A stage whose weights are sharded over a data-parallel group (ZeRO-3, arXiv 1910.02054; FSDP) needs all of them
in every pass but the weight half of a backward. To gather them every time is slow, to keep them takes the memory that
sharding saved.

Idea. Weights are kept for the next pass as long as few enough stages are gathered; then the one that was read longest
ago makes room. Where there is room, weights are gathered one pass early, beside the pass before.

Invariant: a rank has at most `limit` stages gathered at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from schedules.arguments import is_size
from schedules.errors import SizeError
from schedules.language.actions import KINDS, Action
from schedules.language.schedule import Schedule
from schedules.transforms.transform import KEPT, transform

_Turn = tuple[Action, ...]


def _require_limit(schedule: Schedule, limit: int) -> None:
    if not is_size(limit):
        raise SizeError.of("shard", "limit", limit, "an integer of at least 1", "Choose limit >= 1.")


@transform(limits=KEPT, requires=_require_limit)
def shard(rank: int, schedule: Schedule, limit: int) -> Iterator[Action]:
    """Gather every stage before it is read, keep at most `limit` stages of a rank gathered, and free each at the end.

    A stage is freed after its last pass, before its update, and when another needs its place. Weight halves of
    backwards read no weights. Generating the actions raises `SizeError` if the schedule gathers weights already, or if
    `limit` is too small: 1, or 2 for fused pairs on two stages.

    >>> from schedules import interleaved_1f1b
    >>> print(*shard(interleaved_1f1b(ranks=1, microbatches=1, chunks=2), limit=1).actions(0))
    0UNSHARD0 0F0 0RESHARD0 1UNSHARD0 1F0 1B0 1RESHARD0 0UNSHARD1 0B0 0RESHARD1
    >>> print(*shard(interleaved_1f1b(ranks=1, microbatches=1, chunks=2), limit=2).actions(0))
    0UNSHARD0 1UNSHARD0 0F0 1F0 1B0 1RESHARD0 0B0 0RESHARD0
    """
    turns = list(_list_turns(schedule, rank))
    needs = [_list_stages(turn) for turn in turns]
    if limit < (least := max(map(len, needs), default=1)):
        expected = f"at least {least}: what one turn of rank {rank} reads"
        raise SizeError.of("shard", "limit", limit, expected, f"Choose limit >= {least}.")
    left = Counter(stage for need in needs for stage in need)
    shelf = _Shelf(schedule, rank, limit)
    following = [*_next_reads(needs)]
    for turn, need, ahead in zip(turns, needs, following, strict=True):
        yield from shelf.read(need, need)
        if need and len({*need, *ahead}) <= limit:
            yield from shelf.read([stage for stage in ahead if stage not in need], [*need, *ahead])
        yield from (free for a in turn if a.kind == "U" for free in shelf.free(a.stage))
        yield from turn
        left.subtract(need)
        yield from (free for stage in need if not left[stage] for free in shelf.free(stage))


def _list_turns(schedule: Schedule, rank: int) -> Iterator[_Turn]:
    """Yield the actions of the rank, a fused pair as one. Raise `SizeError` for gathered weights."""
    opener: _Turn = ()
    for action in schedule.actions(rank):
        if action.kind in ("UNSHARD", "RESHARD"):
            repair = "Pass the schedule without UNSHARD and RESHARD."
            raise SizeError.of("shard", "schedule", schedule, "one that gathers no weights", repair)
        if action.kind == "OVERLAP_F":
            opener = (action,)
        else:
            yield (*opener, action)
            opener = ()


def _list_stages(turn: _Turn) -> list[int]:
    """Return the stages whose weights the turn reads."""
    return [*dict.fromkeys(action.stage for action in turn if KINDS[action.kind].reads)]


def _next_reads(needs: list[list[int]]) -> Iterator[list[int]]:
    """Yield, for each turn, what the next turn that reads weights reads."""
    upcoming: list[list[int]] = []
    ahead: list[int] = []
    for need in reversed(needs):
        upcoming.append(ahead)
        ahead = need or ahead
    return reversed(upcoming)


class _Shelf:
    """The gathered stages of a rank, the one read longest ago first, with the number of each gathering."""

    def __init__(self, schedule: Schedule, rank: int, limit: int) -> None:
        self.placement, self.rank, self.limit = schedule.placement, rank, limit
        self.numbers: dict[int, int] = {}
        self.next = {stage: self._number_from(stage, 0) for stage in self.placement.stages_on(rank)}

    def read(self, stages: list[int], kept: list[int]) -> Iterator[Action]:
        """Yield what gathers `stages`, where they are not, and frees others than `kept` to make room."""
        for stage in stages:
            if stage in self.numbers:
                self.numbers[stage] = self.numbers.pop(stage)
                continue
            if len(self.numbers) == self.limit:
                yield from self.free(next(old for old in self.numbers if old not in kept))
            self.numbers[stage] = number = self.next[stage]
            self.next[stage] = self._number_from(stage, number + 1)
            yield Action("UNSHARD", stage, number)

    def free(self, stage: int) -> Iterator[Action]:
        """Yield what frees the stage, if it is gathered."""
        if stage in self.numbers:
            yield Action("RESHARD", stage, self.numbers.pop(stage))

    def _number_from(self, stage: int, number: int) -> int:
        """Return the first number from `number` on that this rank may give a gathering of the stage."""
        while self.placement.home(stage, number) != self.rank:
            number += 1
        return number
