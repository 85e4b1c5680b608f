# SPDX-License-Identifier: Apache-2.0
"""The transfers of a large schedule that has ticks.

Idea. Ticks put the actions of all ranks into one order. A message passes at a place in it that follows from the places
of four actions: those that make and use it, the next one of its sender, and the one before its use. So nothing is
played, and the order of a rank's posts is that of these places.

Invariant: the program is that of `schedules.lowering`, action by action.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from schedules.arrays.codes import CODE_OF, Codes, Numbers
from schedules.arrays.lives import Same, read_lives
from schedules.arrays.posts import EARLY, NEEDED, PARTS, SENT, AllMessages, AnyNumbers
from schedules.language.actions import KINDS
from schedules.language.schedule import Schedule, TickRule

MOST_TICKS: Final = 2**40
_WAYS = [np.array([*(KINDS[name].crosses == way for name in CODE_OF), not way]) for way in ("B", "")]
"""By code, whether something goes backward; and whether it goes no way, as the end of a row does."""


class TickedPosts(NamedTuple):
    """Sends and receives of all ranks, placed by ticks.

    - `places`: of all actions, in the order of ticks, by number.
    - `passes`: when each message passes, by the number of its maker: a slot, with a place in that order.
    """

    messages: AllMessages
    places: Numbers
    passes: Numbers

    def row(self, rank: int) -> tuple[AnyNumbers, AnyNumbers]:
        """Return the messages of a rank in the order of their posts, and their slots."""
        row, first, end = self.messages.row(rank), self.messages.codes.firsts[rank], self.messages.codes.ends[rank]
        place, part = np.divmod(self.passes[row.received], PARTS)
        turns = np.searchsorted(self.places[first:end], place, "right") - 1
        slots = np.concatenate([turns * PARTS + part, (row.sent - first) * PARTS + SENT])
        posted = np.concatenate([row.received, row.sent])
        order = np.argsort(self.passes[posted], kind="stable")
        return posted[order], slots[order]


def order_by_ticks(schedule: Schedule, messages: AllMessages) -> TickedPosts | None:
    """Return the posts of a schedule with ticks, or `None` if something comes before what it needs."""
    places, codes = place_actions(schedule), messages.codes
    if places is None:
        return None
    keys = codes.kinds * np.intp(messages.gives.places.shape[1]) + codes.stages
    found = messages.gives.places.ravel()[keys]
    made = np.flatnonzero(found >= 0)
    used = messages.others[found[made] + codes.units[made]]
    before = np.append(-1, places[:-1])
    before[codes.firsts] = -1
    is_early = places[made] < before[used]
    asked = np.where(is_early, before[used] * PARTS + EARLY, places[used] * PARTS + NEEDED)
    passes = np.zeros(len(places), np.intp)
    passes[made] = np.minimum(asked, (places[made + 1] - 1) * PARTS + SENT)  # before its sender goes on, at the latest
    return TickedPosts(messages, places, passes) if (places[made] < places[used]).all() else None


def place_actions(schedule: Schedule) -> Numbers | None:
    """Return the place of each action in the order of ticks, or `None` if those of a rank do not ascend. Keep one."""
    return _place_actions(Same(schedule))


@lru_cache(maxsize=1)
def _place_actions(same: Same) -> Numbers | None:
    found, ticks = read_lives(same.schedule), same.schedule.ticks
    return None if found is None or ticks is None else _sort(same.schedule, ticks, found[0])


def _sort(schedule: Schedule, ticks: TickRule, codes: Codes) -> Numbers | None:
    P, units = schedule.ranks, schedule.microbatches * schedule.slices
    table = np.array(None)
    with suppress(Exception):  # the loops over actions say what is wrong
        table = np.array([[one[:units] for one in ticks(s)] for s in range(schedule.stages)])
    if table.shape != (schedule.stages, 2, units) or table.dtype.kind != "i" or np.abs(table).max() > MOST_TICKS:
        return None
    ranks, is_back, is_other = (
        np.repeat(np.arange(P), codes.ends - codes.firsts + 1),
        *(of[codes.kinds] for of in _WAYS),
    )
    keys = (2 * table.ravel()[(2 * codes.stages + is_back) * units + codes.units] + is_back) * P
    keys += np.where(is_back, P - 1 - ranks, ranks)
    keys[is_other] = keys.max() + 1 + ranks[is_other]
    if np.count_nonzero(is_other) > P:  # not only the ends of rows
        for first, end in zip(codes.firsts, codes.ends + 1, strict=True):  # others go with the next pass
            keys[first:end] = np.minimum.accumulate(keys[first:end][::-1])[::-1]
    if not ((np.diff(keys) > 0) | is_other[:-1]).all():
        return None
    places = np.empty(len(keys), np.intp)
    places[np.argsort(keys, kind="stable")] = np.arange(len(keys))
    return places
