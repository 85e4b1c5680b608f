# SPDX-License-Identifier: Apache-2.0
"""Time the actions of a model cut into stages, in one process, and fit links to measured transfers.

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

If microbatches are cut into slices, an action of a microbatch takes as long as those of its slices do in all. What part
of it each slice takes is that of the uncut model.

Runs when a model is profiled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import exp, inf, log
from statistics import fmean, median
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
from schedules import Action, B, C, F, I, Link, Placement, R, Span, W, schedule

MESSAGE_SIZES: Final = (2**10, 2**14, 2**18, 2**22)
UNLIKE: Final = 1.1
"""Two ranks whose transfers take this factor longer, or shorter, than those of the median pair are noted."""
FEWEST_TURNS, MOST_TURNS, WARM_UP = 2, 50, 1
Samples: TypeAlias = dict[tuple[str, int], list[float]]
"""Seconds that actions took, by kind and stage."""
SliceSamples: TypeAlias = dict[int, Samples]
"""The same for each slice of a microbatch."""


def alternating(ranks: int, stages: int = 2) -> Placement:
    """Return the placement of any number of stages on ranks in turn.

    >>> alternating(ranks=2, stages=3).homes
    (0, 1, 0)
    """
    return Placement(ranks, tuple(s % ranks for s in range(stages)))


@schedule(placement=alternating)
def two_at_a_time(rank: int, ranks: int, microbatches: int, stages: int, slices: int = 1) -> Iterator[Action]:
    """Run two microbatches after the other two: backwards whole, then in halves, then of checkpointed forwards.

    >>> how = two_at_a_time(ranks=1, microbatches=8, stages=1)
    >>> print(*[action for action in how.actions(0) if action.microbatch % 2])
    0F1 0B1 0F3 0B3 0F5 0I5 0W5 0C7 0R7 0B7
    """
    mine, parts = range(rank, stages, ranks), range(slices) if slices > 1 else [None]
    for first in range(0, microbatches, 2):
        pair, turn = (first, first + 1), first // 2 - 1
        yield from (C(s, i, k) if turn == 2 else F(s, i, k) for s in mine for i in pair for k in parts)
        back = [(s, [(i, k) for i in pair for k in reversed(parts)]) for s in reversed(mine)]
        for s, units in back:
            for i, k in units:
                if turn == 2:
                    yield R(s, i, k)
                yield I(s, i, k) if turn == 1 else B(s, i, k)
        yield from (W(s, i, k) for s, units in back for i, k in units if turn == 1)


MICROBATCHES: Final = 8
UNCOUNTED: Final = 2


class TimedPlan(NamedTuple):
    """A plan of `two_at_a_time` in one process, and the arguments of its stages."""

    plan: StepPlan
    inputs: Inputs

    @classmethod
    def of(cls, plan: StepPlan, params: State, buffers: State, leaves: Mapping[int, Tensor]) -> TimedPlan:
        """Return the subject for these values; `leaves` are those of the batch's first microbatch, by number."""
        slices = [cut.stages for cut in plan.assemblies[: plan.slices]]
        weights = [{stage.index: stage.leaves(params) for stage in stages} for stages in slices]
        held = {stage.index: tuple([buffers[name] for name in stage.buffers]) for stage in plan.assembly.stages}
        feeds = [
            [feed(stage, {leaf: [leaves[leaf]] for leaf in stage.batch}, buffers) for stage in stages]
            for stages in slices
        ]

        def batch(stage: int, unit: int) -> Tensors:
            return feeds[unit % len(feeds)][stage](0)

        keys, units = make_keys(plan, seed=0), len(plan.assemblies)
        return cls(plan, Inputs(weights * MICROBATCHES, [held] * units, batch, keys))

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


def time_actions(subjects: Sequence[TimedPlan], device: torch.device, seconds: float) -> list[SliceSamples]:
    """Return how long the actions of each subject took, in turns that last about so many `seconds` in all."""
    found: list[SliceSamples] = [defaultdict(lambda: defaultdict(list)) for _ in subjects]
    begin = perf_counter()
    with postpone_collection():
        for turn in range(WARM_UP + MOST_TURNS):
            for subject, samples in zip(subjects, found, strict=True):
                for action, took in subject.run(device):
                    if turn >= WARM_UP:
                        samples[action.slice or 0][action.kind, action.stage].append(took)
            if turn + 1 >= WARM_UP + FEWEST_TURNS and perf_counter() - begin > seconds:
                break
    return found


def sum_slices(samples: SliceSamples) -> Samples:
    """Return the samples of whole microbatches: the sums of the shortest of each slice, of the next ones, and so on.

    >>> sum_slices({0: {("F", 0): [2.0, 1.0]}, 1: {("F", 0): [3.0, 4.0]}})
    {('F', 0): [4.0, 6.0]}
    """
    rows = {key: zip(*[sorted(one[key]) for one in samples.values()], strict=True) for key in samples[0]}
    return {key: [sum(parts) for parts in row] for key, row in rows.items()}


def time_slices(whole: SliceSamples) -> tuple[float, ...]:
    """Return the seconds that each slice takes in the uncut model, forward and backward; nothing for a single one.

    >>> time_slices({0: {("F", 0): [1.0, 2.0, 3.0], ("B", 0): [5.0]}, 1: {("F", 0): [4.0], ("B", 0): [8.0]}})
    (7.0, 12.0)
    """
    times = [sum(median(one[kind, 0]) for kind in "FB") for _, one in sorted(whole.items())]
    return tuple(times) if len(times) > 1 else ()


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


def fit_link(rows: Tensor) -> Link:
    """Return the link for measured transfers: rows of sender, receiver, bytes and seconds. Without any, it is instant.

    A transfer takes `latency + bytes / bandwidth`. Both are those of the median pair of ranks. Pairs that take clearly
    longer or shorter are noted with the factor by which they do.

    >>> import torch
    >>> rows = [(0, 1, size, 2.0 + size / 8) for size in (8, 64)] + [(1, 0, size, 2.0 + size / 8) for size in (8, 64)]
    >>> link = fit_link(torch.tensor([*rows, (0, 2, 8, 9.0), (0, 2, 64, 30.0)]))
    >>> round(link.latency, 6), round(link.bandwidth, 6), [(ends, round(factor, 6)) for ends, factor in link.slow]
    (2.0, 8.0, [((0, 2), 3.0)])
    """
    pairs = defaultdict[tuple[int, int], list[tuple[float, float]]](list)
    for source, target, size, seconds in rows.tolist():
        pairs[int(source), int(target)].append((size, seconds))
    if not pairs:
        return Link()
    fits = [fit_line(transfers) for transfers in pairs.values()]
    latency, per_byte = (median(column) for column in zip(*fits, strict=True))
    factors = {ends: _factor(transfers, latency, per_byte) for ends, transfers in sorted(pairs.items())}
    slow = tuple((ends, one) for ends, one in factors.items() if max(one, 1 / one) > UNLIKE)
    return Link(latency, 1 / per_byte if per_byte else inf, slow=slow)


def fit_line(transfers: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the latency and the seconds per byte with the least relative error; neither is negative.

    >>> [round(number, 6) for number in fit_line([(0, 3.0), (10, 8.0)])]
    [3.0, 0.5]
    >>> fit_line([(1, 1.0), (10, 0.5)])[1]
    0.0
    """
    weights = [1 / seconds**2 for _, seconds in transfers]
    total = sum(weights)
    size, time = (sum(w * one[k] for w, one in zip(weights, transfers, strict=True)) / total for k in (0, 1))
    spread = sum(w * (one[0] - size) ** 2 for w, one in zip(weights, transfers, strict=True))
    slope = sum(w * (one[0] - size) * (one[1] - time) for w, one in zip(weights, transfers, strict=True))
    per_byte = max(0.0, slope / spread) if spread else 0.0
    if time < per_byte * size:
        return 0.0, time / size
    return time - per_byte * size, per_byte


def _factor(transfers: Sequence[tuple[float, float]], latency: float, per_byte: float) -> float:
    """Return by which factor transfers take longer than usual, in the geometric mean over sizes."""
    return exp(fmean(log(max(seconds, 1e-12) / max(latency + size * per_byte, 1e-12)) for size, seconds in transfers))
