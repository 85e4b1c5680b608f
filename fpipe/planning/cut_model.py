# SPDX-License-Identifier: Apache-2.0
"""A model as a pipeline of a single stage in this process, cut again and again: its blocks, their times and memory.

It is captured once. What each block keeps is found on fake tensors, once for all blocks that compute the same; so are
its times, if the model is not run.

Runs when a model is profiled.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import nn

from fpipe.cutting.partition import Cuts, Evenly, Explicit, find_places, parse_places
from fpipe.errors import CutError, InputError
from fpipe.meshes.copies import ALONE
from fpipe.network.ranks import Ranks, wait_for_turn
from fpipe.pipelines.argument_checks import require_buildable, require_count
from fpipe.pipelines.batch import SplitBatch
from fpipe.pipelines.builder import Builder, make_batchings
from fpipe.pipelines.footprint import run_on_fakes
from fpipe.pipelines.inputs import State
from fpipe.pipelines.modes import active_casts, isolate
from fpipe.pipelines.options import Gradients, Microbatching, Recording
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.planner import Planner
from fpipe.pipelines.step_plan import StepPlan
from fpipe.planning.blocks import ModelBlock, find_blocks
from fpipe.planning.holdings import StageHolding, find_holdings
from fpipe.planning.ranges import ActionTimes
from fpipe.planning.roofline import Roofline, estimate_times
from fpipe.planning.timing import MICROBATCHES, TimedPlan, fit_times, time_actions, two_at_a_time
from fpipe.record.captured import Captured
from fpipe.record.fakes.eager_types import hide_fakes
from fpipe.record.objective import Loss
from fpipe.record.variant import TRAINING, Variant
from fpipe.stages.assembly import assemble
from fpipe.stages.backends import GraphRequest
from fpipe.stages.stage import ModelStage
from schedules import Schedule, check, lower, one_f_one_b

FEW_STAGES: Final = 4
MOST_PLACES: Final = 256
NO_TIMES: Final = ActionTimes(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class ModelArguments:
    """The arguments of `fpipe.pipeline` that matter to a single stage."""

    loss: Loss | None = None
    microbatches: int = 1
    microbatching: Microbatching = Microbatching()
    recording: Recording = Recording()
    gradients: Gradients = Gradients()

    def require_defaults(self) -> None:
        """Raise `InputError` for an argument besides a pipeline, which has its own."""
        for one in fields(self):
            if getattr(self, one.name) != one.default:
                raise InputError(
                    f"{one.name}: got {getattr(self, one.name)!r} besides a pipeline, which has its own, expected "
                    "none. Leave it out, or pass the model instead of the pipeline."
                )

    def build(self, module: nn.Module, example: Any, targets: Any) -> Pipeline:
        """Return the pipeline of a model as a single stage in this process."""
        require_count("microbatches", self.microbatches)
        schedule = one_f_one_b(ranks=1, microbatches=self.microbatches)
        loss: Any = self.loss
        require_buildable(module, example, loss, schedule)
        batchings = make_batchings(example, targets, self.microbatching, self.microbatches, self.microbatches)
        cuts, recording = (
            parse_places(None, self.recording.unsplittable, 1, self.recording.whole),
            replace(self.recording, plans=1),
        )
        builder = Builder(loss, schedule, batchings, cuts, recording, self.gradients, Microbatching(), Ranks(1))
        return builder.build(module, batchings[True].split_batch(example, targets))


def take_alone(pipe: Pipeline, example: Any, targets: Any) -> Pipeline:
    """Return the pipeline of the same model as a single stage in this process, captured for batches like this one.

    Captures are shared with `pipe`; plans are not.
    """
    variant, known, captures = training_variant_here(), pipe.planner, pipe.captures
    if captures.slices > 1:
        raise InputError(
            f"pipe: got one of {captures.slices} slices, expected whole microbatches: slices of a sequence differ in "
            "what they cost. Build the pipeline with a schedule of whole microbatches to measure it."
        )
    pipe.plan(variant, pipe.batch(variant, example, targets).signature)
    schedule = one_f_one_b(ranks=1, microbatches=captures.batchings[True].microbatches)
    cuts, memo = captures.cuts._replace(where=Explicit(())), captures.memo.without_stages()
    whole = replace(captures, cuts=cuts, memo=memo)
    planner = Planner(schedule, whole, known.output_dims, (0,), known.summed, known.backend, ALONE)
    return Pipeline(planner, Ranks(1), pipe.rebuild, pipe.plan_ahead)


def training_variant_here() -> Variant:
    """Return the variant of a training step under the autocast that is on."""
    return replace(TRAINING, casts=active_casts())


@dataclass(frozen=True, eq=False)
class CutModel:
    """A captured model, cut everywhere where it may be.

    - `planner`: has captured it for `variant` and `batch`. The first microbatch stands for all.
    - `places`: the positions of units before which blocks after the first begin.
    """

    planner: Planner
    variant: Variant
    batch: SplitBatch
    captured: Captured
    places: tuple[int, ...]

    @classmethod
    def of(cls, planner: Planner, variant: Variant, batch: SplitBatch, cuts: Cuts) -> CutModel:
        """Return the model that `planner` has captured for such a batch, cut wherever `cuts` allow."""
        captures = planner.captures
        captured = captures.of(variant, captures.batchings[variant.loss].split(batch.signature)[0]).captured
        return cls(planner, variant, batch, captured, find_places(captured, captures.model, cuts, MOST_PLACES))

    def plan(self, positions: Sequence[int], how: Schedule | None = None) -> StepPlan:
        """Return the plan of the model cut before the units at `positions`; all ranks are in this process.

        By default its schedule is the one that is timed. It does not watch for changes of the model: run it at once.
        """
        stages = len(positions) + 1
        how = how or two_at_a_time(ranks=min(2, stages), microbatches=MICROBATCHES, stages=stages)
        with isolate(self.variant):
            request = GraphRequest.of(self.planner.backend, range(stages), False)
            (assembly,) = assemble(self.captured, positions, self.variant, how.placement, self.planner.summed, request)
            check(how, assembly.graph)
            program = lower(how, assembly.graph)
        return StepPlan((assembly,) * how.microbatches, program, tuple(range(how.ranks)), None)

    @cached_property
    def finest(self) -> StepPlan:
        """The plan in which each block is a stage."""
        return self.plan(self.places)

    @cached_property
    def blocks(self) -> tuple[ModelBlock, ...]:
        """The pieces between places."""
        return find_blocks(self.captured, self.planner.captures.model, self.places)

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


def _crossing_specs(stage: ModelStage) -> tuple[object, ...]:
    """Return what crosses to and from a stage, whatever stages are at the other ends."""
    return tuple(
        tuple(spec for one in crossings for spec in one.specs)
        for crossings in (stage.gets, stage.gives, stage.pulls, stage.pulled_by)
    )
