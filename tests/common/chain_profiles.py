# SPDX-License-Identifier: Apache-2.0
"""Profiles of models that do not exist, chains of blocks with given times and sizes, and plans for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import combinations
from math import inf
from typing import Any

from fpipe.cutting.calls import Mark
from fpipe.planning.blocks import ModelBlock
from fpipe.planning.candidates import FACTORIES, Candidate, PlanProblem, ScheduleFactory
from fpipe.planning.choosing import PlanProgress, choose
from fpipe.planning.plan import Plan
from fpipe.planning.profile import Profile
from fpipe.planning.ranges import ActionTimes, Hop, Spread
from schedules import Link, SizeError


def chain_profile(
    forward: Sequence[float], weights: Sequence[int] | None = None, link: Link | None = None, fixed: float = 0.0
) -> Profile:
    """A chain of blocks: the halves of a backward take as long as the forward, and a block keeps 10 bytes, sends 4."""
    count = len(forward)
    numbers = range(count)
    weights = [8] * count if weights is None else weights
    made: dict[str, Any] = {
        "model": "Chain",
        "microbatch": "float32[4]",
        "backward": "by autograd",
        "device": "imagined",
        "blocks": tuple(ModelBlock(str(k), (Mark(str(k), 0, False),), 1, f"digest {k}") for k in numbers),
        "times": tuple(ActionTimes(f, 2 * f, f, f, f) for f in forward),
        "fixed": ActionTimes(*[fixed] * 5),
        "step": 0.0,
        "hops": tuple(Hop(k, k + 1, 4, 4) for k in range(count - 1)),
        "activation": tuple(Spread(10, (k,)) for k in numbers),
        "residual": tuple(Spread(5, (k,)) for k in numbers),
        "parameters": tuple(Spread(weights[k], (k,)) for k in numbers),
        "versions": (0,) * count,
        "link": Link() if link is None else link,
    }
    return Profile(**{one.name: made.get(one.name, ()) for one in fields(Profile)})


def problem_of(
    profile: Profile,
    ranks: int = 2,
    microbatches: int = 4,
    caps: float | tuple[float, ...] = inf,
    pinned: tuple[int, ...] = (),
    host: float = 0,
) -> PlanProblem:
    """The problem in which stages may begin at any block; a single cap is that of every rank."""
    caps = caps if isinstance(caps, tuple) else (caps,) * ranks
    return PlanProblem(profile, microbatches, caps, 1.0, frozenset(range(1, len(profile.blocks))), pinned, host)


def find_plan(
    profile: Profile,
    factories: Iterable[ScheduleFactory] = FACTORIES,
    *,
    report: Callable[[PlanProgress], None] = lambda progress: None,
    ordered: bool = False,
    **given: Any,
) -> Plan:
    """The plan that is chosen for a problem, `given` as to `problem_of`."""
    return choose([problem_of(profile, **given)], factories, seconds=60.0, report=report, ordered=ordered)


def by_hand(
    profile: Profile, factories: Iterable[ScheduleFactory], ranks: int, microbatches: int
) -> Iterator[Candidate]:
    """The predictions of all cuts of all schedules."""
    problem = problem_of(profile, ranks, microbatches)
    for factory in factories:
        try:
            how = factory(ranks, microbatches)
        except SizeError:
            continue
        for cuts in combinations(range(1, len(profile.blocks)), how.stages - 1):
            yield problem.try_out(how, cuts)
