# SPDX-License-Identifier: Apache-2.0
"""Lanes of actions by number: the next action of each lane, and the actions that it waits for.

Idea. A lane is actions that a rank runs in this order; a rank with several lanes chooses. Actions are numbered lane by
lane, so a play of millions of them looks everything up in lists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from schedules.language.actions import BESIDE, KINDS, Action, G
from schedules.language.graph import Graph, chain
from schedules.language.placement import Placement
from schedules.playing.outputs import unit_of
from schedules.playing.problem import Hops, Problem

Lanes: TypeAlias = Sequence[Iterable[Iterable[Action]]]
"""Per rank, its lanes. A fused pair is two actions in a row, and runs as one."""


class PlayBoard(NamedTuple):
    """All actions by number, those of a lane in a row.

    - `pairs`: per number, 1 if it runs as one with the next.
    - `lanes`: per rank and lane, its first number and the one after its last.
    - `needs`: per number, those that must have ended, with the times of transfers. One more number never ends.
    - `wakes`: per number, the other ranks that use what it makes, with the times of transfers.
    - `times`, `growth`: per number, what it takes, and what its rank then holds in addition.
    - `stages`: per number, its stage; stages of the second route come after all of the first, and so on.
    """

    actions: tuple[Action, ...]
    pairs: bytes
    slices: int
    lanes: tuple[tuple[tuple[int, int], ...], ...]
    needs: tuple[Hops, ...]
    wakes: tuple[Hops, ...]
    times: tuple[float, ...]
    growth: tuple[float, ...]
    stages: tuple[int, ...]


def list_lanes(problem: Problem) -> Iterator[list[list[Action]]]:
    """Yield, for each rank, a lane for every stage, route and kind of pass: forwards, backwards or their halves.

    >>> from schedules import Costs, linear
    >>> next(list_lanes(Problem(Costs(), linear(ranks=2), microbatches=2, split=False)))
    [[F(0, 0), F(0, 1)], [B(0, 0), B(0, 1)]]
    """
    S = problem.placement.stages
    kinds = ("FIW" if problem.split else "FB") if problem.backward else "F"
    for rank in range(problem.ranks):
        mine = [problem.stages[n] for n in sorted(problem.on(rank), key=lambda n: (n % S, n))]
        yield [[Action(kind, one.stage, i) for i in one.microbatches] for one in mine for kind in kinds]


def sum_replicas(rank: int, placement: Placement, microbatches: int) -> Iterator[Action]:
    """Yield the `G`s that end a turn, one for every stage `rank` shares with another rank, in stage order.

    >>> from schedules import bidirectional
    >>> [list(sum_replicas(rank, bidirectional(ranks=3), microbatches=4)) for rank in (0, 1)]
    [[G(0, 2), G(2, 3)], []]
    """
    for stage in placement.stages_on(rank):
        if len(placement.replicas(stage)) > 1:
            yield G(stage, placement.last(stage, rank, microbatches))


def make_board(problem: Problem, lanes: Lanes) -> PlayBoard:
    """Return the board of these lanes, for the costs, sizes and graph of a problem."""
    actions, ranks, ends, pairs = list[Action](), list[int](), list[list[tuple[int, int]]](), bytearray()
    for rank, row in enumerate(lanes):
        ends.append([])
        for lane in row:
            first = len(actions)
            actions += lane
            pairs += bytes(action.kind == "OVERLAP_F" for action in actions[first:])
            if first < len(actions):
                pairs[-1] = 0
            ends[rank].append((first, len(actions)))
            ranks += [rank] * (len(actions) - first)
    slices = 1 + max((action.slice or 0 for action in actions), default=0)
    costs, sizes, routes = problem.costs, problem.unit_sizes, len(problem.placement.routes)
    makers, graph = _Makers(actions), problem.graph or chain(problem.placement.stages)
    needs, wakes = list[Hops](), [list[tuple[int, float]]() for _ in actions]
    for k, action in enumerate(actions):
        found = list[tuple[int, float]]()
        for what, m in makers.list_needs(action, graph):
            far = m < len(actions) and what
            transfer = costs.transfer(what, actions[m].stage, ranks[m], ranks[k]) if far else 0.0
            found.append((m, transfer))
            if m < len(actions) and ranks[m] != ranks[k]:
                wakes[m].append((ranks[k], transfer))
        needs.append(tuple(found))
    share = [slices if KINDS[action.kind].after else 1 for action in actions]
    factors = costs.factors(problem.microbatches, slices)
    times = [0.0 if action.kind in BESIDE else costs.time(action.kind, action.stage) for action in actions]
    for k, action in enumerate(actions if factors else ()):
        times[k] *= factors[unit_of(action, slices)] if KINDS[action.kind].after else 1
    growth = (sizes.growth(action.kind, action.stage, problem.backward) for action in actions)
    return PlayBoard(
        tuple(actions),
        bytes(pairs),
        slices,
        tuple(map(tuple, ends)),
        tuple(needs),
        tuple(map(tuple, wakes)),
        tuple(time / n for time, n in zip(times, share, strict=True)),
        tuple(more / n for more, n in zip(growth, share, strict=True)),
        tuple(action.microbatch % routes * problem.placement.stages + action.stage for action in actions),
    )


class _Makers:
    """Who makes what: the numbers of the actions that leave a unit in some state, or send something, or end a sum."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self.never = len(actions)
        self.states = dict[tuple[str, int, int, int | None], int]()
        self.sums = defaultdict[tuple[str, int], list[int]](list)
        for k, (kind, s, i, _, part) in enumerate(actions):
            word = KINDS[kind]
            for what in (word.after, word.crosses):
                if what:
                    self.states.setdefault((what, s, i, part), k)
            if word.after in ("", "done"):
                self.sums[word.after or kind, s].append(k)

    def list_needs(self, action: Action, graph: Graph) -> Iterator[tuple[str, int]]:
        """Yield what an action waits for: what is transferred, nothing within a stage, and the number of its maker."""
        kind, s, i, _, part = action
        word = KINDS[kind]
        if word.before:
            yield "", self.states.get((word.before, s, i, part), self.never)
        for peer in {"F": graph.fed_by[s], "B": graph.pulled_by[s], "": ()}[word.crosses]:
            yield word.crosses, self.states.get((word.crosses, peer, i, part), self.never)
        if kind == "G":
            yield from (("G", k) for k in self.sums["done", s])
        if kind == "U":
            owners = graph.shared_by[s]
            yield from (("G", k) for t in owners for what in ("done", "G", "REDUCE_GRAD") for k in self.sums[what, t])
