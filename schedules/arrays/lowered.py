# SPDX-License-Identifier: Apache-2.0
"""Large programs as arrays: compute actions, transfers and waits, made into actions for whoever asks.

Idea. Compute actions are known from the schedule, and `posts` has the order of sends and receives. A send is waited for
once a message from its target shows that it has been used, or at the end: the first one that is made after its use.
All of these have slots, so a rank's program is in the order of its slots. It is put together when somebody asks for it,
in arrays that fit into the processor's cache.

Invariant: the program is that of `schedules.lowering`, action by action.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedules.arrays.codes import CODE_OF, ROW_END, Numbers
from schedules.arrays.lives import read_lives
from schedules.arrays.posts import PARTS, RUN, WAITED, AllMessages, Posts, list_messages, meet, order_posts
from schedules.arrays.ticks import TickedPosts, order_by_ticks
from schedules.language.actions import KINDS, RECEIVES, SENDS, WAITS, Action, new_tuple
from schedules.language.graph import Graph
from schedules.language.schedule import Schedule

MOST_LOOKS: Final = 16
"""The most looks at a rank for circles, per action: with more, the loops are as fast."""
_SENT = [SENDS[what] for what in "FB"]
KIND_OF = (*CODE_OF, "", *_SENT, *(RECEIVES[send] for send in _SENT), *(WAITS[send] for send in _SENT))
SEND, RECEIVE, WAIT = range(ROW_END + 1, ROW_END + 7, 2)
"""The codes of transfers of values; those of cotangents are one more."""
_IS_BACK = np.array([*(KINDS[name].crosses == "B" for name in CODE_OF), False])


class ActionTables(NamedTuple):
    """The fields of actions, as objects: taking them from a table is faster than making them anew.

    - `kinds`: by code; `stages`, `peers`: by code and the stage of the action, of a transfer the one that sends.
    - `numbers`: those of microbatches, at least. `slices`: how many a microbatch has.
    """

    kinds: NDArray[Any]
    stages: NDArray[Any]
    peers: NDArray[Any]
    numbers: NDArray[Any]
    slices: int


class Lowered(NamedTuple):
    """A program: its messages, the posts of all ranks, and what its actions hold."""

    messages: AllMessages
    posts: Posts | TickedPosts
    fields: ActionTables

    def decode(self, rank: int) -> Iterator[Action]:
        """Return an iterator over the actions of a rank; they are put together when the first is asked for."""
        return chain.from_iterable(map(self._decode, [rank]))

    def _decode(self, rank: int) -> Iterator[Action]:
        codes = self.messages.codes
        first, end = codes.firsts[rank], codes.ends[rank]
        posted, slots = self.posts.row(rank)
        turns, waited = self._list_waits(rank)
        does = np.where((first <= posted) & (posted < end), SEND, RECEIVE) + _IS_BACK[codes.kinds[posted]]
        order = np.argsort(
            np.concatenate([slots, np.arange(end - first) * PARTS + RUN, turns * PARTS + WAITED]), kind="stable"
        )
        numbers = np.concatenate([posted, np.arange(first, end), waited])[order]
        kinds = np.concatenate([does, codes.kinds[first:end], WAIT + _IS_BACK[codes.kinds[waited]]])[order]
        return self._make_actions(kinds, codes.stages[numbers], codes.units[numbers])

    def _list_waits(self, rank: int) -> tuple[Numbers, Numbers]:
        """Return the turn after which each send of a rank is waited for, in order, and the messages sent."""
        codes, row = self.messages.codes, self.messages.row(rank)
        proof = np.searchsorted(row.received, row.users)
        is_proved = np.append(row.received, len(codes.kinds))[proof] <= codes.ends[row.targets]
        turns = np.where(is_proved, np.append(row.turns, 0)[proof], codes.ends[rank] - codes.firsts[rank])
        order = np.lexsort((np.where(is_proved, row.users, row.sent), turns))
        return turns[order], row.sent[order]

    def _make_actions(self, kinds: Numbers, stages: Numbers, units: Numbers) -> Iterator[Action]:
        fields, ends = self.fields, kinds * self.fields.stages.shape[1] + stages
        microbatches, parts = (units, None) if fields.slices == 1 else np.divmod(units, fields.slices)
        columns = (
            fields.kinds.take(kinds).tolist(),
            fields.stages.take(ends).tolist(),
            fields.numbers.take(microbatches).tolist(),
            fields.peers.take(ends).tolist(),
            repeat(None) if parts is None else parts.tolist(),
        )
        return map(new_tuple, repeat(Action), zip(*columns, strict=False))


def lower_all(schedule: Schedule, graph: Graph) -> Lowered | None:
    """Return the program of a schedule, or `None` if arrays do not serve it."""
    is_served = schedule.backward and len(schedule.placement.routes) == 1 and not graph.gradients
    if not is_served or (found := read_lives(schedule)) is None or (found[0].kinds == CODE_OF["OVERLAP_F"]).any():
        return None
    messages = list_messages(schedule, graph, *found)
    if messages is None:
        return None
    looks = len(found[0].kinds) * MOST_LOOKS // schedule.ranks
    posts = meet(order_posts(messages), looks) if schedule.ticks is None else order_by_ticks(schedule, messages)
    return None if posts is None else Lowered(messages, posts, _list_fields(schedule, messages))


def _list_fields(schedule: Schedule, messages: AllMessages) -> ActionTables:
    """Return what the actions of a program hold."""
    numbers = np.array([*range(max(schedule.stages, schedule.microbatches)), None], object)
    stages, peers = np.tile(np.arange(schedule.stages), (len(KIND_OF), 1)), np.full((len(KIND_OF), schedule.stages), -1)
    for code in range(SEND, len(KIND_OF)):
        peers[code] = messages.gives.stages[CODE_OF["FB"[(code - SEND) % 2]]]
    receives = slice(RECEIVE, WAIT)
    stages[receives], peers[receives] = peers[receives], stages[receives].copy()
    return ActionTables(np.array(KIND_OF, object), numbers[stages], numbers[peers], numbers, schedule.slices)
