# SPDX-License-Identifier: Apache-2.0
"""The critical path: the actions and transfers that determine how long a step takes, and what to shorten first.

Idea. Every action starts when its rank becomes free or when its last input arrives. Followed backward from the action
that ends last, that gives one unbroken chain of actions and transfers, as long as the makespan. Shortening a kind of
action by a little saves that much for each time it is on the chain, as long as no other chain is longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from schedules.analysis.simulation import spans
from schedules.arguments import require_types
from schedules.arrays.gate import trace_large
from schedules.language.actions import BESIDE, KINDS, Action
from schedules.language.graph import Graph
from schedules.language.schedule import Schedule, graph_of
from schedules.playing.costs import Costs
from schedules.playing.engine import Span
from schedules.playing.outputs import Flow, flow_of, inputs_of

LASTING = BESIDE.keys() - {"RESHARD"}
"""The kinds that go on beside the others and take time."""


class Stretch(NamedTuple):
    """One action on the path, and the transfer time of the input it waited for."""

    span: Span
    transfer: float


class Share(NamedTuple):
    """The part of the makespan spent on one item, such as `F of stage 3`, and its number of passes on the path."""

    what: str
    time: float
    passes: int


@dataclass(frozen=True)
class CriticalPath:
    """The critical path: its `stretches` from first to last, and its `shares`, largest first.

    >>> from schedules import gpipe
    >>> path = critical_path(gpipe(ranks=2, microbatches=1), Costs(F=1, B=2, comm=0.5))
    >>> " ".join(str(stretch.span.action) for stretch in path.stretches)
    '0F0 1F0 1B0 0B0'
    >>> [f"{share.what}: {share.time:g}" for share in path.shares[:3]]
    ['B of stage 0: 2', 'B of stage 1: 2', 'F of stage 0: 1']
    """

    stretches: tuple[Stretch, ...]

    @property
    def shares(self) -> tuple[Share, ...]:
        """The time on the path by kind of action and stage, and by transfer; largest first: what to shorten."""
        found: dict[str, list[float]] = {}
        before = None
        for span, transfer in self.stretches:
            found.setdefault(f"{span.action.kind} of stage {span.action.stage}", []).append(span.end - span.start)
            if transfer and before is not None:
                found.setdefault(f"transfers from rank {before.rank} to rank {span.rank}", []).append(transfer)
            before = span
        shares = [Share(what, sum(times), len(times)) for what, times in found.items()]
        return tuple(sorted(shares, key=lambda share: (-share.time, share.what)))


def critical_path(schedule: Schedule, costs: Costs = Costs(), graph: Graph | None = None) -> CriticalPath:
    """Return the path that determines the makespan of `schedule` under `costs`. All spans are kept in memory.

    Of several equally long paths, return the one that ends on the lowest rank and stays on its rank where it can. Raise
    what `schedules.spans` raises.
    """
    require_types(critical_path, locals())
    graph = graph_of(schedule, graph)
    traced = trace_large(schedule, graph, costs)
    if traced is not None:
        return CriticalPath(tuple(map(Stretch._make, traced)))
    index = _SpanIndex(schedule, graph, spans(schedule, costs, graph))
    span: Span | None = max(index.all, key=lambda span: (span.end, -span.rank), default=None)
    stretches: list[Stretch] = []
    while span is not None:
        before, transfer = index.find_cause(span, costs)
        stretches.append(Stretch(span, transfer))
        span = before
    return CriticalPath(tuple(reversed(stretches)))


class _SpanIndex:
    """All spans of a timeline, indexed by what they made and by their position on their rank."""

    def __init__(self, schedule: Schedule, graph: Graph, timeline: Iterable[Span]) -> None:
        self.schedule, self.graph = schedule, graph
        self.all = list(timeline)
        self.order = {span.action: k for k, span in enumerate(self.all)}  # every cause comes before its effects
        self.previous: dict[Action, Span] = {}
        self.following: dict[Action, Action] = {}
        self.made: dict[Flow, Span] = {}
        self.gradients: dict[tuple[int, int], Span] = {}  # the last backward of a stage on a rank
        self.sums: dict[tuple[int, int], Span] = {}  # its sum over replicas, if it has several
        self.collectives: dict[tuple[str, int, int], Span] = {}  # the last of its kind, on a stage and rank
        self.moves: dict[tuple[int, int, int | None], Span] = {}  # the last move of a unit's memory
        self.awaited = defaultdict[Action, list[Span]](list)  # what went on beside, and whose results an action uses
        last: dict[int, Span] = {}
        lane: dict[tuple[int, str], Span] = {}  # the last action of a rank's lane
        for span in self.all:
            (kind, stage, i, _, part), rank = span.action, span.rank
            if (stage, i, part) in self.moves and KINDS[kind].before in ("forward", "hosted"):
                self.awaited[span.action].append(self.moves[stage, i, part])
            if kind in LASTING:
                self._add_beside(span, last.get(rank), lane)
                continue
            if rank in last:
                self.previous[span.action] = last[rank]
                self.following[last[rank].action] = span.action
            last[rank] = span
            used = "REDUCE_GRAD" if kind == "U" else "UNSHARD" if KINDS[kind].reads else ""
            if (used, stage, rank) in self.collectives:
                self.awaited[span.action].append(self.collectives[used, stage, rank])
            opener = self.previous.get(span.action)
            for action in (span.action, *([opener.action] if opener and opener.action.kind == "OVERLAP_F" else ())):
                word = KINDS[action.kind]
                if word.crosses:  # a pair's outputs leave at its end, so its second span replaces the first
                    self.made[flow_of(action)] = span
                if word.after == "done":
                    self.gradients[action.stage, span.rank] = span
                if action.kind == "G":
                    self.sums[action.stage, span.rank] = span

    def _add_beside(self, span: Span, last: Span | None, lane: dict[tuple[int, str], Span]) -> None:
        """Add what went on beside: it began when the one before it in its lane ended, or the action before it."""
        kind, stage, i, _, part = span.action
        before = lane.get((span.rank, BESIDE[kind]))
        cause = before if before is not None and before.end >= span.start else last
        if cause is not None:
            self.previous[span.action] = cause
        lane[span.rank, BESIDE[kind]] = span
        if KINDS[kind].after:
            self.moves[stage, i, part] = span
            return
        self.collectives[kind, stage, span.rank] = span
        if kind == "REDUCE_GRAD":
            self.sums[stage, span.rank] = span

    def find_cause(self, span: Span, costs: Costs) -> tuple[Span | None, float]:
        """Return the span whose end, or whose transfer's arrival, let this one start, and the transfer time."""
        previous = self.previous.get(span.action)
        if previous is not None and previous.end >= span.start:
            return previous, 0.0
        for action in (span.action, *self._find_partner(span.action)):
            for awaited in self.awaited.get(action, ()):
                if awaited.end >= span.start:
                    return awaited, 0.0
        for maker, what, stage in self._inputs(span.action):
            transfer = costs.transfer(what, stage, maker.rank, span.rank)
            if maker.end + transfer >= span.start and self.order[maker.action] < self.order[span.action]:
                return maker, transfer
        return None, 0.0

    def _inputs(self, action: Action) -> Iterator[tuple[Span, str, int]]:
        """Yield the action's inputs: the span at whose end each left, its kind (`F`, `B` or `G`) and its stage."""
        _, s, i, _, part = action
        for what, peer, _ in inputs_of(action, self.graph):
            if peer != s:
                yield self.made[what, peer, i, part], what, peer
        if action.kind == "G":
            for rank in self.schedule.placement.replicas(s):
                yield self.gradients[s, rank], "G", s
        if action.kind == "U":
            mine = self.schedule.placement.home(s, i)
            for homes in (homes for homes in self.schedule.placement.routes if homes[s] == mine):
                for owner in self.graph.shared_by[s]:  # another replica of it may be later
                    found = owner, homes[owner]
                    yield self.sums.get(found) or self.gradients[found], "G", owner
        for second in self._find_partner(action):
            yield from self._inputs(second)

    def _find_partner(self, action: Action) -> Iterator[Action]:
        """Yield the second action of a fused pair: a pair starts as one, so it may have waited for what that needs."""
        if action.kind == "OVERLAP_F":
            yield self.following[action]
