# SPDX-License-Identifier: Apache-2.0
"""All ranks played together: in which order everything can happen, and when.

Checking, simulating and drawing ask the same question: if each rank keeps its own order and waits for its data, how far
do the ranks come, and when is each action done? `replay` answers it in one loop over all actions, holding only what is
in flight. A rank is played until it must wait for a crossing; who makes that crossing puts it on the stack of those
that can go on. The latest is played first, while what it was given is still at hand.

A fused pair is one: it begins when the data of both its actions are there, and what either made leaves when it ends.

Invariant: no rank waits for what has arrived.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from math import inf
from random import Random
from typing import NamedTuple, TypeAlias

from schedules.actions import KINDS, Action
from schedules.authoring import Schedule
from schedules.costs import Costs
from schedules.errors import ScheduleError
from schedules.fitting import require_fitting
from schedules.graph import Graph
from schedules.wiring import Crossing, Row, Wires

Token: TypeAlias = tuple[str, int, int]
Gives: TypeAlias = tuple[tuple[Crossing, float], ...]
Pending: TypeAlias = tuple[Gives, int] | tuple[()]
BATCH = 1024
_BAD = (KeyError, TypeError, ValueError)  # what comes of taking something else for an action


class Span(NamedTuple):
    """`rank` was busy with `action` from `start` to `end`; or waited for it, if it is a transfer.

    A simulation has no spans of waits: a rank waits wherever it is not busy.
    """

    rank: int
    action: Action
    start: float
    end: float

    @property
    def waits(self) -> bool:
        """Whether the rank waited for a transfer: `RECV` for what it needed, `WAIT` for a send to be done.

        >>> from schedules import F, parse
        >>> Span(1, F(1, 0), 2, 3).waits, Span(1, parse("1RECV_F0<0"), 0, 2).waits
        (False, True)
        """
        return self.action.peer is not None


def needs(action: Action, graph: Graph) -> list[Token]:
    """The tokens that must exist before `action` can run; `(what, stage, microbatch)` names what a stage has made.

    >>> from schedules import B, F, chain
    >>> needs(F(1, 0), chain(3)), needs(B(1, 0), chain(3))
    ([('F', 0, 0)], [('F', 1, 0), ('B', 2, 0)])
    """
    kind, s, i, _, _ = action
    word = KINDS[kind]
    own = {"": [], "kept": [("F", s, i)], "forward": [("F", s, i)], "halved": [("B", s, i)]}
    crossing = {"F": graph.fed_by[s], "B": graph.pulled_by[s], "": ()}[word.crosses]
    return own[word.before] + [(word.crosses, peer, i) for peer in crossing]


def makes(action: Action) -> Token:
    """The token that exists once `action` has run."""
    word = KINDS[action.kind]
    return (word.crosses or action.kind, action.stage, action.microbatch)


class Played:
    """How far the ranks have come, rank by rank.

    - `streams`, `heads`: the actions to come, and the first of them, `None` at the end; `partners`: the one behind it,
      where that has been read.
    - `waits`: the crossing that the rank waits for.
    - `draws`: the rank's own random numbers, for jitter.
    - `begin`, `clock`: when the first action began and the last one ended; `busy`: the time spent in actions.
    - `held`, `peak`: memory now, and the most so far.
    """

    def __init__(self, streams: Sequence[Iterator[Action]], seed: int) -> None:
        P = len(streams)
        self.draws = [Random(f"{seed}/{rank}").uniform for rank in range(P)]
        self.streams = streams
        self.heads = [next(stream, None) for stream in streams]
        self.partners: list[Action | None] = [None] * P
        self.waits: list[Crossing | None] = [None] * P
        self.begin, self.clock, self.busy = [inf] * P, [0.0] * P, [0.0] * P
        self.held, self.peak = [0.0] * P, [0.0] * P


def replay(
    schedule: Schedule, streams: Sequence[Iterator[Action]], wires: Wires, costs: Costs, spans: bool = True
) -> Generator[list[Span], None, Played]:
    """Play the actions of all ranks to the end; yields spans in batches, as data allow; returns what was played.

    `streams[r]` yields the actions of rank `r`. Raises `ScheduleError` (rule `ordered`) where the ranks block each
    other, or wait for something that nobody makes. Linear in the number of actions; memory is what is in flight. With
    `spans` false, it yields nothing.
    """
    try:
        played = Played(streams, costs.seed)
        yield from _play(schedule, played, wires, costs, spans)
    except ScheduleError:
        raise
    except _BAD:
        require_fitting(schedule)
        raise
    if any(played.heads):
        raise _stuck(schedule, played)
    return played


def _play(  # noqa: PLR0912, PLR0915 - the one hot loop: every call in it would be paid for by every action
    schedule: Schedule, played: Played, wires: Wires, costs: Costs, spans: bool
) -> Iterator[list[Span]]:
    """Play until every rank has ended or waits."""
    slices, R, jitter = schedule.slices, len(schedule.placement.routes), costs.jitter
    batch: list[Span] = []
    ready = [*reversed(range(len(wires)))]
    while ready:
        rank = ready.pop()
        pending: Pending = ()  # what the first action of a pair made
        rows, stream, action = wires[rank], played.streams[rank], played.heads[rank]
        now, busy, held, peak = played.clock[rank], played.busy[rank], played.held[rank], played.peak[rank]
        while action is not None:
            kind, stage, unit, _, part = action
            takes, gives, time, grows, fused = rows[kind][stage if R == 1 else stage * R + unit % R]
            if part is not None:
                unit = unit * slices + part
            start = now
            if fused and (start := max(now, _partner(schedule, played, rank, rows))) == inf:
                break
            for crossing in takes:
                if (arrived := crossing.arrived.get(unit)) is None:
                    crossing.wanted, played.waits[rank] = unit, crossing
                    break
                if arrived > start:
                    start = arrived
            else:
                for crossing in takes:
                    del crossing.arrived[unit]
                if jitter:
                    time *= played.draws[rank](1 - jitter, 1 + jitter)
                if not now:
                    played.begin[rank] = min(start, played.begin[rank])
                now = start + time
                busy += time
                held += grows
                if held > peak:
                    peak = held
                if spans:
                    batch.append(Span(rank, action, start, now))
                    if len(batch) == BATCH:
                        yield batch
                        batch = []
                if fused:
                    pending = gives, unit
                    action, played.partners[rank] = played.partners[rank], None
                    continue
                for crossing, delay in gives:
                    crossing.arrived[unit] = now + delay
                    if crossing.wanted == unit:
                        crossing.wanted = None
                        ready.append(crossing.consumer)
                if pending:
                    _leave(*pending, now, ready)
                    pending = ()
                action = next(stream, None)
                continue
            break
        played.heads[rank] = action
        played.clock[rank], played.busy[rank], played.held[rank], played.peak[rank] = now, busy, held, peak
    if batch:
        yield batch


def _leave(gives: Gives, unit: int, now: float, ready: list[int]) -> None:
    """Send what the first action of a pair made, now that the pair has ended."""
    for crossing, delay in gives:
        crossing.arrived[unit] = now + delay
        if crossing.wanted == unit:
            crossing.wanted = None
            ready.append(crossing.consumer)


def _partner(schedule: Schedule, played: Played, rank: int, rows: dict[str, dict[int, Row]]) -> float:
    """When the data of the second action of a fused pair are there, or infinity: the pair begins as one."""
    if played.partners[rank] is None:
        played.partners[rank] = next(played.streams[rank], None)
    action, latest = played.partners[rank], 0.0
    if action is None:
        return latest
    R = len(schedule.placement.routes)
    unit = unit_of(action, schedule.slices)
    for crossing in rows[action.kind][action.stage * R + action.microbatch % R].takes:
        if (arrived := crossing.arrived.get(unit)) is None:
            crossing.wanted, played.waits[rank] = unit, crossing
            return inf
        latest = max(latest, arrived)
    return latest


def _stuck(schedule: Schedule, played: Played) -> ScheduleError:
    """Follow who waits for whom, from the lowest blocked rank, until somebody waits in vain or the circle closes.

    The rest of every rank is read first: a stream that breaks a rule of its own further on says so, and that is the
    cause. A circle is blamed only if each of its ranks would get to what the next one needs.
    """
    ahead = [[a for a in (head, partner) if a] for head, partner in zip(played.heads, played.partners, strict=True)]
    rest = [[*some, *stream] for some, stream in zip(ahead, played.streams, strict=True)]
    rank, seen = next(rank for rank, actions in enumerate(rest) if actions), dict[int, None]()
    while True:
        seen[rank] = None
        crossing = played.waits[rank]
        assert crossing is not None, "a rank with actions to come waits"
        home, word = crossing.producer, _word(crossing, schedule.slices)
        makers = [action for action in rest[home] if _gives(action, crossing, schedule)]
        if home == rank:
            why = "which this rank does only later" if makers else "which no rank ever does"
            repair = f"Move {word} before it." if makers else f"Add {word} to rank {home}."
            break
        if not makers:
            why, repair = f"which rank {home} never does", f"Add {word} to rank {home}."
            break
        if home in seen:
            circle = list(seen)[list(seen).index(home) :]
            words = [_word(wait, schedule.slices) for r in circle if (wait := played.waits[r])]
            steps = [f"rank {r} at {rest[r][0]} needs {need}" for r, need in zip(circle, words, strict=True)]
            why = f"and the ranks wait in a circle: {', '.join(steps)}"
            rank, word, repair = circle[0], words[0], "Reorder the actions of one of these ranks."
            break
        rank = home
    position = sum(1 for _ in schedule.actions(rank)) - len(rest[rank])
    return ScheduleError("ordered", rank, position, rest[rank][0], f"needs {word}, {why}", repair)


def _gives(action: Action, crossing: Crossing, schedule: Schedule) -> bool:
    """Whether `action` makes what is wanted of `crossing`."""
    word = KINDS[action.kind]
    if action.stage != crossing.source:
        return False
    if crossing.what == "G":
        return word.after == "done"
    return word.crosses == crossing.what and unit_of(action, schedule.slices) == crossing.wanted


def unit_of(action: Action, slices: int) -> int:
    """The number of the microbatch, or of its slice, among all of the step.

    >>> unit_of(Action("F", 0, 2, slice=1), slices=4)
    9
    """
    return action.microbatch * slices + (action.slice or 0)


def _word(crossing: Crossing, slices: int) -> str:
    assert crossing.wanted is not None, "a rank waits for it"
    if crossing.what == "G":
        return f"all backwards of stage {crossing.source} on rank {crossing.producer}"
    i, part = divmod(crossing.wanted, slices)
    unit = f"{i}" if slices == 1 else f"{i}.{part}"
    s = crossing.source
    return f"{s}F{unit}" if crossing.what == "F" else f"{s}B{unit} or {s}I{unit}"
