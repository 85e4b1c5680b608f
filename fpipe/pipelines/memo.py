# SPDX-License-Identifier: Apache-2.0
"""The memo of a pipeline: the kinds of batches that it has seen, and their plans.

Problem. Training on sequences of all lengths brings a new kind of batch in nearly every step. Each has its plan,
stages, captures and agreement, some megabytes together, which can't all be kept.

Idea. Two tables. One has the plans, by kind of batch, and the ranks' agreement on each; its order is that of their last
use. The other has what is known of each kind of microbatch, given the answers so far to the model's questions about it:
the next question, or the recorded model with its stages. Whatever no plan uses any more is dropped from the second one.
The kind that the pipeline was built for stays: all others are cut where it is.

Invariants. Nothing that is kept changes what a step computes; it only saves making, asking or comparing again. All
ranks forget the same agreements: one is added, or used, right after all ranks have agreed, which either all of them do
or none. So its place in the order of use is the same on every rank.

Runs when a plan is made: once per kind of batch. In every step, the plan is looked up.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from fpipe.network.agreement import Field
from fpipe.pipelines.batch import Microbatch, Signature
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.captured import Captured
from fpipe.record.objective import Way
from fpipe.record.questions import Question
from fpipe.record.reads.watch import Watch
from fpipe.record.variant import Variant
from fpipe.stages.assembly import Assembly

BatchKind: TypeAlias = tuple[Variant, Signature]
"""The kind of a batch: those of one kind run the same plan, and differ only in the values of their tensors."""
MicrobatchKind: TypeAlias = tuple[Variant, Microbatch]
"""The variant that is captured, and everything about a microbatch except values, with the answers so far."""


class Agreement(NamedTuple):
    """An agreement of all ranks on the plan for one kind of batch.

    - `digest`: the digest of the plan's fields; there are none if all ranks are in this process.
    - `fields`: the fields of the batch, which they compare again in every step.
    """

    digest: int
    fields: tuple[Field, ...]


class KnownBatch(NamedTuple):
    """A kind of batch that has a plan; `agreement` is `None` if this process alone has made it."""

    plan: StepPlan
    microbatches: tuple[Microbatch, ...]
    agreement: Agreement | None = None


@dataclass(frozen=True, eq=False)
class KnownMicrobatch:
    """The model recorded for a kind of microbatch, its assumptions, and the stages it was cut into, by variant.

    `way`: how it was recorded.
    """

    captured: Captured
    watch: Watch
    way: Way
    assemblies: dict[Variant, tuple[Assembly, ...]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Memo:
    """The two tables.

    - `most`: the largest number of agreed plans that are kept besides the one that the pipeline was built with.
    - `batches`: the plans, in the order of their last use; but the first that was agreed on is never moved.
    - `microbatches`: the next question about a kind of microbatch, or its recording.
    - `ways`: how to record a kind of microbatch, without answers, if not in the usual way.
    """

    most: int = 1
    batches: dict[BatchKind, KnownBatch] = field(default_factory=dict)
    microbatches: dict[MicrobatchKind, Question | KnownMicrobatch] = field(default_factory=dict)
    ways: dict[MicrobatchKind, Way] = field(default_factory=dict)

    @property
    def agreements(self) -> dict[BatchKind, Agreement]:
        """The agreements of all ranks: the one that the pipeline was built with, then the least recently used."""
        return {kind: one.agreement for kind, one in self.batches.items() if one.agreement is not None}

    @property
    def recordings(self) -> dict[MicrobatchKind, KnownMicrobatch]:
        """The recordings, by kind of microbatch."""
        return {kind: one for kind, one in self.microbatches.items() if isinstance(one, KnownMicrobatch)}

    def without_stages(self) -> Memo:
        """Return a memo with the same questions and recordings, for a pipeline that cuts the model elsewhere."""
        cut = {kind: replace(one, assemblies={}) for kind, one in self.recordings.items()}
        return Memo(self.most, {}, {**self.microbatches, **cut}, dict(self.ways))

    def agree(self, kind: BatchKind, agreement: Agreement) -> None:
        """Add the agreement of all ranks on a plan, and forget the kinds of batches that are used no more."""
        self.batches[kind] = self.batches.pop(kind)._replace(agreement=agreement)
        self.keep_last(alone=0)

    def use(self, kind: BatchKind) -> None:
        """Make a kind of batch the most recently used one."""
        if len(self.batches) > 1 and kind != next(iter(self.agreements)):
            self.batches[kind] = self.batches.pop(kind)

    def keep_last(self, alone: int) -> None:
        """Forget all kinds of batches but the pipeline's own, the `most` agreed ones used last, and `alone` others.

        Those are the last ones for which this process alone has made a plan.
        """
        agreed = list(self.agreements)[1:]
        others = [kind for kind, one in self.batches.items() if one.agreement is None]
        for kind in (*agreed[: -self.most], *others[: max(0, len(others) - alone)]):
            del self.batches[kind]
        self.drop_unused()

    def clear(self) -> None:
        """Forget everything."""
        self.batches.clear()
        self.microbatches.clear()
        self.ways.clear()

    def drop_unused(self) -> None:
        """Drop the recordings and stages that no plan uses, and the questions that did not lead to one of them."""
        variants: dict[MicrobatchKind, set[Variant]] = {}
        for (variant, _), known in self.batches.items():
            for one in known.microbatches:
                variants.setdefault((variant.capture, one), set()).add(variant)
        asked = {
            (variant, replace(one, answers=one.answers[:count]))
            for variant, one in variants
            for count in range(len(one.answers))
        }
        for kind, found in list(self.microbatches.items()):
            if kind in variants and isinstance(found, KnownMicrobatch):
                stages = {variant: cut for variant, cut in found.assemblies.items() if variant in variants[kind]}
                self.microbatches[kind] = replace(found, assemblies=stages)
            elif kind not in asked:
                del self.microbatches[kind]
