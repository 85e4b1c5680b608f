# SPDX-License-Identifier: Apache-2.0
"""Orders by rule: every microbatch wants to run like the first one, one period later than the one before.

The time at which a pass would run if its microbatch were alone, plus so many periods, is its priority. A few numbers
bend that: how soon backwards and weight halves become urgent, and how far ranks run ahead. `draw_rule` finds them by
chance, `vary_rule` changes those that were good.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from schedules.analysis.bounds.rough import time_chain
from schedules.playing.instance import Contender, Instance
from schedules.searching.dispatching import Priorities, dispatch

if TYPE_CHECKING:
    from random import Random


@dataclass(frozen=True)
class PriorityRule:
    """A rule for priorities.

    - `stretch`: how much slower a microbatch runs than alone, and `ahead`: the same for forwards only.
    - `backward`, `weight`: periods by which input halves and weight halves are put off; negative if preferred.
    - `noise`: the deviation of a random time that is added for each stage and kind, in periods.
    - `patience`, `cautious`: as in `dispatch`.
    """

    stretch: float
    ahead: float
    backward: float
    weight: float
    noise: float
    patience: float
    cautious: bool


def draw_rule(random: Random) -> PriorityRule:
    """Return a rule drawn at random."""
    return PriorityRule(
        stretch=random.choice((0.5, 0.8, 1.0, 1.0, 1.2)),
        ahead=random.choice((0.5, 1.0, 1.0, 2.0)),
        backward=random.choice((-1.0, -0.5, 0.0, 0.0, 1.0, 2.0, 4.0)),
        weight=random.choice((0.0, 0.3, 1.0, 2.0, 4.0)),
        noise=random.choice((0.0, 0.0, 0.1, 0.3)),
        patience=random.choice((0.0, 0.0, 0.3, 0.6, 0.9)),
        cautious=random.random() < 0.5,
    )


def vary_rule(rule: PriorityRule, random: Random) -> PriorityRule:
    """Return a rule a little different from this one."""
    return replace(
        rule,
        stretch=rule.stretch * (1 + random.gauss(0, 0.1)),
        ahead=rule.ahead * (1 + random.gauss(0, 0.1)),
        backward=rule.backward + random.gauss(0, 0.3),
        weight=rule.weight + random.gauss(0, 0.2),
        noise=random.choice((0.0, 0.0, 0.1, 0.3)),
        patience=min(0.99, max(0.0, rule.patience * (1 + random.gauss(0, 0.1)))),
    )


def follow(instance: Instance, rule: PriorityRule, random: Random) -> Contender | None:
    """Return the orders that a rule gives, or `None` if they run out of memory."""
    period, alone = instance.period, time_chain(instance.problem)
    kinds: list[list[float]] = [[], [], []]
    for n, halves in enumerate(instance.times[1]):
        start = rule.stretch * rule.ahead * alone.forward[n]
        back = start + rule.stretch * (alone.input_half[n] - alone.forward[n]) + rule.backward * period
        for kind, time in enumerate((start, back, back + halves + rule.weight * period)):
            kinds[kind].append(time + random.gauss(0, rule.noise * period))
    return dispatch(instance, repeat_times(instance, kinds), "rules", rule.patience, rule.cautious)


def repeat_times(instance: Instance, times: list[list[float]]) -> Priorities:
    """Return the times of all microbatches, given those of the first on each stage, by kind: a period apart."""
    apart = [instance.period * instance.microbatches / count for count in instance.counts]
    return [[[time + k * apart[n] for k in range(instance.counts[n])] for n, time in enumerate(row)] for row in times]
