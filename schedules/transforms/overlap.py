# SPDX-License-Identifier: Apache-2.0
"""Overlap forwards with backwards.

Problem. While a pass communicates with the ranks that share its stage (expert or tensor parallelism), nothing is
computed.

Idea. Run a forward and a backward of different microbatches as a fused pair: one computes while the other communicates
(DualPipe, arXiv 2412.19437, section 3.2.1). A pair runs as one action: its forward now waits for the cotangent of its
backward, and the forward's value leaves when both are done. If that cotangent depends on this very forward, through the
order of other ranks, the two stay separate.

Invariant: each rank keeps its order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias

from schedules.language.actions import KINDS, Action
from schedules.language.graph import Graph
from schedules.language.schedule import Schedule, graph_of
from schedules.playing.outputs import Output, inputs_of, output_of, unit_of
from schedules.transforms.transform import KEPT, transform


@transform(limits=KEPT)
def overlap(rank: int, schedule: Schedule) -> Iterator[Action]:
    """Fuse every forward with a backward of another microbatch right after it, unless the pair would deadlock.

    That requires playing all ranks along the schedule's stage graph (`connect`): the first rank whose actions are
    generated pays for all of them. If pairs wait for each other, the lowest rank's stays unfused. Peak memory does not
    change. A pair takes less time than its two passes if `Costs.OVERLAP_F` says so, but the next stage gets the
    forward's value only when the pair ends: the makespan grows if ranks wait for forwards, as in 1F1B, and shrinks if
    they do not, as in `dualpipe`.

    >>> from schedules import one_f_one_b
    >>> print(overlap(one_f_one_b(ranks=2, microbatches=3)))
    rank 0 |F0 .  .  .  F1&B0    .  .  .  F2&B1    .  .  .  B2    |
    rank 1 |.  F0 B0    .  .  .  F1 B1    .  .  .  F2 B2    .  .  |
    """
    for action in _fuse(schedule)[rank]:
        yield action._replace(microbatch=action.microbatch // schedule.slices)


@lru_cache(maxsize=1)  # every rank asks for its row in turn
def _fuse(schedule: Schedule) -> Sequence[Sequence[Action]]:
    """Return each rank's actions, numbered by slice; those whose inputs never come are last, for `check` to report."""
    ranks = _Ranks(schedule)
    ranks.play()
    return tuple((*row, *lane) for row, lane in zip(ranks.rows, ranks.lanes, strict=True))


_Term: TypeAlias = tuple[str, int]
"""A contribution to the gradient of a stage: a backward `done`, its sum `G` or its `REDUCE_GRAD`; and the stage."""


class _Ranks:
    """All ranks, played forward: `rows` are the actions that have run, `lanes` those to come.

    `outputs` are there to be used; `missing` counts the terms of each gradient that are still to come.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.graph, self.slices = graph_of(schedule, None), schedule.slices
        streams = (schedule.actions(rank) for rank in range(schedule.ranks))
        self.lanes = [deque(a._replace(microbatch=unit_of(a, self.slices)) for a in stream) for stream in streams]
        self.rows: list[list[Action]] = [[] for _ in self.lanes]
        self.outputs = set[Output]()
        self.missing = Counter(_term_of(action) for lane in self.lanes for action in lane)

    def play(self) -> None:
        """Run one turn after another until no rank can run."""
        while (found := self._find_turn()) is not None:
            self._run(*found)

    def _find_turn(self) -> tuple[int, list[Action]] | None:
        """Return a rank that can run, and its next action or pair: fused if any rank can, and the lowest such rank."""
        for fuse in (True, False):
            for rank, lane in enumerate(self.lanes):
                turn = _next_turn(lane, self.slices, fuse)
                if turn and self._is_ready(turn):
                    return rank, turn
        return None

    def _is_ready(self, turn: list[Action]) -> bool:
        """Return whether all inputs are there, and all gradients that the turn sums or applies are complete."""
        has_inputs = self.outputs.issuperset(need for action in turn for need in inputs_of(action, self.graph))
        return has_inputs and not any(self.missing[term] for term in _terms_for(turn[0], self.graph))

    def _run(self, rank: int, turn: list[Action]) -> None:
        self.rows[rank] += turn
        self.outputs.update(map(output_of, turn))
        self.missing.subtract(map(_term_of, turn))
        for _ in turn:
            self.lanes[rank].popleft()


def _term_of(action: Action) -> _Term:
    """Return what the action adds to a gradient."""
    return KINDS[action.kind].after or action.kind, action.stage


def _terms_for(action: Action, graph: Graph) -> list[_Term]:
    """Return the gradient terms that must be there before the action."""
    if action.kind == "U":
        return [(what, s) for s in graph.shared_by[action.stage] for what in ("done", "G", "REDUCE_GRAD")]
    return [("done", action.stage)] if action.kind == "G" else []


def _next_turn(lane: deque[Action], slices: int, fuse: bool) -> list[Action]:
    """Return the next action, or the next two if they are fused already or, if `fuse`, if they may be fused."""
    if len(lane) < 2:
        return [*lane]
    first, second = lane[0], lane[1]
    paired = first.kind == "OVERLAP_F"
    if first.kind == "F" and fuse and KINDS[second.kind].crosses == "B":
        paired = first.microbatch // slices != second.microbatch // slices
    return [first._replace(kind="OVERLAP_F"), second] if paired else [first]
