# SPDX-License-Identifier: Apache-2.0
"""Play all ranks in time: each takes, of the actions that are ready, the one that a rule prefers.

Problem. What a rank should run next depends on costs, on memory, and on what all other ranks run. Written down as a
loop over microbatches, that is either wrong for other costs or very long.

Idea. A schedule is a rule that says what is urgent, and the engine below. A rank that is free looks at the next action
of each of its lanes. Of those whose inputs are there, and which fit into its memory, it runs the most urgent. A patient
rank waits if a more urgent one can begin before that would end, and fills the gap with a weight half or a recomputation
that fits. All else that makes orders stands on this: the families that follow costs, `mirror`, `overlap`, and the
rules of a search.

A forward begins only if, after it, every microbatch that the rank holds can still go through its later stages there,
the furthest one first (`Instance.has_room`). Then nothing ever gets stuck. Proof: suppose all ranks are, and take, of
the microbatches whose forwards are not finished, the furthest one, about to enter stage `s`. Backwards free memory and
so are never stuck themselves; hence what the rank of `s` holds belongs to microbatches that have not been through `s`,
nor through a later stage of the rank. When the last of it was begun, it left room for `s`. Nor is any schedule of a
chain on one route excluded: a microbatch gives nothing back before it has been through all stages of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple

from schedules.arguments import each, require_types
from schedules.errors import ArgumentError, SizeError, quote
from schedules.language.actions import Action
from schedules.language.schedule import Schedule
from schedules.playing.board import Lanes, PlayBoard, list_lanes, make_board, sum_replicas
from schedules.playing.costs import ROUNDING
from schedules.playing.instance import FORWARD, INPUT_HALF, WEIGHT_HALF, Instance
from schedules.playing.problem import Problem
from schedules.playing.rows import from_rows


class Rule(NamedTuple):
    """A rule that says which action a rank runs next.

    - `priority`: a function of an action to a number or a tuple: the lower, the more urgent. Of a fused pair, the
      second action counts.
    - `patience`: by how much of an action a more urgent one may come late, from 0, wait for it whenever it can begin
      before the action would end, to 1, never wait. Gaps are filled with weight halves and recomputations that fit.
    - `ahead`: per kind of pass and stage, by how many microbatches forwards may be ahead of the passes of that kind.
    """

    priority: Callable[[Action], Any]
    patience: float = 1.0
    ahead: Mapping[str, Sequence[float]] = MappingProxyType({})


def prefer(kinds: str) -> Callable[[Action], Any]:
    """Return the priority of the kinds of passes in this order; then older microbatches and earlier stages come first.

    >>> from schedules import F, W
    >>> prefer("BFIW")(F(stage=1, microbatch=4)) < prefer("BFIW")(W(stage=1, microbatch=2))
    True
    """
    return lambda action: (kinds.find(action.kind), action.microbatch, action.stage)


class Room:
    """The memory of all ranks in a play: what they hold, and the passes `done`, per kind and stage.

    `reserve` is what must stay free beside a forward, per stage, and `ahead` that of a `Rule`.
    """

    def __init__(
        self,
        instance: Instance,
        board: PlayBoard,
        reserve: Sequence[float] = (),
        ahead: Mapping[str, Sequence[float]] = MappingProxyType({}),
    ) -> None:
        self.instance, self.board, self.reserve = instance, board, reserve
        self.ahead = [(CODES[kind], most) for kind, most in ahead.items()]
        self.held = [0.0] * instance.ranks
        self.done = [[0] * len(instance.rank) for _ in range(3)]

    def fits(self, k: int) -> bool:
        """Return whether there is room for an action."""
        more, n = self.board.growth[k], self.board.stages[k]
        if more <= 0:
            return True
        rank = self.instance.rank[n]
        if self.board.actions[k].kind != "F":
            return self.held[rank] + more <= self.instance.caps[rank]
        for kind, most in self.ahead:
            if self.done[FORWARD][n] - self.done[kind][n] >= most[n]:
                return False
        return self.instance.has_room(n, self.held[rank] + (self.reserve[n] if self.reserve else 0.0), self.done)

    def take(self, k: int) -> None:
        """Count an action that begins."""
        kind, n = self.board.actions[k].kind, self.board.stages[k]
        self.held[self.instance.rank[n]] += self.board.growth[k]
        if kind in CODES:
            self.done[CODES[kind]][n] += 1


CODES = {"F": FORWARD, "OVERLAP_F": FORWARD, "C": FORWARD, "B": INPUT_HALF, "I": INPUT_HALF, "W": WEIGHT_HALF}
FILLERS = frozenset("WR")
"""The kinds that no other rank waits for: they may fill gaps."""


class Play:
    """All ranks, played forward in time.

    - `orders`: per rank, the numbers of its actions so far; `free`: when it is free.
    - `heads`: per rank and lane, the next number; `ends`: per number, when it ended, infinity if it has not.
    - `pairs`: per number, 1 if it runs as one with the next.
    """

    def __init__(
        self, board: PlayBoard, urgency: Sequence[float], patience: float = 1.0, room: Room | None = None
    ) -> None:
        self.board, self.urgency, self.patience, self.room = board, urgency, patience, room
        P, count = len(board.lanes), len(board.actions)
        self.ends = [inf] * (count + 1)
        self.heads = [[first for first, _ in row] for row in board.lanes]
        self.stops = [[stop for _, stop in row] for row in board.lanes]
        self.pairs = bytearray(board.pairs)
        self.orders: list[list[int]] = [[] for _ in range(P)]
        self.free, self.alarms = [0.0] * P, [inf] * P
        self.queue = list[tuple[float, int]]()
        for rank in range(P):
            self.wake(rank, 0.0)

    @property
    def span(self) -> float:
        """The longest time from a rank's first start to its last end."""
        firsts = ((row[0], end) for row, end in zip(self.orders, self.free, strict=True) if row)
        return max((end - self.ends[k] + self.time(k) for k, end in firsts), default=0.0)

    @property
    def left(self) -> list[list[int]]:
        """Per rank, the numbers that have not run."""
        rows = (zip(heads, stops, strict=True) for heads, stops in zip(self.heads, self.stops, strict=True))
        return [[k for head, stop in row for k in range(head, stop)] for row in rows]

    def run(self) -> None:
        """Run until no rank can go on."""
        while self.queue:
            now, rank = heappop(self.queue)
            if self.alarms[rank] != now:
                continue
            self.alarms[rank] = inf
            lane, later = self._choose(rank, now)
            if lane is None:
                self.wake(rank, later)
            else:
                self._start(rank, now, lane)

    def arrival(self, k: int) -> float:
        """Return when the inputs of an action, or of a pair, are there; infinity if that is not known yet."""
        ready, needs = 0.0, self.board.needs
        for m, transfer in needs[k] + needs[k + 1] if self.pairs[k] else needs[k]:
            if self.ends[m] + transfer > ready:
                ready = self.ends[m] + transfer
        return ready

    def time(self, k: int) -> float:
        """Return the time that an action or a pair takes."""
        return self.board.times[k] + (self.board.times[k + 1] if self.pairs[k] else 0.0)

    def _choose(self, rank: int, now: float) -> tuple[int | None, float]:
        """Return the lane to go on with now; if none, when to look again."""
        best, urgency = None, inf
        coming, arrival, again = inf, inf, inf
        heads, stops = self.heads[rank], self.stops[rank]
        for lane, k in enumerate(heads):
            if k == stops[lane]:
                continue
            ready = self.arrival(k)
            if ready == inf or (self.room is not None and not self.room.fits(k)):
                continue
            priority = self.urgency[k]
            if ready > now * (1 + ROUNDING):
                again = min(again, ready)
                if priority < coming:
                    coming, arrival = priority, ready
            elif priority < urgency:
                best, urgency = lane, priority
        if best is None or coming >= urgency:
            return best, again
        end = now + self.time(heads[best]) * (1 - self.patience)
        return (self._fill(rank, now, arrival - now), arrival) if arrival < end * (1 - ROUNDING) else (best, again)

    def _fill(self, rank: int, now: float, gap: float) -> int | None:
        """Return the lane whose next action is the most urgent filler that fits into a gap."""
        best, urgency = None, inf
        for lane, k in enumerate(self.heads[rank]):
            if k == self.stops[rank][lane] or self.board.actions[k].kind not in FILLERS or self.urgency[k] >= urgency:
                continue
            fits = self.board.times[k] <= gap * (1 + ROUNDING) and self.arrival(k) <= now * (1 + ROUNDING)
            if fits and (self.room is None or self.room.fits(k)):
                best, urgency = lane, self.urgency[k]
        return best

    def _start(self, rank: int, now: float, lane: int) -> None:
        """Run the next action of a lane, or a pair, and wake the ranks that may use what it makes."""
        k = self.heads[rank][lane]
        end = now + self.time(k)
        for one in (k, k + 1) if self.pairs[k] else (k,):
            self.heads[rank][lane] = one + 1
            self.orders[rank].append(one)
            self.ends[one] = end
            if self.room is not None:
                self.room.take(one)
            for user, transfer in self.board.wakes[one]:
                self.wake(user, max(end + transfer, self.free[user]))
        self.free[rank] = end
        self.wake(rank, end)

    def wake(self, rank: int, time: float) -> None:
        """Let a rank look for an action at a time."""
        if time < self.alarms[rank]:
            self.alarms[rank] = time
            heappush(self.queue, (time, rank))


def rank_by(priority: Callable[[Action], Any], board: PlayBoard) -> list[float]:
    """Return the urgency of each number: equal where a rule does not prefer one. Of a pair, the backward decides."""
    keys = [priority(action) for action in board.actions]
    keys = [keys[k + paired] for k, paired in enumerate(board.pairs)]
    places = {key: float(place) for place, key in enumerate(sorted(set(keys)))}
    return [places[key] for key in keys]


def play(problem: Problem, *rules: Rule, lanes: Lanes | None = None) -> Schedule:
    """Return the schedule in which every rank runs, of the actions that are ready and fit, the one that a rule prefers.

    Of several rules, the one that takes the least time counts; of equals, the one with the shortest time from a rank's
    first action to its last. `lanes` are, per rank, what it may run, in lanes that keep their order; by default, one
    for every stage and kind of pass, and one for sums over replicas. They may hold any compute actions: those of
    another schedule, say.

    Raise `SizeError` if ranks get stuck for want of memory: not with the usual lanes of a chain. Actions whose inputs
    never come are last, for `check` to report.

    1F1B is what ranks run that prefer backwards, in its memory:

    >>> from schedules import Costs, linear
    >>> problem = Problem(Costs(F=1, B=2), linear(ranks=2), microbatches=3, memory=(2, 1), split=False)
    >>> print(play(problem, Rule(prefer("BF"))))
    rank 0 |F0 F1 .  .  B0    F2 B1    .  B2    |
    rank 1 |.  F0 B0    F1 B1    F2 B2    .  .  |
    """
    require_types(play, {"problem": problem})
    rules = tuple(each("rules", rules or (Rule(prefer("BIFW")),), Rule, ArgumentError))
    board = make_board(problem, _list_all(problem) if lanes is None else _read_lanes(problem, lanes))
    instance = Instance(problem)
    found = list[Play]()
    for rule in rules:
        room = Room(instance, board, ahead=rule.ahead) if rule.ahead or min(problem.room) < inf else None
        found.append(Play(board, rank_by(rule.priority, board), rule.patience, room))
        found[-1].run()
        _require_room(found[-1])
    best = min(found, key=lambda one: (float(f"{max(one.free):.9g}"), one.span))
    placement, backward = problem.placement, problem.backward
    return from_rows(read_rows(best), placement, problem.microbatches, board.slices, backward, problem.graph)


def _read_lanes(problem: Problem, lanes: Lanes) -> Lanes:
    """Return the lanes as lists. Raise `ArgumentError` unless they are lists of actions, per rank."""
    try:
        found = [[[*lane] for lane in row] for row in lanes]
    except TypeError:
        found = []
    if len(found) != problem.ranks or not all(type(one) is Action for row in found for lane in row for one in lane):
        raise ArgumentError(
            f"play: got lanes={quote(lanes)}, expected a list of lanes, which are lists of actions, for each of "
            f"{problem.ranks} ranks. Pass [[schedule.actions(rank)] for rank in range(schedule.ranks)], say."
        )
    return found


def _list_all(problem: Problem) -> Lanes:
    """Return the usual lanes of passes, and one for the sums over replicas, if there are any."""
    lanes, placement = [*list_lanes(problem)], problem.placement
    sums = range(problem.ranks) if problem.backward else ()
    return [[*lanes[rank], [*sum_replicas(rank, placement, problem.microbatches)]] for rank in sums] or lanes


def read_rows(played: Play) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each rank in order; those that did not run are last."""
    both = zip(played.orders, played.left, strict=True)
    return tuple(tuple(played.board.actions[k] for k in (*row, *rest)) for row, rest in both)


def _require_room(played: Play) -> None:
    """Raise `SizeError` if an action could run but for the memory of its rank."""
    for rank, heads in enumerate(played.heads):
        for lane, k in enumerate(heads):
            room = played.room
            if room and k < played.stops[rank][lane] and played.arrival(k) < inf and not room.fits(k):
                got, expected = room.instance.problem.memory, f"enough for {played.board.actions[k]} on rank {rank}"
                raise SizeError.of("play", "memory", got, expected, "Choose more memory, or a rule that holds less.")
