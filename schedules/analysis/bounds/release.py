# SPDX-License-Identifier: Apache-2.0
"""The memory that must be given back before a pass can take more, and the least work that takes.

A pass that takes memory needs room. Some passes have ended before it in every schedule, and what they took but did not
give back may be more than the room. Then other passes must give the rest back, and which ones is the schedule's choice:
on a rank with several stages, those of any. A bound takes the choice that costs the least.

What a microbatch took on a stage comes back in one step or two: forward in time at the ends of its input half and of
its weight half; backward in time, all at the end of its forward. An `Offer` is the last of these steps, `high`, with
the input half before it, `low`, if that is another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import NamedTuple, TypeAlias

from schedules.analysis.bounds.network import Hold, QueueNetwork
from schedules.playing.costs import ROUNDING

Heads: TypeAlias = list[list[float]]
"""Per queue, lower bounds on the starts of its passes, as far as they are known."""


class Repayment(NamedTuple):
    """Passes of a queue that give memory back: `done` of them have; `gives` of `(n, amount)`: each below `n` does."""

    queue: int
    done: int
    gives: tuple[tuple[int, float], ...]


class Offer(NamedTuple):
    """The repayments of one stage: the last, and the one before it if there are two."""

    low: Repayment | None
    high: Repayment


@dataclass(frozen=True)
class RepaymentLags:
    """The passes of a queue that have ended when a pass of another starts, as a lag behind it.

    `gives` are the amounts that each gives back, with the lag of what took them. `before` is true if that other pass
    comes before the queue's pass of the same microbatch.
    """

    queue: int
    lag: float
    gives: tuple[tuple[float, float], ...]
    before: bool

    def at(self, k: int) -> Repayment:
        """Return the repayment when pass `k` starts."""
        most = k if self.before else k + 1
        gives = ((min(most, _count(k, lag)), amount) for lag, amount in self.gives)
        return Repayment(self.queue, _count(k, self.lag), tuple(gives))


def _count(k: int, lag: float) -> int:
    return k + 1 - int(lag) if lag <= k else 0


@dataclass(frozen=True)
class Demand:
    """The memory that a queue's passes must wait for: `room` is the rank's, `holds` the lags and amounts of its holds.

    `offers` are the repayments of each stage on the rank, `low` and `high`.
    """

    room: float
    holds: tuple[tuple[float, float], ...]
    offers: tuple[tuple[RepaymentLags | None, RepaymentLags], ...]

    @property
    def slack(self) -> float:
        """The amount that may be missing: sums of sizes are not exact."""
        return self.room * ROUNDING

    def at(self, k: int) -> tuple[float, list[Offer]]:
        """Return how much must be given back before pass `k` starts, besides what certainly was, and by whom.

        With at least `n` passes of `t` started and `m` passes of `g` ended, a hold of `amount` from `t` to `g` holds
        `amount (n - min(m, n))` at least: `m` is never larger than the number of passes of `t`.
        """
        need = sum(amount * _count(k, lag) for lag, amount in self.holds) - self.room
        if need <= self.slack:
            return 0.0, []
        offers = list[Offer]()
        for low, high in self.offers:
            offer = Offer(None if low is None else low.at(k), high.at(k))
            offers.append(offer)
            for step in offer:
                if step is not None:
                    need -= sum(amount * min(step.done, n) for n, amount in step.gives)
        return (need, offers) if need > self.slack else (0.0, [])


def find_demand(network: QueueNetwork, c: int, lags: dict[int, int]) -> Demand | None:
    """Return what the passes of `c` must wait for, or `None` if they take no memory, or their rank has no limit."""
    rank = network.queues[c].rank
    holds = [hold for hold in network.holds if network.queues[hold.taker].rank == rank]
    if network.memory[rank] == inf or all(hold.taker != c for hold in holds):
        return None
    started = {**lags, c: 0}
    stages = dict.fromkeys(network.queues[hold.taker].stage for hold in holds)
    offers = (_find_offer(network, c, lags, [h for h in holds if network.queues[h.taker].stage == s]) for s in stages)
    takes = tuple((started.get(hold.taker, inf), hold.amount) for hold in holds)
    return Demand(network.memory[rank], takes, tuple(offers))


def _find_offer(
    network: QueueNetwork, c: int, lags: dict[int, int], holds: list[Hold]
) -> tuple[RepaymentLags | None, RepaymentLags]:
    """Return the repayments of one stage's holds: the last, and that of an input half before it."""
    queues, givers = network.queues, {hold.giver for hold in holds}
    high = next(g for g in givers if not any(g in network.earlier[other] for other in givers))
    halves = (u for u, _ in queues[high].waits if queues[u].kind == "I" and queues[u].stage == queues[high].stage)
    low = next(halves, None)

    def step(queue: int) -> RepaymentLags:
        gives = ((0 if h.taker == c else lags.get(h.taker, inf), h.amount) for h in holds if h.giver == queue)
        return RepaymentLags(queue, lags.get(queue, inf), tuple(gives), c in network.earlier[queue])

    return (None if low is None else step(low)), step(high)


def find_release(offers: list[Offer], need: float, slack: float, heads: Heads, times: list[float]) -> float:
    """Return the least time at which enough passes can have ended that give back `need` less `slack`, were they alone.

    Both functions stop at the `slack` of the `Demand`: rounding must not make a pass wait for one more.
    """
    ends = list[tuple[float, float]]()
    for step in (step for offer in offers for step in offer if step is not None):
        starts, time = heads[step.queue], times[step.queue]
        for n, amount in step.gives:
            known = min(n, len(starts))
            ends += [(starts[j] + time, amount) for j in range(step.done, known)]
            ends += [(0.0, amount)] * (n - max(known, step.done))
    ends.sort()
    for end, amount in ends:
        need -= amount
        if need <= slack:
            return end
    return inf


def find_least_work(
    offers: list[Offer], need: float, slack: float, heads: Heads, times: list[float], start: float
) -> float:
    """Return the least time of passes that cannot start before `start` and must end to give back `need`, up to `slack`.

    Passes that can start earlier are free. A `high` gives its amounts for its own time, plus that of its `low` unless
    that is free, too; a `low` may do so alone. Filling the need in the order of time per amount, with a fraction of the
    last, costs no more than any choice of passes.
    """
    prices = list[tuple[float, float]]()
    for low, high in offers:
        high_free = _count_free(high, heads, start)
        low_free = inf if low is None else _count_free(low, heads, start)
        for step, free in ((low, low_free), (high, high_free)):
            if step is not None:
                need -= sum(amount * (min(n, free) - min(n, step.done)) for n, amount in step.gives)
        prices += _list_prices(low, high, (low_free, high_free), times)
    cost = 0.0
    for price, amount in sorted(prices):
        if need <= slack:
            break
        cost += price * min(amount, need)
        need -= amount
    return cost


def _count_free(step: Repayment, heads: Heads, start: float) -> float:
    """Return the number of passes that may have started before `start`; those not known yet may have, too."""
    starts = heads[step.queue]
    found = bisect_left(starts, start)
    return max(step.done, found) if found < len(starts) else inf


def _list_prices(
    low: Repayment | None, high: Repayment, free: tuple[float, float], times: list[float]
) -> Iterator[tuple[float, float]]:
    """Yield prices, times per amount, and the amounts that they are paid for, of microbatches that are not free.

    Microbatches between two marks are alike. If the input half alone gives more for its time than both, it goes first.
    """
    low_free, high_free = free
    low_gives = low.gives if low is not None else ()
    limits = {float(n) for n, _ in (*high.gives, *low_gives)}
    top = max(limits)
    marks = sorted(mark for mark in {high_free, low_free, *limits} if high_free <= mark <= top)
    for begin, end in pairwise(marks):
        after, before = sum(a for n, a in high.gives if n >= end), sum(a for n, a in low_gives if n >= end)
        if low is None or begin < low_free:
            parts = [(times[high.queue], after)]
        elif before * times[high.queue] >= after * times[low.queue]:
            parts = [(times[low.queue], before), (times[high.queue], after)]
        else:
            parts = [(times[low.queue] + times[high.queue], before + after)]
        yield from ((time / amount, amount * (end - begin)) for time, amount in parts if amount)
