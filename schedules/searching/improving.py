# SPDX-License-Identifier: Apache-2.0
"""Improve orders: move single passes along the critical path, or dispatch again with other priorities.

The makespan is the length of a chain of passes in which each waits for the one before: on the same rank, or for what it
made. A stretch of the chain on one rank is a block. Only a move that changes the order within a block can shorten the
chain (as in job shops: Nowicki and Smutnicki, Management Science 42, 1996). A pass that can't run where it goes takes
others along (`repairing`). Each move is played from the start. One that makes things a little worse may be kept, the
more seldom the worse (simulated annealing).
"""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING, NamedTuple

from schedules.playing.costs import ROUNDING
from schedules.playing.instance import Contender, Instance, Job, PassOrders
from schedules.searching.dispatching import Priorities, dispatch
from schedules.searching.repairing import free_early, put_off, take_late, untangle
from schedules.searching.timing import TimedOrders, read_priorities, time_orders

if TYPE_CHECKING:
    from random import Random


class CriticalBlock(NamedTuple):
    """Passes on the critical path, from position `first` to `last` of a rank."""

    rank: int
    first: int
    last: int


class Climb:
    """Orders on their way: where they are now, and the `best` so far."""

    def __init__(self, instance: Instance, contender: Contender, random: Random) -> None:
        self.instance, self.random, self.best = instance, random, contender
        self.orders = list(contender.orders)
        played = time_orders(instance, self.orders)
        assert played is not None, "contenders can be played"
        self.played, self.blocks = played, list[CriticalBlock]()

    def move(self, moves: int, warmth: float) -> None:
        """Make so many moves. One that makes the makespan worse by `warmth` is kept in one case of e."""
        for _ in range(moves):
            if not self.blocks:
                self.blocks = _find_blocks(self.instance, self.orders, self.played, self.random)
            if not self.blocks:
                return
            block = self.random.choice(self.blocks)
            order = self._rearrange(block)
            if order is not None and order != self.orders[block.rank]:
                self._try(block.rank, order, warmth)

    def _rearrange(self, block: CriticalBlock) -> list[Job] | None:
        """Return the order of a block's rank with one pass moved, and others with it if it can't run there alone."""
        order = self.orders[block.rank]
        source, target = _draw_move(block, self.random)
        moved = list(order)
        moved.insert(target, moved.pop(source))
        moved = _renumber(moved)
        fitting, way = put_off(self.instance, moved), self.random.random()
        if fitting == moved or way > 0.6:
            return fitting
        early = way < 0.3
        repaired = free_early(self.instance, moved, order[source][:2]) if early else take_late(self.instance, moved)
        return put_off(self.instance, repaired)

    def _try(self, rank: int, order: list[Job], warmth: float) -> None:
        orders = [order if r == rank else row for r, row in enumerate(self.orders)]
        played = time_orders(self.instance, orders)
        if played is None:
            orders = untangle(self.instance, orders, rank) or self.orders
            played = self.played if orders is self.orders else time_orders(self.instance, orders)
        if played is None or orders == self.orders or not self._is_kept(played.makespan, warmth):
            return
        self.orders, self.played, self.blocks = orders, played, []
        if played.makespan <= self.best.makespan:  # of equals the last: it lies further away
            self.best = Contender(played.makespan, orders, self.best.origin)

    def _is_kept(self, makespan: float, warmth: float) -> bool:
        worse = makespan - self.played.makespan
        return worse <= 0 or (warmth > 0 and self.random.random() < exp(-worse / warmth))


def _find_blocks(instance: Instance, orders: PassOrders, played: TimedOrders, random: Random) -> list[CriticalBlock]:
    """Return the blocks of two passes or more on a critical path."""
    ranks = [rank for rank, end in enumerate(played.ends) if end >= played.makespan * (1 - ROUNDING)]
    rank = random.choice(ranks)
    at = last = len(orders[rank]) - 1
    blocks = list[CriticalBlock]()
    while at >= 0:
        cause = played.awaited[rank][at]
        if cause is None and at:
            at -= 1
            continue
        if last > at:
            blocks.append(CriticalBlock(rank, at, last))
        if cause is None:
            break
        rank = instance.rank[cause[1]]
        at = last = orders[rank].index(cause)
    return blocks


def _draw_move(block: CriticalBlock, random: Random) -> tuple[int, int]:
    """Return where a pass of a block is and goes: to the block's front or end, anywhere in it, or by one place."""
    _, first, last = block
    choice = random.random()
    if choice < 0.4:
        source = random.randint(first + 1, last)
        return source, first if random.random() < 0.5 else random.randint(first, source - 1)
    if choice < 0.8:
        source = random.randint(first, last - 1)
        return source, last if random.random() < 0.5 else random.randint(source + 1, last)
    target = first if random.random() < 0.5 else last - 1
    return target + 1, target


def _renumber(order: list[Job]) -> list[Job]:
    """Return the order with the passes of each kind and stage numbered as they come."""
    seen = dict[tuple[int, int], int]()
    found = list[Job]()
    for kind, n, _ in order:
        k = seen[kind, n] = seen.get((kind, n), -1) + 1
        found.append((kind, n, k))
    return found


def shake(instance: Instance, contender: Contender, tries: int, random: Random) -> Contender:
    """Return the best orders of so many dispatches, each with other priorities around those of the best so far."""
    best = contender
    priorities = read_priorities(instance, best)
    for _ in range(tries):
        bent = _bend(instance, priorities, best.makespan, random)
        found = dispatch(instance, bent, best.origin, random.choice((0.0, 0.0, 0.0, 0.3, 0.7)), random.random() < 0.5)
        if found is not None and found.makespan <= best.makespan * (1 + ROUNDING):
            best = found
            priorities = read_priorities(instance, best)
    return best


def _bend(instance: Instance, priorities: Priorities, makespan: float, random: Random) -> Priorities:
    """Return priorities with noise: for a while, on one rank, for whole stages, or here and there."""
    period = instance.period
    noise = period * random.choice((0.05, 0.2, 0.5, 1.0, 2.0))
    begin = random.uniform(-period, makespan)
    end = begin + period * random.choice((1, 3, 10))
    somewhere, way = random.randrange(instance.ranks), random.randrange(4)

    def bend(value: float, n: int) -> float:
        chosen = (
            begin <= value <= end if way == 0 else instance.rank[n] == somewhere if way == 1 else random.random() < 0.1
        )
        return value + random.gauss(0, noise) if chosen else value

    if way == 3:
        shifted = [[(row, random.gauss(0, noise)) for row in kind] for kind in priorities]
        return [[[value + by for value in row] for row, by in kind] for kind in shifted]
    return [[sorted(bend(value, n) for value in row) for n, row in enumerate(kind)] for kind in priorities]
