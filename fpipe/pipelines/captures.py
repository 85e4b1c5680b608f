# SPDX-License-Identifier: Apache-2.0
"""The captures of a model, in train and eval mode, for the shapes of every kind of microbatch.

A capture is specialized to the shapes of one microbatch. So the model is captured once for each kind of microbatch: the
example's, two if its microbatches differ in size, and those of later batches. All captures are cut at the same
modules, so that each rank always holds the same parameters.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import torch
from torch import nn

from fpipe.cutting import partition
from fpipe.cutting.calls import Calls, Mark
from fpipe.errors import CaptureError
from fpipe.pipelines.batch import Batching, Microbatch, SplitBatch, name_leaf
from fpipe.pipelines.memo import KnownMicrobatch, Memo, MicrobatchKind
from fpipe.record.captured import Captured, CaptureFunction, Hooks
from fpipe.record.front_ends.registry import is_eager, is_tracer, reads_bytecode
from fpipe.record.model.skeleton import evaluation
from fpipe.record.model.snapshot import defining_files, find_caches, remove_fakes, user_classes
from fpipe.record.model.state import require_own_state
from fpipe.record.objective import Loss, Objective, Way, WayError
from fpipe.record.questions import Answer, Ask, Question, refuse_questions
from fpipe.record.reads.accesses import Reads, record_reads
from fpipe.record.reads.watch import Watch, Watcher
from fpipe.record.validity import name_of, require_valid
from fpipe.record.variant import TRAINING, Variant
from fpipe.tensors.fake import fake_mode

_LOG: Final = logging.getLogger(__name__)
LONGEST_STREAK = 3
"""The number of captures in a row for the same reason after which there is a warning."""


@dataclass
class Streak:
    """Counts captures in a row that were made for the same `reason`; logs one warning for each reason."""

    reason: str = ""
    count: int = 0
    warned: set[str] = field(default_factory=set)

    def note(self, reason: str) -> None:
        """Count a capture; `reason`: what it was made for, or empty."""
        self.count = self.count + 1 if reason == self.reason else 1
        self.reason = reason
        if reason and self.count >= LONGEST_STREAK and reason not in self.warned:
            self.warned.add(reason)
            _LOG.warning(
                "%s: the model was recorded %d times in a row because of it, which takes as long as many steps: each "
                "new value is another program. If it changes in every step, pass it as a tensor, only compute with it "
                "(without int(), range(), shapes or indices), or move it out of the forward.",
                reason,
                self.count,
            )


@dataclass(frozen=True, eq=False)
class Captures:
    """A model's captures, remembered for each kind of microbatch.

    - `model`: its skeleton.
    - `batchings`: how batches are split, with the loss and without.
    - `backward`: whether gradients are ever computed. `hooks`: the hooks on gradients of parameters.
    - `watching`: makes the watch on a capture's assumptions.
    - `streak`: warns of captures in a row for the same reason.
    - `ranks_of`: as in `Captured`.
    """

    model: nn.Module
    loss: Loss | None
    batchings: Mapping[bool, Batching]
    front_end: CaptureFunction
    cuts: partition.Cuts
    backward: bool
    hooks: Hooks
    watching: Watcher
    memo: Memo = field(default_factory=Memo)
    streak: Streak = field(default_factory=Streak)
    ranks_of: Mapping[int, int] = field(default_factory=dict)

    def with_example(self, example: SplitBatch) -> Captures:
        """Return the same captures with the signature of `example`, which includes its answers."""
        batchings = {**self.batchings, True: replace(self.batchings[True], example=example.signature)}
        return replace(self, batchings=batchings)

    def with_batchings(self, batchings: Mapping[bool, Batching]) -> Captures:
        """Return the same captures for batches that are split otherwise, into the same slices."""
        slicing = self.batchings[True].slicing
        return replace(self, batchings={has_loss: replace(one, slicing=slicing) for has_loss, one in batchings.items()})

    def find(self, variant: Variant, microbatch: Microbatch) -> Question | KnownMicrobatch | None:
        """Return the model's next question about a microbatch, or its recording; `None` if neither is known."""
        return self.memo.microbatches.get((variant.capture, microbatch))

    def of(self, variant: Variant, microbatch: Microbatch) -> KnownMicrobatch:
        """Return the recording for a microbatch whose answers are all known; outputs make no difference."""
        if not isinstance(self.find(variant, microbatch), KnownMicrobatch):
            told = self.explore(variant, microbatch, refuse_questions)
            assert told == microbatch, "all answers are known, and none is left over"
        found = self.find(variant, microbatch)
        assert isinstance(found, KnownMicrobatch), "it has just been recorded"
        return found

    @property
    def computes_loss(self) -> bool:
        """True if the loss is a function of the outputs alone."""
        return not self.batchings[True].has_targets and self.loss is not None

    def explore(self, variant: Variant, microbatch: Microbatch, ask: Ask) -> Microbatch:
        """Capture the model for a microbatch; return the microbatch with all answers, getting new ones from `ask`.

        If the model can't be recorded in the usual way, try others.
        """
        bare = variant.capture, replace(microbatch, answers=())
        way = self.memo.ways.get(bare, Way(plain=not is_tracer(self.front_end)))
        try:
            return self._explore(variant, microbatch, ask, way)
        except WayError as error:
            for self.memo.ways[bare] in error.others:
                with suppress(CaptureError):
                    return self._explore(variant, microbatch, ask, self.memo.ways[bare])
            raise (error.__cause__ or error) from None

    def _explore(self, variant: Variant, microbatch: Microbatch, ask: Ask, way: Way) -> Microbatch:
        variant, known = variant.capture, iter(microbatch.answers)
        told = replace(microbatch, answers=())

        def answer(question: Question) -> Answer:
            nonlocal told
            self.memo.microbatches[variant, told] = question
            told = told.with_answer(next(known, None) or ask(question))
            return told.answers[-1]

        captured, reads = self.record(variant, microbatch, answer, way)
        watch = self.watching.watch(reads, variant.training)
        self.streak.note(self._reason(variant, told))
        self.memo.microbatches[variant, told] = KnownMicrobatch(captured, watch, way)
        return told

    def _reason(self, variant: Variant, new: Microbatch) -> str:
        """Return what differs from the newest capture for the same shapes, besides tensors; empty if there is none."""
        alike = [one for known, one in self.memo.recordings if known == variant and one.leaves == new.leaves]
        if not alike:
            return ""
        old = alike[-1]
        if old.program != new.program:
            pairs = zip(old.structure.constants, new.structure.constants, strict=False)
            path = next((new.structure.paths[leaf] for (_, was), (leaf, now) in pairs if was != now), "")
            names = {"[0]": "inputs", "[1]": "targets"}
            return f"the batch's {names.get(path[:3], path[:3])}{path[3:]}, which is not a tensor"
        pairs_of_answers = enumerate(zip(old.answers, new.answers, strict=False))
        number = next((k for k, (was, now) in pairs_of_answers if was != now), 0)
        question = self.memo.microbatches.get((variant, replace(new, answers=new.answers[:number])))
        if not isinstance(question, Question):
            return ""
        leaves = ", ".join(name_leaf(new.structure, leaf) for leaf in question.leaves)
        return f"{question.where}, which asks for the value of something computed from {leaves}"

    def record(self, variant: Variant, microbatch: Microbatch, ask: Ask, way: Way) -> tuple[Captured, Reads]:
        """Return the model, captured for a microbatch, and the attributes that were read; remember nothing."""
        try:
            with (
                nullcontext(Reads())
                if reads_bytecode(self.front_end)
                else record_reads(self.model, self.loss, self.watching.origin.places) as reads
            ):  # dynamo bypasses patches
                captured = self._capture(variant, microbatch, ask, way)
        finally:
            if not self.runs_python:
                classes = user_classes(self.model)
                remove_fakes(defining_files(classes, self.loss), classes, find_caches(self.model, self.loss))
        if captured.moved:
            require_own_state(captured.moved, {*reads.original, *self.watching.shared_attributes()})
        return captured, reads

    def watch(self, variant: Variant, microbatches: Iterable[Microbatch]) -> Watch:
        """Return the assumptions of the captures for these microbatches, which must still hold when they run."""
        return Watch.union(self.of(variant, one).watch for one in dict.fromkeys(microbatches))

    @property
    def runs_python(self) -> bool:
        """True if modules that are not cut apart run as Python in every step."""
        return is_eager(self.front_end)

    def objective(self, variant: Variant, microbatch: Microbatch) -> Objective:
        """Return the computation to capture for such a microbatch."""
        loss = self.loss if variant.loss else None
        whole = Objective(loss, microbatch.structure, microbatch.divisor, casts=variant.casts, ranks_of=self.ranks_of)
        return replace(whole, slicing=self.batchings[True].slicing)

    def _with_plain_numbers(self, objective: Objective, tensors: int) -> Objective:
        """Return the objective with Python numbers in its batch, which are a question about the batch."""
        batch = objective.batch
        leaves = tuple(range(tensors, tensors + len(batch.numbers)))
        if leaves:
            names = ", ".join(name_leaf(batch, leaf) for leaf in leaves)
            where = f"the model, given {names}"
            question = Question(where, leaves, lambda found: Answer.of([one.item() for one in found]), None)
            batch = batch.with_numbers(objective.ask(question).result())
        return replace(objective, batch=batch)

    def _capture(self, variant: Variant, microbatch: Microbatch, ask: Ask, way: Way) -> Captured:
        with torch.inference_mode(False), fake_mode():
            leaves = [torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=s.device) for s in microbatch.leaves]
        objective = replace(self.objective(variant, microbatch), ask=ask, way=way)
        if way.plain:
            leaves = leaves[: len(objective.batch.names)]
            objective = self._with_plain_numbers(objective, len(leaves))
        backward = variant.training and self.backward
        mode = nullcontext() if variant.training else evaluation(self.model)
        with torch.inference_mode(False), torch.set_grad_enabled(backward), mode:
            captured = self.front_end(self.model, objective, leaves)
            require_valid(captured, name_of(self.front_end), self.model, objective, leaves)
        slices = () if self.slices == 1 else partition.find_slices(captured, self.slices)
        return replace(captured, backward=backward, hooks=self.hooks, ranks_of=self.ranks_of, slices=slices)

    @property
    def slices(self) -> int:
        """The number of slices of a microbatch."""
        return self.batchings[True].slices

    def positions(self, variant: Variant, microbatch: Microbatch) -> tuple[int, ...]:
        """Return the positions of the units at which new stages begin: at the same modules for all microbatches.

        For all but the example's first one in training, those are where that one is cut.
        """
        captured = self.of(variant, microbatch).captured
        is_first = (variant.capture, microbatch) == self._first
        if captured.slices:
            what = f"slices of microbatches of {microbatch}"
            own = partition.cut_at_marks(Calls.of(captured.slice(0), self.model), self.marks(), what)
            return partition.cut_slices(captured, self.model, self.marks(), self._first_positions if is_first else own)
        if is_first:
            return self._first_positions
        if isinstance(self.cuts.where, partition.Marked):
            return self.cuts.positions(captured, self.model)
        what = f"{'in training' if variant.training else 'in eval mode'} with microbatches of {microbatch}"
        return partition.cut_at_marks(Calls.of(captured, self.model), self.marks(), what)

    def marks(self) -> tuple[tuple[Mark, ...], ...]:
        """Return, for each stage but the first, the calls that begin or end where it begins in the example."""
        calls = Calls.of(self.of(*self._first).captured.slice(0), self.model)
        return tuple(calls.marks(position) for position in self._first_positions)

    @cached_property
    def _first(self) -> MicrobatchKind:
        batching = self.batchings[True]
        return TRAINING.capture, batching.split(batching.example)[0]

    @cached_property
    def _first_positions(self) -> tuple[int, ...]:
        return self.cuts.positions(self.of(*self._first).captured.slice(0), self.model)
