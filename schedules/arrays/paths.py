# SPDX-License-Identifier: Apache-2.0
"""The critical path of a large schedule, of whose actions only those on the path are made.

Idea. A play of all ranks abreast leaves the end of every action in an array. Followed backward from the last one, each
action was let start by the one before it on its rank, or by the maker of an input: both have numbers.

Invariant: the path is that of `schedules.analysis.critical_path`, stretch by stretch.
"""

from __future__ import annotations

import numpy as np

from schedules.arrays.abreast import play_all
from schedules.arrays.codes import CODE_OF, ROW_END, Codes
from schedules.arrays.lives import Lives
from schedules.language.actions import Action
from schedules.language.graph import Graph
from schedules.language.schedule import Schedule
from schedules.playing.costs import UNITS, Costs
from schedules.playing.dependencies import wires
from schedules.playing.engine import Span
from schedules.playing.outputs import inputs_of

_NAMES = [*CODE_OF]


def trace_path(
    schedule: Schedule, graph: Graph, codes: Codes, lives: Lives, costs: Costs
) -> list[tuple[Span, float]] | None:
    """Return the spans on the path from first to last, each with the transfer time of the input it waited for.

    Return `None` if ranks wait for each other, and for pairs and sums, which have other causes.
    """
    if np.isin(codes.kinds, [CODE_OF["OVERLAP_F"], CODE_OF["G"]]).any():
        return None
    played = play_all(schedule, codes, lives, wires(schedule, graph, costs, UNITS), costs)
    if played is None:
        return None
    last = np.where(codes.kinds == ROW_END, -np.inf, played.ends[: len(codes.kinds)])
    k: int | None = int(last.argmax())
    found = list[tuple[Span, float]]()
    while k is not None:
        rank, action = _rank_of(codes, k), _decode(schedule, codes, k)
        before = k - 1 if k > codes.firsts[rank] else None
        free = 0.0 if before is None else float(played.ends[before])
        start = max(free, *(float(played.ends[makers[k]] + delays[k]) for makers, delays in played.needs))
        transfer = 0.0
        if before is None or free < start:
            before = None
            for what, peer, _ in inputs_of(action, graph):
                maker = int((lives.values if what == "F" else lives.cotangents)[peer, codes.units[k]])
                took = costs.transfer(what, peer, _rank_of(codes, maker), rank)
                if peer != action.stage and played.ends[maker] + took >= start:
                    before, transfer = maker, took
                    break
        found.append((Span(rank, action, start, float(played.ends[k])), transfer))
        k = before
    return found[::-1]


def _rank_of(codes: Codes, k: int) -> int:
    return int(np.searchsorted(codes.ends, k))


def _decode(schedule: Schedule, codes: Codes, k: int) -> Action:
    microbatch, part = divmod(int(codes.units[k]), schedule.slices)
    return Action(_NAMES[codes.kinds[k]], int(codes.stages[k]), microbatch, None, part if schedule.slices > 1 else None)
