# SPDX-License-Identifier: Apache-2.0
"""Repair orders that a move broke, and keep the move where that is possible.

A moved pass may need more memory than there is, may come before what it needs, or may make ranks wait for each other.
If all such moves were refused, or undone by putting the pass off again, good orders would stay out of reach: in little
memory, hardly any pass can move alone. So others move with it:

- passes that free memory come earlier (`free_early`), or forwards that would take it come later (`take_late`);
- passes that still can't run are put off until they can (`put_off`);
- on other ranks, the passes that the moved one waits for run out of turn (`untangle`).
"""

from __future__ import annotations

from collections.abc import Iterator

from schedules.playing.instance import FORWARD, INPUT_HALF, Instance, Job, PassOrders


def put_off(instance: Instance, order: list[Job]) -> list[Job] | None:
    """Return the order of a rank with each pass that can't run yet put off until it can; `None` if some never can.

    A forward waits for memory, and a half for the pass before it. So a move that would need more memory than there is
    takes the passes along that free it.
    """
    rank, left, at = RankMemory(instance), list(order), 0
    while at < len(left):
        if rank.can_run(left[at]):
            rank.run(left.pop(at))
            at = 0
        else:
            at += 1
    return None if left else rank.order


def free_early(instance: Instance, order: list[Job], spared: tuple[int, int]) -> list[Job]:
    """Return the order of a rank with passes that free memory brought forward to where a forward would wait for it.

    Passes of the `spared` kind and stage stay where they are.
    """
    rank, left = RankMemory(instance), list(order)
    while left:
        at = 0
        if left[0][0] == FORWARD and not rank.can_run(left[0]):
            halves = (
                (instance.growth[kind][n] >= 0, j)
                for j, (kind, n, k) in enumerate(left)
                if kind != FORWARD and rank.done[kind][n] == k < rank.done[kind - 1][n] and (kind, n) != spared
            )
            at = min(halves, default=(False, 0))[1]
        rank.run(left.pop(at))
    return rank.order


def take_late(instance: Instance, order: list[Job]) -> list[Job]:
    """Return the order of a rank with forwards put off that would take the memory of a later one."""
    rank, left, kept = RankMemory(instance), list(order), set[Job]()
    while left:
        one = left[0]
        taker = None if one[0] != FORWARD or rank.can_run(one) else rank.find_taker(one, kept)
        if taker is None:
            rank.run(left.pop(0))
        else:
            kept.add(one)
            rank.take_back(taker)
            left.insert(1, taker)
    return rank.order


class RankMemory:
    """A rank that has run some passes in `order`: their number in `done`, per kind and stage, and what it holds."""

    def __init__(self, instance: Instance) -> None:
        self.instance, self.order, self.held = instance, list[Job](), 0.0
        self.done = [[0] * len(instance.rank) for _ in range(3)]

    def run(self, job: Job) -> None:
        """Run a pass."""
        kind, n, _ = job
        self.order.append(job)
        self.done[kind][n] += 1
        self.held += self.instance.growth[kind][n]

    def take_back(self, job: Job) -> None:
        """Undo a forward that nothing came after on its stage."""
        kind, n, _ = job
        self.order.remove(job)
        self.done[kind][n] -= 1
        self.held -= self.instance.growth[kind][n]

    def can_run(self, job: Job) -> bool:
        """Return whether there is room for a forward, or the pass before a half has run."""
        kind, n, k = job
        return self.instance.has_room(n, self.held, self.done) if kind == FORWARD else self.done[kind - 1][n] > k

    def find_taker(self, job: Job, kept: set[Job]) -> Job | None:
        """Return the last forward that has run of another stage and microbatch, which has not gone on since."""
        row = self.instance.on[self.instance.rank[job[1]]]
        for one in reversed(self.order):
            kind, n, k = one
            if kind != FORWARD or n == job[1] or k == job[2] or one in kept or self.done[FORWARD][n] != k + 1:
                continue
            if all(self.done[FORWARD][m] <= k for m in row[row.index(n) + 1 :]) and self.done[INPUT_HALF][n] <= k:
                return one
        return None


def untangle(instance: Instance, orders: PassOrders, rank: int) -> PassOrders | None:
    """Return orders in which ranks do not wait for each other; what `rank` waits for runs out of turn elsewhere.

    Return `None` if memory runs out, as it may in a graph with skips.
    """
    tangle = Tangle(instance, orders)
    while any(tangle.left):
        if not tangle.advance():
            job = tangle.find_cause(rank if tangle.left[rank] else next(r for r, row in enumerate(tangle.left) if row))
            if job is None:
                return None
            tangle.run(job)
    return tangle.orders


class Tangle:
    """Orders that are run without times: what is `left` of them, the passes `done`, and the `orders` they ran in."""

    def __init__(self, instance: Instance, orders: PassOrders) -> None:
        self.instance, self.left = instance, [list(order) for order in orders]
        self.orders: PassOrders = [[] for _ in orders]
        self.done = [[0] * len(instance.rank) for _ in range(3)]
        self.held = [0.0] * instance.ranks

    def advance(self) -> bool:
        """Run each rank as far as it gets in its order; return whether any pass ran."""
        before = sum(map(len, self.left))
        for row in self.left:
            while row and self.can_run(row[0]):
                self.run(row[0])
        return sum(map(len, self.left)) < before

    def can_run(self, job: Job) -> bool:
        """Return whether a pass has its inputs and its memory."""
        return self._find_missing(job) is None and self._fits(job)

    def run(self, job: Job) -> None:
        """Run a pass now."""
        kind, n, _ = job
        rank = self.instance.rank[n]
        self.left[rank].remove(job)
        self.orders[rank].append(job)
        self.done[kind][n] += 1
        self.held[rank] += self.instance.growth[kind][n]

    def find_cause(self, rank: int) -> Job | None:
        """Return a pass that can run, and that the next one of a rank waits for, directly or not."""
        job, seen = self.left[rank][0], set[Job]()
        while job not in seen:
            seen.add(job)
            missing = self._find_missing(job)
            if missing is None and self._fits(job):
                return job
            job = missing or next(self._list_halves(self.instance.rank[job[1]]), job)
        return next((one for row in self.left for one in row if self.can_run(one)), None)

    def _fits(self, job: Job) -> bool:
        kind, n, _ = job
        return kind != FORWARD or self.instance.has_room(n, self.held[self.instance.rank[n]], self.done)

    def _find_missing(self, job: Job) -> Job | None:
        """Return a pass that comes before another and has not run."""
        kind, n, k = job
        if self.done[kind][n] < k:
            return kind, n, self.done[kind][n]
        if kind and self.done[kind - 1][n] <= k:
            return kind - 1, n, k
        return next(((kind, m, k) for m, _ in self.instance.needs[kind][n] if self.done[kind][m] <= k), None)

    def _list_halves(self, rank: int) -> Iterator[Job]:
        return (job for job in self.left[rank] if job[0] != FORWARD)
