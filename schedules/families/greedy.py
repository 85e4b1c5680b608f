# SPDX-License-Identifier: Apache-2.0
"""Follow costs and memory: play all ranks in time by several rules, and keep the fastest order.

Idea (arXiv 2401.10241, section 3.1). Ranks run forwards ahead, then forwards and input halves in turn, and weight
halves whenever they would otherwise wait, or are out of memory. How far ranks run ahead, what they prefer, and whether
they wait for it is tried in several ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from schedules.arguments import is_number
from schedules.errors import SizeError
from schedules.families.one_forward_one_backward import one_f_one_b
from schedules.language.actions import Action
from schedules.language.placement import linear
from schedules.language.schedule import Limits, Schedule, schedule
from schedules.playing.costs import Costs, Sizes, require_stages
from schedules.playing.engine import find_makespan
from schedules.playing.play import Rule, play, prefer
from schedules.playing.problem import Problem
from schedules.transforms.split import split_backward


@lru_cache(maxsize=1)  # every rank asks for its own actions in turn
def _find_order(ranks: int, microbatches: int, memory: float, costs: Costs, residual: float) -> Schedule:
    """Return the fastest order of all rules, or 1F1B if that fits and none is faster."""
    costs = replace(costs, jitter=0.0)
    problem = Problem(costs, linear(ranks), microbatches, memory, Sizes(residual=residual))
    rules = list_rules(ranks, int(min(memory, microbatches)))
    plain = [split_backward(one_f_one_b(ranks, microbatches))] if min(ranks, microbatches) <= memory else []
    return min([play(problem, *rules), *plain], key=lambda one: find_makespan(one, costs))


def list_rules(ranks: int, full: int) -> list[Rule]:
    """Return the rules by which ranks are played, if each has room for so many microbatches when it is `full`.

    They differ in how far each rank runs ahead, which kind of pass it prefers, and how long it waits for that.
    """
    last = max(1, ranks - 1)
    ahead: list[list[float]] = [[each * (ranks - r) - each + 1 for r in range(ranks)] for each in (1, 2)]
    ahead += [[full - (full - least) * r / last for r in range(ranks)] for least in (1, (full + 1) / 2, full)]
    limits = sorted({tuple(max(1, min(full, round(most))) for most in row) for row in ahead})
    ways = (("FIW", 0.0), ("FIW", 0.5), ("FIW", 1.0), ("IFW", 1.0))
    return [Rule(prefer(kinds), patience, {"I": most}) for most in limits for kinds, patience in ways]


def _require_possible(ranks: int, microbatches: int, memory: float, costs: Costs, residual: float) -> None:
    if not is_number(memory) or not memory >= 1:
        raise SizeError.of("zb_auto", "memory", memory, "at least 1: one microbatch", "Choose memory >= 1.")
    if not isinstance(costs, Costs):
        raise SizeError.of("zb_auto", "costs", costs, "Costs to find an order for", "Pass Costs(F=1, I=1, W=1).")
    require_stages(costs, ranks)
    if not is_number(residual) or not 0 < residual <= 1:
        raise SizeError.of("zb_auto", "residual", residual, "a share above 0, at most 1", "Choose residual=1 for all.")


def _peak_memory(rank: int, ranks: int, microbatches: int, memory: float, costs: Costs, residual: float) -> float:
    return min(microbatches, memory / residual)


@schedule(placement=linear, limits=Limits(memory=_peak_memory), requires=_require_possible)
def zb_auto(
    rank: int, ranks: int, microbatches: int, memory: float = 8, costs: Costs = Costs(), residual: float = 0.5
) -> Iterator[Action]:
    """The fastest of several orders for these costs, within `memory` (arXiv 2401.10241, section 3.1: ZB-1p, ZB-2p).

    `memory` is in units of a rank's activations for one microbatch: `P` gives ZB-1p, `2P` gives ZB-2p. An input half
    frees all of its activations but the fraction `residual`. The order of any rank requires playing all ranks, so
    actions are not generated lazily: the first rank pays for all. Idle time has no formula; for ZB-2p with large `M` it
    is next to none. Peak memory, if activations are held up to the weight half: at most `min(memory / residual, M)`.

    >>> print(zb_auto(ranks=3, microbatches=4, memory=6))
    rank 0 |F0 F1 F2 F3 .  I0 W0 I1 W1 I2 W2 I3 W3 .  |
    rank 1 |.  F0 F1 .  I0 F2 I1 F3 I2 W0 I3 W1 W2 W3 |
    rank 2 |.  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3 |
    """
    return _find_order(ranks, microbatches, memory, costs, residual).actions(rank)
