# SPDX-License-Identifier: Apache-2.0
"""Turn priorities into orders: play time forward, and let each free rank run its most urgent pass (`playing.play`).

This needs no search, keeps the memory at every moment, and never gets stuck on a chain.
"""

from __future__ import annotations

from typing import TypeAlias

from schedules.playing.instance import Contender, Instance
from schedules.playing.play import Play, Room

Priorities: TypeAlias = list[list[list[float]]]
"""Per kind, stage and microbatch: the lower, the more urgent."""


def dispatch(
    instance: Instance, priorities: Priorities, origin: str, patience: float = 0.0, cautious: bool = False
) -> Contender | None:
    """Return the orders that follow from the priorities, or `None` if memory ran out, as it may in a graph with skips.

    `patience` is that of `play`. If `cautious`, a forward begins only if its own microbatch could go on at once,
    whatever others give back: good orders in little memory are often like that.
    """
    urgency = [priorities[kind][n][k] for kind, n, k in instance.jobs]
    room = Room(instance, instance.board, instance.reserve if cautious else ())
    played = Play(instance.board, urgency, patience, room)
    played.run()
    if any(map(len, played.left)):
        return None
    return Contender(max(played.free), [[instance.jobs[k] for k in row] for row in played.orders], origin)
