# SPDX-License-Identifier: Apache-2.0
"""A model that is cut everywhere: its blocks, their times, and their memory.

What each block keeps is found on fake tensors, once for all blocks that compute the same; so are its times, if the
model is not run.

Runs when a model is profiled.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch

from fpipe.cutting.partition import Cuts, Evenly
from fpipe.cutting.places import find_places
from fpipe.errors import CutError
from fpipe.network.ranks import wait_for_turn
from fpipe.pipelines.batch import SplitBatch
from fpipe.pipelines.footprint import run_on_fakes
from fpipe.pipelines.inputs import State
from fpipe.pipelines.planner import Planner
from fpipe.pipelines.step_plan import StepPlan
from fpipe.planning.blocks import ModelBlock, find_blocks
from fpipe.planning.holdings import StageHolding, find_holdings
from fpipe.planning.ranges import ActionTimes
from fpipe.planning.recutting import captured_for, plan_cut
from fpipe.planning.roofline import Roofline, estimate_times
from fpipe.planning.timing import MICROBATCHES, TimedPlan, fit_times, time_actions, two_at_a_time
from fpipe.record.captured import Captured
from fpipe.record.fakes.eager_types import hide_fakes
from fpipe.record.variant import Variant
from fpipe.stages.stage import Stage

FEW_STAGES: Final = 4
MOST_PLACES: Final = 256
NO_TIMES: Final = ActionTimes(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, eq=False)
class CutModel:
    """A captured model, cut everywhere where it may be.

    - `planner`: plans other cuts of it; `variant` and `batch`: what it was captured for.
    - `places`: the positions of units before which blocks after the first begin.
    - `finest`: the plan in which each block is a stage; `blocks`: what they are.
    """

    planner: Planner
    variant: Variant
    batch: SplitBatch
    captured: Captured
    places: tuple[int, ...]
    finest: StepPlan
    blocks: tuple[ModelBlock, ...]

    @classmethod
    def of(cls, planner: Planner, variant: Variant, batch: SplitBatch, cuts: Cuts) -> CutModel:
        """Return the model that `planner` has captured for such a batch, cut wherever `cuts` allow."""
        captured, model = captured_for(planner, variant, batch.signature), planner.captures.model
        places = find_places(captured, model, cuts, MOST_PLACES)
        finest = _plan(planner, variant, captured, places)
        blocks = find_blocks(captured, model, places)
        return cls(planner, variant, batch, captured, places, finest, blocks)

    def plan(self, positions: Sequence[int]) -> StepPlan:
        """Return the plan of the model cut before the units at `positions`."""
        return _plan(self.planner, self.variant, self.captured, positions)

    @cached_property
    def kinds(self) -> tuple[Hashable, ...]:
        """The kind of each block as a stage: its operations, and what crosses to and from it."""
        return tuple(
            (block.digest, stage.wiring, stage.totals, _crossing_specs(stage))
            for stage, block in zip(self.finest.assembly.stages, self.blocks, strict=True)
        )

    def few(self) -> tuple[int, ...]:
        """Return the positions that cut the model into a few even stages; fewer if there are too few places."""
        for stages in range(min(FEW_STAGES, len(self.blocks)), 1, -1):
            try:
                cuts = self.planner.captures.cuts._replace(where=Evenly(stages, ()))
                return cuts.positions(self.captured, self.planner.captures.model)
            except CutError:
                continue
        return ()


def _plan(planner: Planner, variant: Variant, captured: Captured, positions: Sequence[int]) -> StepPlan:
    stages = len(positions) + 1
    how = two_at_a_time(ranks=min(2, stages), microbatches=MICROBATCHES, stages=stages)
    return plan_cut(planner, variant, captured, positions, how)


def time_blocks(
    model: CutModel, params: State, buffers: State, device: torch.device, seconds: float
) -> tuple[tuple[ActionTimes, ...], ActionTimes]:
    """Return the measured times of each block, and the fixed time of an action."""
    plans = model.plan(()), model.plan(model.few()), model.finest
    needed = {leaf for stage in model.finest.assembly.stages for leaf in stage.batch}
    leaves = {leaf: parts[0] for leaf, parts in model.batch.take(needed).items()}
    with wait_for_turn():
        subjects = [TimedPlan.of(plan, params, buffers, leaves) for plan in plans]
        whole, few, blocks = time_actions(subjects, device, seconds)
        return fit_times(whole, few, blocks, model.kinds)


def measure_blocks(model: CutModel, roofline: Roofline | None) -> tuple[list[list[StageHolding]], list[ActionTimes]]:
    """Return the memory of each block, and with a roofline its estimated times; run each kind of block once."""
    known: dict[Hashable, tuple[list[StageHolding], ActionTimes]] = {}
    assembly, found = model.finest.assembly, []
    with wait_for_turn(), hide_fakes(), run_on_fakes(assembly) as arguments:
        for stage, kind in zip(assembly.stages, model.kinds, strict=True):
            if kind not in known:
                given = arguments(stage)
                times = NO_TIMES if roofline is None else estimate_times(given, roofline)
                known[kind] = find_holdings(given), times
            found.append(known[kind])
    return [holdings for holdings, _ in found], [times for _, times in found]


def _crossing_specs(stage: Stage) -> tuple[object, ...]:
    """Return what crosses to and from a stage, whatever stages are at the other ends."""
    return tuple(
        tuple(spec for one in crossings for spec in one.specs)
        for crossings in (stage.gets, stage.gives, stage.pulls, stage.pulled_by)
    )
