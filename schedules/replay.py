# SPDX-License-Identifier: Apache-2.0
"""The order in which everything can happen: all ranks replayed together, as far as their data allow.

Checking, simulating and drawing ask the same question: in which order can the actions of all ranks happen, if each rank
keeps its own order and waits for its data? `replay` answers it once, in one pass, holding only what is in flight.

What an action needs and makes is named by *tokens*: `("F", s, i)` is the value that stage `s` made for microbatch `i`,
`("B", s, i)` its input cotangents. `F` makes the first; `B` and `I` make the second; `W` makes nothing and needs what
its `I` made.

Invariant: a token is kept from the action that makes it to the last action that uses it, and no longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from schedules.actions import Action
from schedules.authoring import Schedule
from schedules.errors import GraphError, ScheduleError
from schedules.graph import Graph, chain
from schedules.placement import Placement

Token: TypeAlias = tuple[str, int, int]
Value = TypeVar("Value")


class Event(NamedTuple):
    """Action number `position` of `rank`."""

    rank: int
    position: int
    action: Action


def needs(action: Action, graph: Graph) -> list[Token]:
    """The tokens that must exist before `action` can run.

    >>> from schedules import B, F
    >>> needs(F(1, 0), chain(3)), needs(B(1, 0), chain(3))
    ([('F', 0, 0)], [('F', 1, 0), ('B', 2, 0)])
    """
    kind, s, i, _, _ = action
    if kind == "F":
        return [("F", p, i) for p in graph.fed_by[s]]
    if kind == "W":
        return [("B", s, i)]
    return [("F", s, i), *[("B", t, i) for t in graph.pulled_by[s]]]


def makes(action: Action) -> Token:
    """The token that exists once `action` has run."""
    return ("B" if action.kind == "I" else action.kind, action.stage, action.microbatch)


class InFlight(Generic[Value]):
    """Tokens that exist, each with a value, kept until its last use."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._alive: dict[Token, tuple[Value, int]] = {}

    def __contains__(self, token: Token) -> bool:
        return token in self._alive

    def put(self, action: Action, value: Value) -> None:
        """Keep `value` for what `action` makes, if anybody will use it."""
        kind, s, _, _, _ = action
        if kind == "F":
            uses = len(self._graph.feeds[s]) + 1
        else:
            uses = 0 if kind == "W" else len(self._graph.pulls[s]) + (kind == "I")
        if uses:
            self._alive[makes(action)] = value, uses

    def take(self, token: Token) -> Value:
        """The value of `token`; its last use lets go of it."""
        value, uses = self._alive.pop(token)
        if uses > 1:
            self._alive[token] = value, uses - 1
        return value


def graph_of(schedule: Schedule, graph: Graph | None) -> Graph:
    """`graph`, or the chain of the schedule's stages; raises `GraphError` if the sizes differ."""
    if graph is None:
        return chain(schedule.stages)
    if graph.stages != schedule.stages:
        raise GraphError(
            f"got a graph of {graph.stages} stages for {schedule!r}, expected {schedule.stages}. "
            "Cut the model into as many stages as the schedule drives, or change the schedule's ranks or chunks."
        )
    return graph


def replay(streams: Sequence[Iterator[Action]], graph: Graph, placement: Placement) -> Iterator[Event]:
    """Every action of every rank, in an order in which each finds its data.

    `streams[r]` yields the actions of rank `r`. Raises `ScheduleError` (rule `ordered`) where the ranks block each
    other, or wait for something that nobody makes. Linear in the number of actions; memory is what is in flight.
    """
    positions, heads = [0] * len(streams), [next(stream, None) for stream in streams]
    alive = InFlight[None](graph)
    waiting: dict[Token, list[int]] = {}
    ready = deque(range(len(streams)))
    while ready:
        rank = ready.popleft()
        while (action := heads[rank]) is not None:
            tokens = needs(action, graph)
            missing = next((token for token in tokens if token not in alive), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            yield Event(rank, positions[rank], action)
            for token in tokens:
                alive.take(token)
            alive.put(action, None)
            ready.extend(waiting.pop(makes(action), ()))
            heads[rank] = next(streams[rank], None)
            positions[rank] += 1
    if waiting:
        blocked = {rank: token for token, ranks in waiting.items() for rank in ranks}
        raise _stuck(streams, heads, positions, blocked, placement)


def _stuck(
    streams: Sequence[Iterator[Action]],
    heads: list[Action | None],
    positions: list[int],
    waiting: dict[int, Token],
    placement: Placement,
) -> ScheduleError:
    """Follow who waits for whom, from the lowest blocked rank, until somebody waits in vain or the circle closes.

    The rest of every rank is read first: a stream that breaks a rule of its own further on says so, and that is the
    cause. A circle is blamed only if each of its ranks would get to what the next one needs.
    """
    rest = [[*stream] for stream in streams]
    rank, seen = min(waiting), dict[int, None]()
    while True:
        seen[rank] = None
        token = waiting[rank]
        home = placement.homes[token[1]]
        if home == rank:
            later = any(makes(action) == token for action in rest[rank])
            why = "which this rank does only later" if later else "which no rank ever does"
            repair = f"Move {_word(token)} before it." if later else f"Add {_word(token)} to rank {home}."
            break
        if not any(makes(action) == token for action in (heads[home], *rest[home]) if action):
            why, repair = f"which rank {home} never does", f"Add {_word(token)} to rank {home}."
            break
        if home in seen:
            circle = list(seen)[list(seen).index(home) :]
            steps = ", ".join(f"rank {r} at {heads[r]} needs {_word(waiting[r])}" for r in circle)
            why, repair = f"and the ranks wait in a circle: {steps}", "Reorder the actions of one of these ranks."
            rank, token = circle[0], waiting[circle[0]]
            break
        rank = home
    return ScheduleError("ordered", rank, positions[rank], heads[rank], f"needs {_word(token)}, {why}", repair)


def _word(token: Token) -> str:
    kind, stage, microbatch = token
    return f"{stage}{kind}{microbatch}" if kind == "F" else f"{stage}B{microbatch} or {stage}I{microbatch}"
