# SPDX-License-Identifier: Apache-2.0
"""The time that a rank must be idle at the start of a schedule, and at its end.

By a time `t`, a rank has done no more than the passes with heads before `t` that fit into its memory. If that is less
than `t`, it was idle for the rest, and never makes up for it. Backward in time, the same is true of the end. If the
two windows do not overlap, the schedule takes the rank's work and both.

Example. Rank 0 of a chain may hold 4 microbatches, and the first cotangent comes back at time 7. Until then it runs 4
forwards at most, however early others could start.
"""

from __future__ import annotations

from math import floor, inf

from schedules.analysis.bounds.network import QueueNetwork
from schedules.analysis.bounds.release import Heads
from schedules.playing.costs import ROUNDING


class Started:
    """The passes of one queue that can start before some time: their number, and when the last can start.

    `takes` and `gives` are the memory that each takes at its start and that each gives back at its end.
    """

    __slots__ = ("gives", "last", "number", "takes", "time")

    def __init__(self, network: QueueNetwork, c: int) -> None:
        self.number, self.last, self.time = 0, 0.0, network.queues[c].time
        self.takes = sum(hold.amount for hold in network.holds if hold.taker == c)
        self.gives = sum(hold.amount for hold in network.holds if hold.giver == c)

    def find_last_work(self, until: float) -> float:
        """Return the most that the last of them can have done by a time."""
        return min(self.time, until - self.last) if self.number else 0.0


def find_idle(network: QueueNetwork, rank: int, heads: Heads) -> list[tuple[float, float]]:
    """Return times and how long the rank was idle before each, at least; both in increasing order.

    >>> from schedules.analysis.bounds.network import QueueNetwork, Queue
    >>> forward = Queue("F", 0, 0, 2, 1, ())
    >>> find_idle(QueueNetwork((forward,), (), (inf,)), 0, [[3.0, 6.0]])
    [(3.0, 3.0), (6.0, 5.0)]
    """
    rows = {c: Started(network, c) for c in network.on(rank)}
    found = list[tuple[float, float]]()
    for time, c in sorted((head, queue) for queue in rows for head in heads[queue]):
        if not found or time > found[-1][0]:
            idle = time - _find_most_work([*rows.values()], network.memory[rank], time)
            found.append((time, max(idle, found[-1][1] if found else 0.0)))
        rows[c].number, rows[c].last = rows[c].number + 1, time
    return found


def _find_most_work(rows: list[Started], memory: float, until: float) -> float:
    """Return the most work that can have been done, by passes that take no memory or fit into it.

    All that could be given back was. Of what takes memory, the passes with the most work for it come first; a queue's
    last may be unfinished. If all take the same, only whole passes fit.
    """
    room = memory + sum(row.gives * row.number for row in rows)
    amounts = {row.takes for row in rows if row.takes}
    if len(amounts) == 1 and room < inf:
        amount = amounts.pop()
        room = amount * floor(room / amount * (1 + ROUNDING))
    work, priced = 0.0, list[tuple[float, float]]()
    for row in rows:
        last = row.find_last_work(until)
        if not row.takes:
            work += max(0, row.number - 1) * row.time + last
        elif row.number:
            priced += [(-row.time / row.takes, (row.number - 1) * row.takes), (-last / row.takes, row.takes)]
    for price, amount in sorted(priced):
        work -= price * min(amount, room)
        room -= min(amount, room)
    return work


def add_idle(
    before: list[tuple[float, float]], after: list[tuple[float, float]], makespan: float
) -> tuple[float, float]:
    """Return the idle times at the start and at the end with the largest sum, in windows that a makespan has room for.

    Windows that fit into a lower bound on the makespan do not overlap.

    >>> add_idle([(1, 1), (5, 3)], [(2, 1), (4, 2)], makespan=8)
    (3, 1)
    """
    best, at = (0.0, 0.0), len(after)
    for time, idle in before:
        while at and time + after[at - 1][0] > makespan:
            at -= 1
        pair = idle, (after[at - 1][1] if at else 0.0)
        if time <= makespan and sum(pair) > sum(best):
            best = pair
    return best
