# SPDX-License-Identifier: Apache-2.0
"""The transfers of a large program, for all ranks at once.

Problem. `lower` plays all ranks to find an order in which each of their transfers can run. Of all work on a large
schedule that takes longest.

Idea. Unless ranks wait for each other in a circle, the order of each is known beforehand. It sends what an action makes
right after it, and receives what an action uses one action earlier. Messages come in the order of their sends, so each
is received no later than any that its channel sends after it: a running minimum from the end. Rounds over all ranks
(`abreast`) find the circles; there the order is changed as `lower` changes it.

This is for schedules in which an action takes at most one message and gives at most one: those of chains, mostly.

Invariant: the program is that of `schedules.lowering`, action by action.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

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
"""The slot of a part is the number of its action times this, plus the part."""


class Messages(NamedTuple):
    """All messages, those of each channel by the numbers of their `makers`; `users` use them.

    - `channels`: of each message; `sources`, `targets`: the ranks at its ends.
    """

    makers: Numbers
    users: Numbers
    channels: NDArray[np.int16]
    sources: Numbers
    targets: Numbers


class Posts(NamedTuple):
    """Sends and receives of each rank, in the order of their posts, rank by rank; the last of each is its end.

    - `messages`: which; for an end, a number above all of them plus the rank.
    - `peers`: the rank at the other end; `slots`: when. `starts`: of each rank.
    """

    messages: Numbers
    peers: Numbers
    slots: Numbers
    starts: Numbers


def list_messages(schedule: Schedule, graph: Graph, codes: Codes, lives: Lives) -> Messages | None:
    """Return all messages, or `None` if there are none, or if an action takes or gives several."""
    homes, S = schedule.placement.homes, schedule.stages
    pairs = dict[tuple[int, int], int]()
    takes, channels = np.full((2, len(CODE_OF) + 1, S), -1)
    for name, code in CODE_OF.items():
        crosses = KINDS[name].crosses
        edges = {"F": graph.values, "B": [(t, s) for s, t in graph.cotangents], "": ()}[crosses]
        ends = [(s, t) for s, t in edges if homes[s] != homes[t]]
        if any(len({end[k] for end in ends}) < len(ends) for k in (0, 1)):
            return None
        for s, t in ends:
            takes[code, t], channels[code, t] = s, pairs.setdefault((homes[s], homes[t]), len(pairs))
    users = np.flatnonzero(takes[codes.kinds, codes.stages] >= 0)
    kinds, stages = codes.kinds[users], codes.stages[users]
    if not len(users) or len(pairs) > np.iinfo(np.int16).max:
        return None
    is_value = np.array([*(KINDS[name].crosses == "F" for name in CODE_OF), False])[kinds]
    places = takes[kinds, stages] * lives.done.shape[1] + codes.units[users]
    makers = np.where(is_value, lives.values.ravel()[places], lives.cotangents.ravel()[places])
    of_maker = np.full(len(codes.kinds), -1)
    of_maker[makers] = np.arange(len(users))
    by_maker = of_maker[of_maker >= 0]
    channel = channels[kinds, stages].astype(np.int16)
    order = by_maker[np.argsort(channel[by_maker], kind="stable")]
    ends_of = np.array([*pairs])[channel[order]]
    return Messages(makers[order].astype(np.intp), users[order], channel[order], ends_of[:, 0], ends_of[:, 1])


def count_before(counts: NDArray[Any]) -> Numbers:
    """Return the sum of all counts before each."""
    return np.append(0, np.cumsum(counts, dtype=np.intp)[:-1])


def order_posts(codes: Codes, messages: Messages) -> Posts:
    """Return the posts of all ranks, in the order they have if no ranks wait in a circle."""
    n, m, P = len(codes.kinds), len(messages.users), len(codes.ends)
    is_first = codes.firsts[messages.targets] == messages.users
    wanted = np.where(is_first, messages.users * PARTS + NEEDED, (messages.users - 1) * PARTS + EARLY)
    apart = messages.channels * np.intp(n * PARTS)
    wanted = np.minimum.accumulate((wanted + apart)[::-1])[::-1] - apart
    of_user = np.full(n, -1)
    of_user[messages.users] = np.arange(m)
    received = of_user[of_user >= 0]
    received = received[np.argsort((wanted * n + messages.makers)[received], kind="stable")]  # nearly sorted
    sent = np.full(n, -1)
    sent[messages.makers] = np.arange(m)
    sent[codes.ends] = m + np.arange(P)
    numbers = np.flatnonzero(sent >= 0)
    before = count_before(sent >= 0)
    at_receives = np.arange(m) + before[wanted[received] // PARTS]
    at_sends = np.arange(len(numbers)) + np.cumsum(np.bincount(wanted // PARTS, minlength=n))[numbers]
    columns = np.empty((3, 2 * m + P), np.intp)
    posts = Posts(columns[0], columns[1], columns[2], at_sends)
    posts.messages[at_receives], posts.messages[at_sends] = received, sent[numbers]
    posts.slots[at_receives], posts.slots[at_sends] = wanted[received], numbers * PARTS + SENT
    targets = np.append(messages.targets, np.arange(P))
    posts.peers[at_receives], posts.peers[at_sends] = messages.sources[received], targets[sent[numbers]]
    ends = np.flatnonzero(posts.messages >= m)
    return posts._replace(starts=np.append(0, ends[:-1] + 1))


def meet(posts: Posts, patience: int) -> Posts | None:
    """Play the posts, and return them in an order in which they all pass; `None` after too many changes, or if stuck.

    A message passes once both of its ranks are at it. Most of the time few ranks can go on, so this is a loop.
    """
    columns = [array("i", column.astype(np.int32).tobytes()) for column in posts[:3]]
    messages, peers, _ = columns
    at = posts.starts.tolist()
    ready = [*range(len(at))]
    for _ in range(patience):
        while ready:
            rank = ready.pop()
            k = at[rank]
            while (peer := peers[k]) != rank and messages[k] == messages[other := at[peer]]:
                at[peer] = other + 1
                ready.append(peer)
                k += 1
            at[rank] = k
        changes = [_change_order(columns, at, circle) for circle in _list_circles(peers, at)]
        if not all(changes):
            return None
        if not changes:
            found = [np.frombuffer(column, np.int32).astype(np.intp) for column in columns]
            is_done = all(peers[k] == rank for rank, k in enumerate(at))
            return Posts(found[0], found[1], found[2], posts.starts) if is_done else None
        ready = [rank for some in changes for rank in some]
    return None


def _list_circles(peers: array[int], at: list[int]) -> Iterator[list[int]]:
    """Yield the ranks of each circle: each waits for the next, and the last for the first."""
    seen = [-1] * len(at)
    for start in range(len(at)):
        path, rank = list[int](), start
        while seen[rank] < 0:
            seen[rank] = start
            path.append(rank)
            rank = peers[at[rank]]
        if seen[rank] == start and path[-1] != rank:
            yield path[path.index(rank) :]


def _change_order(columns: list[array[int]], at: list[int], circle: list[int]) -> list[int]:
    """Let the rank of a circle go on that `lower` chooses, and return who may go on then: nobody if there is none."""
    messages, peers, slots = columns
    part = {rank: slots[at[rank]] % PARTS for rank in circle}
    senders = {rank for rank in circle if part[rank] == SENT}
    able = senders or {rank for rank in circle if part[rank] == EARLY}
    if not able:
        return []
    chosen = min(able, key=lambda rank: (peers[at[rank]] in able, rank))
    start, peer = at[chosen], peers[at[chosen]]
    if senders:  # its message is received before the post that the other rank is at
        start, message = at[peer], messages[start]
        slot = slots[start]
        _move(columns, start, messages.index(message, start))
        slots[start] = slot if slot % PARTS < BETWEEN else slot - SENT + BETWEEN
        return [peer, chosen]
    slot = slots[start]  # it receives after the next action, and after what that sends
    stop = start
    while slots[stop] == slot:
        slots[stop] = slot - EARLY + PARTS + NEEDED
        stop += 1
    if slots[stop] == slot - EARLY + SENT:
        _move(columns, start, stop)
    return [chosen]


def _move(columns: list[array[int]], start: int, place: int) -> None:
    """Move a post forward, from its place to `start`."""
    for column in columns:
        column[start : place + 1] = column[place : place + 1] + column[start:place]
