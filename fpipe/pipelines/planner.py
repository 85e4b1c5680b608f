# SPDX-License-Identifier: Apache-2.0
"""Make plans: capture the model for a kind of batch, cut it into stages, and lower the schedule for them.

A plan is made for train or eval mode, with or without the loss and the outputs, and for batches of one signature. Its
microbatches are captured separately if they differ in shape. Captures, stages and plans are made
once and cached.

Runs when a plan is made: once per kind of batch. In every step, the cached plan is looked up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fpipe.autodiff.backends import Backend
from fpipe.batching.batch import SplitBatch
from fpipe.batching.merge import Merge
from fpipe.batching.signature import Microbatch, Signature
from fpipe.capture.eager_types import hide_fakes
from fpipe.cutting.repetition import ExtraBuffers
from fpipe.errors import CaptureError, CutError, InputError, PipelineError
from fpipe.ir.variant import TRAINING, Variant
from fpipe.meshes.copies import ALONE, PipelineCopies
from fpipe.pipelines.autocast import suspend_autocast
from fpipe.pipelines.caches import BatchKind
from fpipe.pipelines.capture_cache import CaptureCache
from fpipe.pipelines.garbage import postpone_collection
from fpipe.pipelines.resolver import ExchangeText, Resolver
from fpipe.pipelines.step_plan import StepPlan
from fpipe.runtime.turns import wait_for_turn
from fpipe.stages.assembly import Assembly, assemble
from fpipe.stages.conversion import differentiate, splits, take_scale, widen_sums
from fpipe.stages.kinds import require_alike, widen
from fpipe.stages.stage import Stage
from fpipe.tensors import random
from schedules import KINDS, Schedule, check, lower


@dataclass(frozen=True, eq=False)
class Planner:
    """Everything that determines a pipeline's plans, and the plans made so far.

    - `captures`: the captured model; it also knows how batches are split, and where the model is cut.
    - `output_dims`: how outputs are merged.
    - `ranks`: the ranks of this process.
    - `summed`: the parameters whose gradients are summed over stages.
    - `backend`: differentiates the stages; `None` for autograd, except for backwards that the schedule splits.
    - `copies`: the copies of the pipeline, this process's among them.
    - `extra`: the buffers that stages may hold for what they repeat, if those of another pipeline do; else `None`.
    """

    schedule: Schedule
    captures: CaptureCache
    output_dims: Any
    ranks: tuple[int, ...]
    summed: frozenset[str] = frozenset()
    backend: Backend | None = None
    copies: PipelineCopies = ALONE
    extra: ExtraBuffers | None = None
    plans: dict[BatchKind, StepPlan] = field(default_factory=dict)
    assemblies: dict[tuple[Variant, Microbatch], Assembly] = field(default_factory=dict)

    def kind(self, variant: Variant, signature: Signature | None = None) -> BatchKind:
        """Return the kind of batches with this signature, by default the example's."""
        return variant, self.captures.batchings[variant.loss].example if signature is None else signature

    def plan(self, variant: Variant, signature: Signature | None = None) -> StepPlan:
        """Return the plan for a kind of batch, by default the example's; cached.

        Raise `InputError` if the model can't take a batch that differs from the example.
        """
        kind = self.kind(variant, signature)
        if kind not in self.plans:
            try:
                self.plans[kind] = self._isolated_plan(*kind)
            except PipelineError as error:
                self.keep_only(self.plans)
                if kind == self.kind(variant):
                    raise
                raise self._unfit(*kind, error) from error
        return self.plans[kind]

    def resolve(self, variant: Variant, batch: SplitBatch, exchange_text: ExchangeText) -> SplitBatch:
        """Return the batch with the answers to the model's questions; raise `InputError` if the model can't take it."""
        try:
            return Resolver(self.captures, variant, batch, exchange_text).resolve()
        except CaptureError as error:
            self.keep_only(self.plans)
            raise self._unfit(variant, batch.signature, error) from error

    def _unfit(self, variant: Variant, signature: Signature, error: PipelineError) -> InputError:
        """Return the error for a batch that the model can't take; `error` says why."""
        difference = self.captures.batchings[variant.loss].difference(signature)
        return InputError(
            f"{difference}, expected a batch that the model can take, cut where the example is cut. "
            f"Building the pipeline for this batch failed: {error}"
        )

    def _isolated_plan(self, variant: Variant, signature: Signature) -> StepPlan:
        """Return a new plan; preserve torch's settings and generators, and make other threads wait."""
        with (
            torch.inference_mode(False),
            suspend_autocast(variant),
            wait_for_turn(),
            postpone_collection(),
            hide_fakes(),
            random.preserve_generators([torch.device("cpu")]),
        ):
            return self._plan(variant, signature)

    def keep_only(self, kinds: Iterable[BatchKind]) -> None:
        """Drop the plans of all other kinds of batches, and the stages and captures that only they use."""
        for kind in self.plans.keys() - set(kinds):
            del self.plans[kind]
        used = {(variant, one) for variant, signature in self.plans for one in self._microbatches(variant, signature)}
        for other in self.assemblies.keys() - used:
            del self.assemblies[other]
        self.captures.keep_only(used)

    def _microbatches(self, variant: Variant, signature: Signature) -> list[Microbatch]:
        return self.captures.batchings[variant.loss].split(signature)

    def _plan(self, variant: Variant, signature: Signature) -> StepPlan:
        microbatches = self._microbatches(variant, signature)
        by_shape = {one: self._cached_assembly(variant, one) for one in dict.fromkeys(microbatches)}
        assemblies = widen([by_shape[one] for one in microbatches])
        require_alike(assemblies)
        schedule, graph = self.schedule, assemblies[0].graph
        if variant.training:
            check(schedule, graph)
        else:
            schedule = self.copies.evaluate(schedule)
        for stage in assemblies[0].stages:
            _require_one_state(stage, schedule.placement.replicas(stage.index), self.copies)
            _require_ascending(stage, schedule)
        merge = _output_merge(assemblies, self.output_dims, int(variant.loss)) if variant.outputs else None
        watch = self.captures.watch(variant, microbatches)
        return StepPlan(assemblies, lower(schedule, graph), self.ranks, merge, watch, self.copies)

    def _cached_assembly(self, variant: Variant, microbatch: Microbatch) -> Assembly:
        """Return the stages for a microbatch, cached: different batches may contain the same microbatches."""
        if (variant, microbatch) not in self.assemblies:
            self.assemblies[variant, microbatch] = self._assemble(variant, microbatch)
        return self.assemblies[variant, microbatch]

    def _extra_buffers(self, variant: Variant, microbatch: Microbatch) -> ExtraBuffers | None:
        """Return the buffers that stages may hold for what they repeat: those of the example's first microbatch.

        For this one, return `None`: whatever it needs. So each rank holds the same buffers for every kind of batch.
        """
        if self.extra is not None:
            return self.extra
        first = self._microbatches(TRAINING, self.captures.batchings[True].example)[0]
        if (variant, microbatch) == (TRAINING, first):
            return None
        return self._cached_assembly(TRAINING, first).extra_buffers

    def _assemble(self, variant: Variant, microbatch: Microbatch) -> Assembly:
        placement = self.schedule.placement
        captured, positions = self.captures.of(variant, microbatch)
        extra = self._extra_buffers(variant, microbatch)
        assembly = assemble(captured, positions, variant.outputs, placement, self.summed, extra)
        if variant.scaled:
            assembly = take_scale(assembly)
        if variant.sums is not None:
            assembly = widen_sums(assembly, variant.sum_dtype)
        held = {s for rank in self.ranks for s in placement.stages_on(rank)}
        return differentiate(assembly, self.backend, variant.training and splits(self.schedule), held)


def _list_modified(stage: Stage) -> list[str]:
    """Return the names of the buffers that a stage modifies."""
    return [name for k, name in enumerate(stage.buffers) if k in stage.wiring.modified_buffers]


def _require_one_state(stage: Stage, ranks: Sequence[int], copies: PipelineCopies) -> None:
    """Raise `CutError` if a stage in several places modifies a buffer: each sees only some of the microbatches."""
    modified = _list_modified(stage)
    if modified and len(ranks) * copies.count > 1:
        where = f"ranks {list(ranks)}" if len(ranks) > 1 else f"{copies.count} copies of the pipeline"
        raise CutError(
            f"stage {stage.index}: got modified buffers {modified} on {where}, expected none: each "
            "sees only some of the microbatches. Choose a schedule with one rank per stage and no data-parallel "
            "dimension, or a model that does not modify buffers."
        )


def _require_ascending(stage: Stage, schedule: Schedule) -> None:
    """Raise `CutError` if a stage modifies a buffer, but not in the order in which one device runs the microbatches."""
    modified = _list_modified(stage)
    if not modified:
        return
    rank = schedule.placement.home(stage.index, 0)
    order = [a.microbatch for a in schedule.actions(rank) if a.stage == stage.index and KINDS[a.kind].crosses == "F"]
    if order != sorted(order):
        raise CutError(
            f"stage {stage.index}: got modified buffers {modified} and forwards of the microbatches {order}, expected "
            "ascending order: buffers go from each microbatch to the next, as on one device. Choose a schedule with "
            "forwards in that order, or a model that does not modify buffers."
        )


def _output_merge(assemblies: Sequence[Assembly], dims: Any, first: int) -> Merge:
    """Return the merge of the outputs, which are the last stage's results from index `first` on."""
    columns = zip(*[cut.stages[-1].results[first:] for cut in assemblies], strict=True)
    return Merge.of(assemblies[0].captured.structure, dims, list(columns))
