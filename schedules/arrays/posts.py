# SPDX-License-Identifier: Apache-2.0
"""The transfers of a large program, for all ranks at once.

Problem. `lower` plays all ranks to find an order in which each of their transfers can run. Of all work on a large
schedule that takes longest.

Idea. Unless ranks wait for each other in a circle, the order of each is known beforehand. It sends what an action makes
right after it, and receives what an action uses one action earlier. Messages come in the order of their sends, so each
is received no later than any that its channel sends after it: a running minimum from the end. A play of these posts
alone finds the circles; there the order is changed as `lower` changes it.

This is for schedules in which an action takes at most one message and gives at most one: those of chains, mostly. So
a message has the number of the action that makes it.

Invariant: the program is that of `schedules.lowering`, action by action.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from schedules.arrays.codes import CODE_OF, Codes, Numbers
from schedules.arrays.lives import Lives
from schedules.language.actions import KINDS
from schedules.language.graph import Graph
from schedules.language.schedule import Schedule

NEEDED, EARLY, RUN, BETWEEN, SENT, WAITED = range(6)
"""The parts of a turn: receives for its action, for the next one, the action, late receives, its send, and waits."""
PARTS: Final = 8
"""The slot of a part is the place of its action on the rank times this, plus the part."""


AnyNumbers: TypeAlias = NDArray[np.signedinteger[Any]]


class Ends(NamedTuple):
    """The other ends of what each kind of action takes from other ranks, or gives to them; tables by code and stage.

    - `places`: where the actions at the other end are in a table by unit, or -1 if there are none.
    - `stages`, `ranks`: the stage and the rank of the other end.
    """

    places: Numbers
    stages: Numbers
    ranks: Numbers


class RankMessages(NamedTuple):
    """The messages of a rank. All numbers are those of actions (`Codes`), but `turns` count from the rank's first.

    - `received`, in ascending order: the makers; `turns`: when each is used; `sources`: the ranks that send them.
    - `sent`, in ascending order: the makers; `users`: at the other end; `targets`: the ranks they go to.
    """

    received: Numbers
    turns: Numbers
    sources: Numbers
    sent: Numbers
    users: Numbers
    targets: Numbers


class AllMessages(NamedTuple):
    """All messages of a schedule: `takes` and `gives` find the other ends of those of `codes` in the table `others`."""

    codes: Codes
    takes: Ends
    gives: Ends
    others: NDArray[np.int32]

    def row(self, rank: int) -> RankMessages:
        """Return the messages of a rank."""
        first = self.codes.firsts[rank]
        kinds, stages, units = (column[first : self.codes.ends[rank]] for column in self.codes[:3])
        keys = kinds * np.intp(self.takes.places.shape[1]) + stages
        found = list[Numbers]()
        for ends in (self.takes, self.gives):
            places = ends.places.ravel()[keys]
            turns = np.flatnonzero(places >= 0)
            found += turns, self.others[places[turns] + units[turns]], ends.ranks.ravel()[keys[turns]]
        turns, received, sources, sent, users, targets = found
        order = np.argsort(received)
        return RankMessages(received[order], turns[order], sources[order], sent + first, users, targets)


class Posts(NamedTuple):
    """Sends and receives of each rank, in the order of their posts, rank by rank; the last of each is its end.

    - `messages`: which; for an end, a number above all of them plus the rank.
    - `peers`: the rank at the other end; `slots`: when. `starts`: of each rank, and the end of the last.
    """

    messages: array[int]
    peers: array[int]
    slots: array[int]
    starts: list[int]

    def row(self, rank: int) -> tuple[AnyNumbers, AnyNumbers]:
        """Return the messages of a rank in the order of their posts, and their slots."""
        start, stop = self.starts[rank : rank + 2]
        messages, slots = (np.frombuffer(column, np.int32)[start : stop - 1] for column in (self.messages, self.slots))
        return messages, slots


def list_messages(schedule: Schedule, graph: Graph, codes: Codes, lives: Lives) -> AllMessages | None:
    """Return all messages, or `None` if an action takes or gives several."""
    homes, S, units = schedule.placement.homes, schedule.stages, lives.done.shape[1]
    takes, gives = (Ends(*np.full((3, len(CODE_OF) + 1, S), -1)) for _ in "ab")
    for name, code in CODE_OF.items():
        crosses = KINDS[name].crosses
        edges = {"F": graph.values, "B": [(t, s) for s, t in graph.cotangents], "": ()}[crosses]
        for edge in edges:
            for ends, mine, other in ((takes, 1, 0), (gives, 0, 1)):
                here, there = code, edge[mine]
                if homes[there] == homes[edge[other]]:
                    continue
                if ends.places[here, there] >= 0:
                    return None
                ends.places[here, there] = ((crosses == "B") * S + edge[other]) * units
                ends.stages[here, there], ends.ranks[here, there] = edge[other], homes[edge[other]]
    return AllMessages(codes, takes, gives, np.concatenate([lives.values.ravel(), lives.cotangents.ravel()]))


def order_posts(messages: AllMessages) -> Posts:
    """Return the posts of all ranks, in the order they have if no ranks wait in a circle."""
    posts = Posts(array("i"), array("i"), array("i"), [0])
    for rank in range(len(messages.codes.ends)):
        for column, more in zip(posts[:3], _order_row(messages, rank), strict=True):
            column.frombytes(more.astype(np.int32).tobytes())
        posts.starts.append(len(posts.messages))
    return posts


def _order_row(messages: AllMessages, rank: int) -> Iterator[Numbers]:
    """Yield the messages of a rank, their peers, and their slots."""
    row, n = messages.row(rank), len(messages.codes.kinds)
    length = messages.codes.ends[rank] - messages.codes.firsts[rank]
    wanted = np.where(row.turns, (row.turns - 1) * PARTS + EARLY, NEEDED)
    apart = row.sources * np.intp(length * PARTS)
    wanted = np.minimum.accumulate((wanted + apart)[::-1])[::-1] - apart
    sends = (row.sent - messages.codes.firsts[rank]) * PARTS + SENT
    slots = np.concatenate([wanted, sends, [length * PARTS + SENT]])
    order = np.argsort(slots, kind="stable")
    yield np.concatenate([row.received, row.sent, [n + rank]])[order]
    yield np.concatenate([row.sources, row.targets, [rank]])[order]
    yield slots[order]


def meet(posts: Posts, patience: int) -> Posts | None:
    """Bring posts into an order in which they all pass, and return them; `None` after too many changes, or if stuck.

    A message passes once both of its ranks are at it. Most of the time few ranks can go on, so this is a loop.
    """
    messages, peers, _, starts = posts
    at, ready = starts[:-1], [*range(len(starts) - 1)]
    for _ in range(patience):
        while ready:
            rank = ready.pop()
            k = at[rank]
            while (peer := peers[k]) != rank and messages[k] == messages[other := at[peer]]:
                at[peer] = other + 1
                ready.append(peer)
                k += 1
            at[rank] = k
        changes = [_change_order(posts, at, circle) for circle in _list_circles(peers, at)]
        if not changes:
            return posts if all(peers[k] == rank for rank, k in enumerate(at)) else None
        if not all(changes):
            return None
        ready = [rank for some in changes for rank in some]
    return None


def _list_circles(peers: array[int], at: list[int]) -> Iterator[list[int]]:
    """Yield the ranks of each circle: each waits for the next, and the last for the first."""
    after, seen = [peers[k] for k in at], [-1] * len(at)
    for start, rank in enumerate(after):
        if seen[start] >= 0:
            continue
        path, seen[start] = [start], start
        while seen[rank] < 0:
            seen[rank] = start
            path.append(rank)
            rank = after[rank]
        if seen[rank] == start and path[-1] != rank:
            yield path[path.index(rank) :]


def _change_order(posts: Posts, at: list[int], circle: list[int]) -> list[int]:
    """Let the rank of a circle go on that `lower` chooses, and return who may go on then: nobody if there is none."""
    messages, peers, slots, _ = posts
    parts = [slots[at[rank]] % PARTS for rank in circle]
    part = SENT if SENT in parts else EARLY
    able = {rank for rank, other in zip(circle, parts, strict=True) if other == part}
    if not able:
        return []
    chosen = min([rank for rank in able if peers[at[rank]] not in able] or able)
    start, peer = at[chosen], peers[at[chosen]]
    if part == SENT:  # its message is received before the post that the other rank is at
        start, message = at[peer], messages[start]
        slot = slots[start]
        _move(posts, start, messages.index(message, start))
        slots[start] = slot if slot % PARTS < BETWEEN else slot - SENT + BETWEEN
        return [peer, chosen]
    slot = slots[start]  # it receives after the next action, and after what that sends
    stop = start
    while slots[stop] == slot:
        slots[stop] = slot - EARLY + PARTS + NEEDED
        stop += 1
    if slots[stop] == slot - EARLY + SENT:
        _move(posts, start, stop)
    return [chosen]


def _move(posts: Posts, start: int, place: int) -> None:
    """Move a post forward, from its place to `start`."""
    for column in posts[:3]:
        column[start : place + 1] = column[place : place + 1] + column[start:place]
