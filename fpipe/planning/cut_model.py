# SPDX-License-Identifier: Apache-2.0
"""A model as a pipeline of a single stage in this process, cut again and again: its blocks, their times and memory.

It is captured once. What each block keeps is found on fake tensors, once for all blocks that compute the same; so are
its times, if the model is not run.

Runs when a model is profiled.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from fpipe.cutting.calls import Calls
from fpipe.cutting.partition import Cuts, Evenly, Explicit, cut_slices, find_places, parse_places
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
from fpipe.planning.timing import (
    MICROBATCHES,
    TimedPlan,
    fit_times,
    sum_slices,
    time_actions,
    time_slices,
    two_at_a_time,
)
from fpipe.record.captured import Captured, Value
from fpipe.record.fakes.eager_types import hide_fakes
from fpipe.record.objective import Loss
from fpipe.record.variant import TRAINING, Variant
from fpipe.stages.assembly import Assembly, assemble
from fpipe.stages.backends import GraphRequest
from fpipe.stages.kinds import widen
from fpipe.stages.stage import ModelStage
from schedules import Schedule, check, lower, seq_1f1b

FEW_STAGES: Final = 4
MOST_PLACES: Final = 256
NO_TIMES: Final = ActionTimes(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class ModelArguments:
    """The arguments of `fpipe.pipeline` that matter to a single stage."""

    loss: Loss | None = None
    microbatches: int = 1
    slices: int = 1
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
        for name in ("microbatches", "slices"):
            require_count(name, getattr(self, name))
        schedule = seq_1f1b(ranks=1, microbatches=self.microbatches, slices=self.slices)
        loss: Any = self.loss
        require_buildable(module, example, loss, schedule)
        batchings = make_batchings(example, targets, self.microbatching, self.microbatches, self.microbatches)
        cuts, recording = (
            parse_places(None, self.recording.unsplittable, 1, self.recording.whole),
            replace(self.recording, plans=1),
        )
        builder = Builder(
            *(loss, schedule, batchings, cuts, recording, self.gradients),
            replace(self.microbatching, output_dims=0),
            Ranks(1),
        )
        return builder.build(module, batchings[True].split_batch(example, targets))


def take_alone(pipe: Pipeline, example: Any, targets: Any) -> Pipeline:
    """Return the pipeline of the same model as a single stage in this process, captured for batches like this one.

    Captures are shared with `pipe`; plans are not.
    """
    variant, known, captures = training_variant_here(), pipe.planner, pipe.captures
    pipe.plan(variant, pipe.batch(variant, example, targets).signature)
    schedule = seq_1f1b(ranks=1, microbatches=captures.batchings[True].microbatches, slices=captures.slices)
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
    - `places`: the positions of units before which blocks after the first begin, in the first slice.
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
        places = find_places(captured.slice(0), captures.model, cuts, MOST_PLACES)
        found = cls(planner, variant, batch, captured, places)
        return found._keep_carries_whole() if captured.slices else found

    @property
    def first(self) -> Captured:
        """The record of the first slice."""
        return self.captured.slice(0)

    @property
    def slices(self) -> int:
        """The number of slices of a microbatch."""
        return 1 + len(self.captured.slices)

    def _keep_carries_whole(self) -> CutModel:
        """Return the same model with fewer places: what a slice leaves for another is made and read in one block."""
        starts, count = [0, *self._positions(self.places)], 1 + len(self.places)
        makers, parted = dict[Value, int](), set[int]()
        for position, unit in enumerate(self.captured.units):
            block = bisect_right(starts, position) - 1
            for home in (makers[value] for value in unit.reads if value in makers):
                if home // count < block // count:
                    a, b = sorted((home % count, block % count))
                    parted.update(range(a, b))
            makers.update(dict.fromkeys(unit.makes, block))
        return replace(self, places=tuple(place for k, place in enumerate(self.places) if k not in parted))

    def _positions(self, first: Sequence[int]) -> Sequence[int]:
        """Return the positions at which all stages of all slices begin but the very first, given those of slice 0."""
        model = self.planner.captures.model
        calls = Calls.of(self.first, model)
        return cut_slices(self.captured, model, [calls.marks(place) for place in first], tuple(first))

    def plan(self, positions: Sequence[int], how: Schedule | None = None) -> StepPlan:
        """Return the plan of the model cut before the units at `positions`; all ranks are in this process.

        By default its schedule is the one that is timed. It does not watch for changes of the model: run it at once.
        """
        stages, slices, summed = len(positions) + 1, self.slices, self.planner.summed
        how = how or two_at_a_time(min(2, stages), MICROBATCHES, stages, slices=slices)
        with isolate(self.variant):
            request = GraphRequest.of(self.planner.backend, range(stages * slices), False)
            every = self._positions(positions)
            cuts = widen(assemble(self.captured, every, self.variant, how.placement, summed, request))
            check(how, cuts[0].graph)
            program = lower(how, cuts[0].graph)
        return StepPlan(cuts * how.microbatches, program, tuple(range(how.ranks)), None)

    @cached_property
    def finest(self) -> StepPlan:
        """The plan in which each block is a stage."""
        return self.plan(self.places)

    @cached_property
    def blocks(self) -> tuple[ModelBlock, ...]:
        """The pieces between places."""
        return self.blocks_of(0)

    def blocks_of(self, k: int) -> tuple[ModelBlock, ...]:
        """Return the pieces of a slice."""
        count, start = len(self.places), [0, *self.captured.slices][k]
        places = self._positions(self.places)[k * (count + 1) :][:count]
        own = self.captured.slice(k)
        return find_blocks(own, self.planner.captures.model, [place - start for place in places])

    @property
    def cuts(self) -> tuple[Assembly, ...]:
        """The blocks of each slice, as stages."""
        return self.finest.assemblies[: self.slices]

    @cached_property
    def kinds(self) -> tuple[tuple[Hashable, ...], ...]:
        """The kind of each block as a stage, per slice: its operations, and what crosses to and from it."""
        digests = [block.digest for block in self.blocks]
        return tuple(
            tuple(
                (k, digest, stage.wiring, stage.totals, _crossing_specs(stage))
                for stage, digest in zip(cut.stages, digests, strict=True)
            )
            for k, cut in enumerate(self.cuts)
        )

    def few(self) -> tuple[int, ...]:
        """Return the positions that cut the model into a few even stages; fewer if there are too few places."""
        for stages in range(min(FEW_STAGES, len(self.blocks)), 1, -1):
            try:
                cuts = self.planner.captures.cuts._replace(where=Evenly(stages, ()))
                found = cuts.positions(self.first, self.planner.captures.model)
            except CutError:
                continue
            if not self.captured.slices or {*found} <= {*self.places}:
                return found
        return ()


class MeasuredBlock(NamedTuple):
    """The memory of a block for a microbatch, or a slice of one, and its estimated times."""

    holdings: list[StageHolding]
    times: ActionTimes


def time_blocks(
    model: CutModel, params: State, buffers: State, device: torch.device, seconds: float
) -> tuple[tuple[ActionTimes, ...], ActionTimes, tuple[float, ...]]:
    """Return the measured times of each block, the fixed time of an action, and the times of each slice, if any."""
    plans = model.plan(()), model.plan(model.few()), model.finest
    needed = {leaf for cut in model.cuts for stage in cut.stages for leaf in stage.batch}
    leaves = {leaf: parts[0] for leaf, parts in model.batch.take(needed).items()}
    with wait_for_turn():
        subjects = [TimedPlan.of(plan, params, buffers, leaves) for plan in plans]
        found = time_actions(subjects, device, seconds)
        whole, few, blocks = map(sum_slices, found)
        return *fit_times(whole, few, blocks, [*zip(*model.kinds, strict=True)]), time_slices(found[0])


def measure_blocks(model: CutModel, roofline: Roofline | None) -> list[list[MeasuredBlock]]:
    """Return, per slice, the memory of each block, and with a roofline its times; run each kind of block once."""
    known: dict[Hashable, MeasuredBlock] = {}
    for cut, kinds in zip(model.cuts, model.kinds, strict=True):
        with wait_for_turn(), hide_fakes(), run_on_fakes(cut) as arguments:
            for stage, kind in zip(cut.stages, kinds, strict=True):
                if kind not in known:
                    given = arguments(stage)
                    times = NO_TIMES if roofline is None else estimate_times(given, roofline)
                    known[kind] = MeasuredBlock(find_holdings(given), times)
    return [[known[kind] for kind in kinds] for kinds in model.kinds]


def _crossing_specs(stage: ModelStage) -> tuple[object, ...]:
    """Return what crosses to and from a stage, whatever stages are at the other ends."""
    return tuple(
        tuple(spec for one in crossings for spec in one.specs)
        for crossings in (stage.gets, stage.gives, stage.pulls, stage.pulled_by)
    )
