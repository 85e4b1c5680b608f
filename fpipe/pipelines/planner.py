# SPDX-License-Identifier: Apache-2.0
"""Make plans, and keep those of the last kinds of batches.

Problem. A plan is made for train or eval mode, with or without the loss and the outputs, and for batches of one
signature. Whoever trains on sequences of all lengths has a new kind of batch in nearly every step. Each has its plan,
stages, captures and agreement, some megabytes together, which can't all be kept.

Idea. For a new kind of batch, `Planner.plan` does what there is to do: it captures the model for each shape of its
microbatches, cuts it into stages, and lowers the schedule for them. What it makes is kept as long as a plan needs it,
and plans as `Planner.keep_last` says. The kind that the pipeline was built for stays: all others are cut where it is.

Invariants. Nothing that is kept changes what a step computes; it only saves making, asking or comparing again. All
ranks forget the same agreements: one is added, or used, right after all ranks have agreed, which either all of them do
or none. So its place in the order of use is the same on every rank.

Runs when a plan is made: once per kind of batch. In every step, the plan is looked up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from fpipe.cutting.repetition import ExtraBuffers
from fpipe.errors import CaptureError, CutError, InputError, PipelineError
from fpipe.meshes.copies import ALONE, PipelineCopies
from fpipe.network.agreement import Field
from fpipe.pipelines.batch import SplitBatch
from fpipe.pipelines.capture_cache import CaptureCache
from fpipe.pipelines.merge import Merge
from fpipe.pipelines.modes import isolate
from fpipe.pipelines.resolver import ExchangeText, Resolver
from fpipe.pipelines.signature import Microbatch, Signature
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.variant import TRAINING, Variant
from fpipe.stages.assembly import Assembly, assemble
from fpipe.stages.backends import Backend, Recording, splits
from fpipe.stages.kinds import require_alike, widen
from fpipe.stages.stage import Stage
from schedules import KINDS, Schedule, check, lower

BatchKind: TypeAlias = tuple[Variant, Signature]
"""The kind of a batch: those of one kind run the same plan, and differ only in the values of their tensors."""


class Agreement(NamedTuple):
    """An agreement of all ranks on the plan for one kind of batch.

    - `digest`: the digest of the plan's fields; there are none if all ranks are in this process.
    - `fields`: the fields of the batch, which they compare again in every step.
    """

    digest: int
    fields: tuple[Field, ...]


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
    - `most`: the largest number of agreements that are kept besides the one on the pipeline itself.
    - `plans`: by kind of batch. `agreements`: on those that all ranks make; the first is the one on the pipeline
      itself, then the least recently used. `assemblies`: the stages of the plans, by microbatch.
    """

    schedule: Schedule
    captures: CaptureCache
    output_dims: Any
    ranks: tuple[int, ...]
    summed: frozenset[str] = frozenset()
    backend: Backend | None = None
    copies: PipelineCopies = ALONE
    extra: ExtraBuffers | None = None
    most: int = 1
    plans: dict[BatchKind, StepPlan] = field(default_factory=dict)
    agreements: OrderedDict[BatchKind, Agreement] = field(default_factory=OrderedDict)
    assemblies: dict[tuple[Variant, Microbatch], Assembly] = field(default_factory=dict)

    def kind(self, variant: Variant, signature: Signature | None = None) -> BatchKind:
        """Return the kind of batches with this signature, by default the example's."""
        return variant, self.captures.batchings[variant.loss].example if signature is None else signature

    def plan(self, variant: Variant, signature: Signature | None = None) -> StepPlan:
        """Return the plan for a kind of batch, by default the example's; make it for a new kind.

        Raise `InputError` if the model can't take a batch that differs from the example.
        """
        kind = self.kind(variant, signature)
        if kind not in self.plans:
            try:
                with isolate(variant):
                    self.plans[kind] = self._plan(*kind)
            except PipelineError as error:
                self._drop_unused()
                if kind == self.kind(variant):
                    raise
                raise self._unfit(*kind, error) from error
        return self.plans[kind]

    def resolve(self, variant: Variant, batch: SplitBatch, exchange_text: ExchangeText) -> SplitBatch:
        """Return the batch with the answers to the model's questions; raise `InputError` if the model can't take it."""
        if (variant, batch.signature) in self.plans:
            return batch  # a plan was made for it without an answer, so the model asks nothing about such batches
        try:
            return Resolver(self.captures, variant, batch, exchange_text).resolve()
        except CaptureError as error:
            self._drop_unused()
            raise self._unfit(variant, batch.signature, error) from error

    def _unfit(self, variant: Variant, signature: Signature, error: PipelineError) -> InputError:
        """Return the error for a batch that the model can't take; `error` says why."""
        difference = self.captures.batchings[variant.loss].difference(signature)
        return InputError(
            f"{difference}, expected a batch that the model can take, cut where the example is cut. "
            f"Building the pipeline for this batch failed: {error}"
        )

    def agree(self, kind: BatchKind, agreement: Agreement) -> None:
        """Add the agreement of all ranks on a plan, and forget the kinds of batches that are used no more."""
        self.agreements[kind] = agreement
        self.keep_last(alone=0)

    def use(self, kind: BatchKind) -> None:
        """Make a kind of batch the most recently used one."""
        if kind != next(iter(self.agreements)):
            self.agreements.move_to_end(kind)

    def keep_last(self, alone: int) -> None:
        """Forget all kinds of batches but the pipeline's own, the `most` agreed ones used last, and `alone` others.

        Those are the last ones for which this process alone has made a plan.
        """
        _, *others = self.agreements or (None,)  # the first is the pipeline's own; none is left once it is closed
        for kind in others[: -self.most]:
            del self.agreements[kind]
        own = [kind for kind in self.plans if kind not in self.agreements]
        for kind in own[: max(0, len(own) - alone)]:
            del self.plans[kind]
        self._drop_unused()

    def clear(self) -> None:
        """Forget everything."""
        self.agreements.clear()
        self.keep_last(alone=0)

    def _drop_unused(self) -> None:
        """Drop the stages and captures that no plan uses."""
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
        held = {s for rank in self.ranks for s in placement.stages_on(rank)}
        recording = Recording.of(self.backend, held, variant.training and splits(self.schedule))
        return assemble(captured, positions, variant, placement, self.summed, recording, extra)


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
