# SPDX-License-Identifier: Apache-2.0
"""Large programs as arrays: compute actions, transfers and waits of all ranks, made into actions for whoever asks.

Idea. Compute actions are known from the schedule, and `posts` has the order of sends and receives. A send is waited for
once a message from its target shows that it has been used, or at the end: the first one that is made after its use. So
there is a count of everything around every action, and with the sums of these counts each thing finds its place.

Invariant: the program is that of `schedules.lowering`, action by action.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedules.arrays.codes import CODE_OF, READ_AT_ONCE, ROW_END, Codes, Numbers
from schedules.arrays.lives import read_lives
from schedules.arrays.posts import BETWEEN, PARTS, SENT, Messages, Posts, count_before, list_messages, meet, order_posts
from schedules.language.actions import KINDS, RECEIVES, SENDS, WAITS, Action, new_tuple
from schedules.language.graph import Graph
from schedules.language.schedule import Schedule

MOST_LOOKS: Final = 16
"""The most looks at a rank for circles, per action: with more, the loops are as fast."""
_SENT = [SENDS[what] for what in "FB"]
KIND_OF = (*CODE_OF, "", *_SENT, *(RECEIVES[send] for send in _SENT), *(WAITS[send] for send in _SENT))
SEND, RECEIVE, WAIT = range(ROW_END + 1, ROW_END + 7, 2)
"""The codes of transfers of values; those of cotangents are one more."""


class Lowered(NamedTuple):
    """All actions of a program, rank by rank.

    - `kinds` (places in `KIND_OF`), `stages`, `units`, `peers` (-1 for none): of each action.
    - `starts`, `stops`: of each rank.
    """

    kinds: NDArray[np.int8]
    stages: NDArray[np.int32]
    units: NDArray[np.int32]
    peers: NDArray[np.int32]
    starts: Numbers
    stops: Numbers

    def decode(self, rank: int, slices: int) -> Iterator[Action]:
        """Return an iterator over the actions of a rank, of which microbatches have so many slices."""
        row = range(self.starts[rank], self.stops[rank])
        ends = [*range(int(self.peers[row.start : row.stop].max(initial=0)) + 1), None]  # at -1, none
        chunks = (row[k : k + READ_AT_ONCE] for k in range(0, len(row), READ_AT_ONCE))
        return chain.from_iterable(self._decode_chunk(chunk, ends, slices) for chunk in chunks)

    def _decode_chunk(self, row: range, ends: list[int | None], slices: int) -> Iterator[Action]:
        kinds, stages, units, peers = (column[row.start : row.stop] for column in self[:4])
        microbatches, parts = (units, repeat(None)) if slices == 1 else (units // slices, (units % slices).tolist())
        names, others = map(KIND_OF.__getitem__, kinds.tobytes()), map(ends.__getitem__, peers.tolist())
        fields = zip(names, stages.tolist(), microbatches.tolist(), others, parts, strict=False)
        return map(new_tuple, repeat(Action), fields)


def lower_all(schedule: Schedule, graph: Graph) -> Lowered | None:
    """Return the program of a schedule, or `None` if arrays do not serve it."""
    is_served = schedule.backward and len(schedule.placement.routes) == 1 and not graph.gradients
    if not is_served or (found := read_lives(schedule)) is None or (found[0].kinds == CODE_OF["OVERLAP_F"]).any():
        return None
    messages = list_messages(schedule, graph, *found)
    if messages is None:
        return None
    posts = meet(order_posts(found[0], messages), len(found[0].kinds) * MOST_LOOKS // schedule.ranks)
    return None if posts is None else _assemble(found[0], messages, posts)


def _assemble(codes: Codes, messages: Messages, posts: Posts) -> Lowered:
    """Return compute actions and transfers, each in its place."""
    n, m = len(codes.kinds), len(messages.users)
    part = posts.slots % PARTS
    is_receive = part != SENT
    turns, late = posts.slots[is_receive] // PARTS, part[is_receive] == BETWEEN
    received = posts.messages[is_receive]
    until, waited = _list_waits(codes, messages)
    runs, sends = np.ones(n, np.intp), np.zeros(n, np.intp)
    runs[codes.ends], sends[messages.makers] = 0, 1
    receives, waits = np.bincount(turns, minlength=n), np.bincount(until, minlength=n)
    early = receives - np.bincount(turns[late], minlength=n)
    counts = receives + runs + sends + waits
    base = count_before(counts)
    kinds, (stages, units, peers) = np.empty(counts.sum(), np.int8), np.empty((3, counts.sum()), np.int32)
    stops = base[codes.ends] + counts[codes.ends]
    lowered = Lowered(kinds, stages, units, peers, base[codes.firsts], stops)
    cotangent = np.isin(
        codes.kinds[messages.users], [code for name, code in CODE_OF.items() if KINDS[name].crosses == "B"]
    )
    computed = np.flatnonzero(runs)
    _fill(lowered, (base + early)[computed], codes.kinds[computed], codes, computed, None)
    at_receives = base[turns] + np.arange(m) - count_before(receives)[turns] + late
    _fill(
        lowered, at_receives, RECEIVE + cotangent[received], codes, messages.users[received], messages.makers[received]
    )
    at_sends = (base + receives + 1)[messages.makers]
    _fill(lowered, at_sends, SEND + cotangent, codes, messages.makers, messages.users)
    at_waits = (base + receives + runs + sends)[until] + np.arange(m) - count_before(waits)[until]
    _fill(lowered, at_waits, WAIT + cotangent[waited], codes, messages.makers[waited], messages.users[waited])
    return lowered


def _fill(
    lowered: Lowered, places: Numbers, kinds: NDArray[Any], codes: Codes, numbers: Numbers, peers: Numbers | None
) -> None:
    """Write actions to their places; `peers` are the numbers of the actions at the other end."""
    lowered.kinds[places], lowered.stages[places] = kinds, codes.stages[numbers]
    lowered.units[places], lowered.peers[places] = codes.units[numbers], -1 if peers is None else codes.stages[peers]


def _list_waits(codes: Codes, messages: Messages) -> tuple[Numbers, Numbers]:
    """Return the action or end after which each send is waited for, in order, and the messages sent."""
    n = len(codes.kinds)
    first = np.append(0, np.flatnonzero(np.diff(messages.channels)) + 1)
    pairs = {(int(messages.sources[k]), int(messages.targets[k])): int(messages.channels[k]) for k in first}
    back = np.array([pairs.get((t, s), -1) for s, t in sorted(pairs, key=pairs.__getitem__)])[messages.channels]
    made = messages.channels * np.intp(n) + messages.makers
    proof = np.searchsorted(made, back * np.intp(n) + messages.users)
    is_proved = (back >= 0) & (np.append(messages.channels, -1)[proof] == back)
    until = np.where(is_proved, np.append(messages.users, 0)[proof], codes.ends[messages.sources])
    order = np.argsort(until * n + np.where(is_proved, messages.users, messages.makers))
    return until[order], order
