# SPDX-License-Identifier: Apache-2.0
"""Make the plan for a kind of batch: train or eval mode, with or without the loss and the outputs, and a signature.

For a new kind of batch, `Planner.plan` captures the model for each shape of its microbatches, cuts it into stages, and
lowers the schedule for them. `fpipe.pipelines.memo` keeps what it makes.

Runs when a plan is made: once per kind of batch. In every step, the plan is looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fpipe.cutting.repetition import ExtraBuffers
from fpipe.errors import CaptureError, CutError, InputError, PipelineError
from fpipe.meshes.copies import ALONE, PipelineCopies
from fpipe.pipelines.batch import Microbatch, Signature, SplitBatch
from fpipe.pipelines.captures import Captures
from fpipe.pipelines.memo import BatchKind, KnownBatch, Memo
from fpipe.pipelines.merge import Merge
from fpipe.pipelines.modes import isolate
from fpipe.pipelines.resolver import ExchangeText, Resolver
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.variant import TRAINING, Variant
from fpipe.stages.assembly import Assembly, assemble
from fpipe.stages.backends import Backend, GraphRequest, needs_graphs
from fpipe.stages.kinds import require_alike, widen
from fpipe.stages.stage import ModelStage
from schedules import KINDS, Schedule, check, lower
from schedules.transforms.shorten import shorten


@dataclass(frozen=True, eq=False)
class Planner:
    """Everything that determines a pipeline's plans, and the plans of the last kinds of batches.

    - `captures`: the captured model; it also knows how batches are split, and where the model is cut.
    - `output_dims`: how outputs are merged.
    - `ranks`: the ranks of this process.
    - `summed`: the parameters whose gradients are summed over stages.
    - `backend`: differentiates the stages; `None` for autograd, except for backwards that the schedule splits.
    - `copies`: the copies of the pipeline, this process's among them.
    - `extra`: the buffers that stages may hold for what they repeat, if those of another pipeline do; else `None`.
    """

    schedule: Schedule
    captures: Captures
    output_dims: Any
    ranks: tuple[int, ...]
    summed: frozenset[str] = frozenset()
    backend: Backend | None = None
    copies: PipelineCopies = ALONE
    extra: ExtraBuffers | None = None

    @property
    def memo(self) -> Memo:
        """The kinds of batches so far, with their plans."""
        return self.captures.memo

    def kind(self, variant: Variant, signature: Signature | None = None) -> BatchKind:
        """Return the kind of batches with this signature, by default the example's."""
        return variant, self.captures.batchings[variant.loss].example if signature is None else signature

    def plan(self, variant: Variant, signature: Signature | None = None) -> StepPlan:
        """Return the plan for a kind of batch, by default the example's; make it for a new kind.

        Raise `InputError` if the model can't take a batch that differs from the example.
        """
        kind, known = self.kind(variant, signature), self.memo.batches
        if kind not in known:
            try:
                with isolate(variant):
                    plan = self._plan(*kind)
            except PipelineError as error:
                self.memo.drop_unused()
                if kind == self.kind(variant):
                    raise
                raise self._unfit(*kind, error) from error
            known[kind] = KnownBatch(plan, tuple(self._microbatches(*kind)))
        return known[kind].plan

    def resolve(self, variant: Variant, batch: SplitBatch, exchange_text: ExchangeText) -> SplitBatch:
        """Return the batch with the answers to the model's questions; raise `InputError` if the model can't take it."""
        if (variant, batch.signature) in self.memo.batches:
            return batch  # a plan was made for it without an answer, so the model asks nothing about such batches
        try:
            return Resolver(self.captures, variant, batch, exchange_text).resolve()
        except CaptureError as error:
            self.memo.drop_unused()
            raise self._unfit(variant, batch.signature, error) from error

    def _unfit(self, variant: Variant, signature: Signature, error: PipelineError) -> InputError:
        """Return the error for a batch that the model can't take; `error` says why."""
        difference = self.captures.batchings[variant.loss].difference(signature)
        return InputError(
            f"{difference}, expected a batch that the model can take, cut where the example is cut. "
            f"Building the pipeline for this batch failed: {error}"
        )

    def _microbatches(self, variant: Variant, signature: Signature) -> list[Microbatch]:
        return self.captures.batchings[variant.loss].split(signature)

    def _plan(self, variant: Variant, signature: Signature) -> StepPlan:
        microbatches = self._microbatches(variant, signature)
        by_shape = {one: self._cached_assembly(variant, one) for one in dict.fromkeys(microbatches)}
        assemblies = widen([cut for one in microbatches for cut in by_shape[one]])
        require_alike(assemblies)
        schedule, graph = self.schedule, assemblies[0].graph
        if signature.microbatches < self.captures.batchings[variant.loss].microbatches:
            schedule = shorten(schedule, signature.microbatches)
        if variant.training:
            check(schedule, graph)
        else:
            schedule = self.copies.evaluate(schedule)
        for stage in assemblies[0].stages:
            _require_one_state(stage, schedule.placement.replicas(stage.index), self.copies)
            require_ascending(stage, schedule)
        first = len(assemblies[0].captured.aux) + variant.loss
        lasts = assemblies[self.captures.slices - 1 :: self.captures.slices]  # whose last stage returns the results
        merge = _output_merge(lasts, self.output_dims, first) if variant.outputs else None
        watch = self.captures.watch(variant, microbatches)
        return StepPlan(assemblies, lower(schedule, graph), self.ranks, merge, watch, self.copies)

    def _cached_assembly(self, variant: Variant, microbatch: Microbatch) -> tuple[Assembly, ...]:
        """Return the stages for each slice of a microbatch, cached: different batches may contain the same ones."""
        found = self.captures.of(variant, microbatch)
        if variant not in found.assemblies:
            made = {**found.assemblies, variant: self._assemble(variant, microbatch)}
            self.memo.microbatches[variant.capture, microbatch] = replace(found, assemblies=made)
            return made[variant]
        return found.assemblies[variant]

    def _extra_buffers(self, variant: Variant, microbatch: Microbatch) -> ExtraBuffers | None:
        """Return the buffers that stages may hold for what they repeat: those of the example's first microbatch.

        For this one, return `None`: whatever it needs. So each rank holds the same buffers for every kind of batch.
        """
        if self.extra is not None:
            return self.extra
        first = self._microbatches(TRAINING, self.captures.batchings[True].example)[0]
        if (variant, microbatch) == (TRAINING, first):
            return None
        return tuple(names for cut in self._cached_assembly(TRAINING, first) for names in cut.extra_buffers)

    def _assemble(self, variant: Variant, microbatch: Microbatch) -> tuple[Assembly, ...]:
        placement = self.schedule.placement
        captured, extra = self.captures.of(variant, microbatch).captured, self._extra_buffers(variant, microbatch)
        positions = self.captures.positions(variant, microbatch)
        here = {s for rank in self.ranks for s in placement.stages_on(rank)}
        held = {k * placement.stages + s for k in range(self.captures.slices) for s in here}
        request = GraphRequest.of(self.backend, held, variant.training and needs_graphs(self.schedule))
        return assemble(captured, positions, variant, placement, self.summed, request, extra)


def _list_modified(stage: ModelStage) -> list[str]:
    return [name for k, name in enumerate(stage.buffers) if k in stage.wiring.modified_buffers]


def _require_one_state(stage: ModelStage, ranks: Sequence[int], copies: PipelineCopies) -> None:
    """Raise `CutError` if a stage in several places modifies a buffer: each sees only some of the microbatches."""
    modified = _list_modified(stage)
    if modified and len(ranks) * copies.count > 1:
        where = f"ranks {list(ranks)}" if len(ranks) > 1 else f"{copies.count} copies of the pipeline"
        raise CutError(
            f"stage {stage.index}: got modified buffers {modified} on {where}, expected none: each "
            "sees only some of the microbatches. Choose a schedule with one rank per stage and no data-parallel "
            "dimension, or a model that does not modify buffers."
        )


def require_ascending(stage: ModelStage, schedule: Schedule) -> None:
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
    captured = assemblies[0].captured
    return Merge.of(captured.structure, dims, list(columns), 1 + len(captured.slices))
