# SPDX-License-Identifier: Apache-2.0
"""Time the actions of a model cut into stages, in one process.

Problem. Most blocks are too small to be timed alone, and what happens between two actions takes time as well:
transfers, turns of the ranks, calls of functions.

Idea. Run them as stages of a real pipeline, with the executor and the transport of a step. One action runs at a time,
so the time from the end of one to the end of the next is the time of the latter, with all that it took to begin it. The
model is cut in three ways: everywhere, into a few stages, and not at all. All are timed in turn, so that other work on
the machine disturbs them equally. Each time is the median over turns, and over blocks that compute the same.

An action of a stage costs a fixed time, plus that of its blocks. The fixed time is what one more of a few stages
takes; blocks share what the uncut model takes in proportion to their own times. So the times add up to what was
measured of the uncut model, and are right for as many stages as are common.

Two microbatches are in flight at once, so every other action is of the same stage as the one before it: in between of
schedules that run many in a row, and of those that never do. The first two do not count: they add their gradients to no
others.

Runs when a model is profiled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fpipe.collector import postpone_collection
from fpipe.network.ranks import Ranks
from fpipe.network.recording import run_recorded
from fpipe.pipelines.inputs import State, feed, make_keys
from fpipe.pipelines.step_plan import StepPlan
from fpipe.planning.ranges import TIMED, ActionTimes
from fpipe.record.captured import Tensors
from fpipe.runtime.executor import Inputs
from fpipe.tensors.random import preserve_generators
from schedules import Action, B, C, F, I, Placement, R, Span, W, schedule

FEWEST_TURNS, MOST_TURNS, WARM_UP = 2, 50, 1
Samples: TypeAlias = dict[tuple[str, int], list[float]]
"""Seconds that actions took, by kind and stage."""


def alternating(ranks: int, stages: int = 2) -> Placement:
    """Return the placement of any number of stages on ranks in turn.

    >>> alternating(ranks=2, stages=3).homes
    (0, 1, 0)
    """
    return Placement(ranks, tuple(s % ranks for s in range(stages)))


@schedule(placement=alternating)
def two_at_a_time(rank: int, ranks: int, microbatches: int, stages: int) -> Iterator[Action]:
    """Run two microbatches after the other two: backwards whole, then in halves, then of checkpointed forwards.

    >>> how = two_at_a_time(ranks=1, microbatches=8, stages=1)
    >>> print(*[action for action in how.actions(0) if action.microbatch % 2])
    0F1 0B1 0F3 0B3 0F5 0I5 0W5 0C7 0R7 0B7
    """
    mine = range(rank, stages, ranks)
    for first in range(0, microbatches, 2):
        pair, turn = (first, first + 1), first // 2 - 1
        yield from (C(s, i) if turn == 2 else F(s, i) for s in mine for i in pair)
        for s in reversed(mine):
            for i in pair:
                if turn == 2:
                    yield R(s, i)
                yield I(s, i) if turn == 1 else B(s, i)
        yield from (W(s, i) for s in reversed(mine) for i in pair if turn == 1)


MICROBATCHES: Final = 8
UNCOUNTED: Final = 2


class TimedPlan(NamedTuple):
    """A plan of `two_at_a_time` in one process, and the arguments of its stages."""

    plan: StepPlan
    inputs: Inputs

    @classmethod
    def of(cls, plan: StepPlan, params: State, buffers: State, leaves: Mapping[int, Tensor]) -> TimedPlan:
        """Return the subject for these values; `leaves` are those of the batch's first microbatch, by number."""
        stages = plan.assembly.stages
        weights = {stage.index: stage.leaves(params) for stage in stages}
        held = {stage.index: tuple([buffers[name] for name in stage.buffers]) for stage in stages}
        feeds = [feed(stage, {leaf: [leaves[leaf]] for leaf in stage.batch}, buffers) for stage in stages]

        def batch(stage: int, microbatch: int) -> Tensors:
            return feeds[stage](0)

        return cls(plan, Inputs([weights] * MICROBATCHES, [held] * MICROBATCHES, batch, make_keys(plan, seed=0)))

    def run(self, device: torch.device) -> Iterator[tuple[Action, float]]:
        """Run it once; yield each action that counts, with the seconds that it took."""
        spans: list[Span] = []
        with preserve_generators(self.plan.generators), self.plan.context():
            programs = self.plan.timed_programs, self.inputs
            run_recorded(Ranks(len(self.plan.ranks)), [programs], device, spans.append)
        actions = sorted((span for span in spans if not span.waits), key=lambda span: span.end)
        for before, span in pairwise(actions):
            if span.action.microbatch >= UNCOUNTED:
                yield span.action, span.end - before.end


def time_actions(subjects: Sequence[TimedPlan], device: torch.device, seconds: float) -> list[Samples]:
    """Return how long the actions of each subject took, in turns that last about so many `seconds` in all."""
    found: list[Samples] = [defaultdict(list) for _ in subjects]
    begin = perf_counter()
    with postpone_collection():
        for turn in range(WARM_UP + MOST_TURNS):
            for subject, samples in zip(subjects, found, strict=True):
                for action, took in subject.run(device):
                    if turn >= WARM_UP:
                        samples[action.kind, action.stage].append(took)
            if turn + 1 >= WARM_UP + FEWEST_TURNS and perf_counter() - begin > seconds:
                break
    return found


def fit_times(
    whole: Samples, few: Samples, blocks: Samples, alike: Sequence[Hashable]
) -> tuple[tuple[ActionTimes, ...], ActionTimes]:
    """Return the times of each block, and the fixed time of an action in any stage.

    The samples are those of the uncut model, of a few stages, and of the blocks as stages. Blocks with equal entries in
    `alike` compute the same. A kind of action that was not sampled takes no time.

    >>> whole, few = {("F", 0): [8.0]}, {("F", 0): [4.5, 4.5, 7.0], ("F", 1): [4.5]}
    >>> blocks = {("F", 0): [3.0], ("F", 1): [3.0, 9.0, 3.0], ("F", 2): [4.0]}
    >>> times, fixed = fit_times(whole, few, blocks, "aab")
    >>> fixed.F, [one.F for one in times]
    (1.0, [2.0, 2.0, 3.0])
    """
    columns, fixed = [], []
    for kind in TIMED:
        levels = [[median(found) for (k, _), found in samples.items() if k == kind] for samples in (whole, few, blocks)]
        total = sum(levels[0])
        each = _pool({s: found for (k, s), found in blocks.items() if k == kind}, alike)
        extra = _slope(total, levels[1])
        beyond = [max(0.0, one - _slope(total, levels[2])) for one in each]
        scale = (total - extra) / sum(beyond) if sum(beyond) else 0.0
        fixed.append(extra)
        columns.append([one * scale for one in beyond])
    return tuple(ActionTimes(*row) for row in zip(*columns, strict=True)), ActionTimes(*fixed)


def _pool(samples: Mapping[int, Sequence[float]], alike: Sequence[Hashable]) -> list[float]:
    """Return the median time of each block, over all blocks that compute the same."""
    pools = defaultdict[Hashable, list[float]](list)
    for s, found in samples.items():
        pools[alike[s]] += found
    medians = {same: median(found) for same, found in pools.items()}
    return [medians.get(same, 0.0) for same in alike]


def _slope(whole: float, stages: Sequence[float]) -> float:
    """Return how much longer actions of the uncut model take for each more stage; at most what it takes itself."""
    return min(max(0.0, sum(stages) - whole) / max(1, len(stages) - 1), whole)
