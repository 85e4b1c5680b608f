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
from schedules.language.schedule import Schedule
from schedules.replay.dependencies import graph_of
from schedules.replay.engine import Token, makes, needs, unit_of
from schedules.transforms.split import KEPT, transform


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
    for action in _fused(schedule)[rank]:
        yield action._replace(microbatch=action.microbatch // schedule.slices)


@lru_cache(maxsize=1)  # every rank asks for its row in turn
def _fused(schedule: Schedule) -> Sequence[Sequence[Action]]:
    """Return each rank's actions, numbered by slice; those whose inputs never come are last, for `check` to report."""
    graph, ranks, slices = graph_of(schedule, None), range(schedule.ranks), schedule.slices
    lanes = [deque(a._replace(microbatch=unit_of(a, slices)) for a in schedule.actions(rank)) for rank in ranks]
    rows: list[list[Action]] = [[] for _ in ranks]
    made = set[Token]()
    owed = Counter(_gradient(action) for lane in lanes for action in lane)

    def plays(rank: int, apart: bool) -> bool:
        """Run the rank's next action or pair if its inputs are there, and return whether it ran."""
        step = _next(lanes[rank], slices, apart)
        ready = made.issuperset(token for action in step for token in needs(action, graph))
        if not step or not ready or any(owed[term] for term in _summed(step[0], graph)):
            return False
        rows[rank] += step
        made.update(map(makes, step))
        owed.subtract(map(_gradient, step))
        for _ in step:
            lanes[rank].popleft()
        return True

    while any(plays(rank, apart=False) for rank in ranks) or any(plays(rank, apart=True) for rank in ranks):
        pass
    return tuple((*row, *lane) for row, lane in zip(rows, lanes, strict=True))


Term: TypeAlias = tuple[str, int]


def _gradient(action: Action) -> Term:
    """Return what the action contributes to a gradient, a term or the sum over replicas, and the stage."""
    return KINDS[action.kind].after or action.kind, action.stage


def _summed(action: Action, graph: Graph) -> list[Term]:
    """Return the gradient terms that must be complete before the action."""
    if action.kind == "U":
        return [(what, s) for s in graph.shared_by[action.stage] for what in ("done", "G")]
    return [("done", action.stage)] if action.kind == "G" else []


def _next(lane: deque[Action], slices: int, apart: bool) -> list[Action]:
    """Return the next action, or the next two as a pair if they may be fused; if `apart`, only if they already are."""
    if len(lane) < 2:
        return [*lane]
    first, second = lane[0], lane[1]
    paired = first.kind == "OVERLAP_F"
    if first.kind == "F" and not apart and KINDS[second.kind].crosses == "B":
        paired = first.microbatch // slices != second.microbatch // slices
    return [first._replace(kind="OVERLAP_F"), second] if paired else [first]
