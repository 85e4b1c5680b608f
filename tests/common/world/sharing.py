# SPDX-License-Identifier: Apache-2.0
"""Share what many cases compute alike: the model of a setup, its captures and stages, and its run on one device.

Capturing and cutting a model take most of the time of a case, and depend on neither faults nor time. So they are done
once for each setup, by whichever rank comes first.

Invariant: a case takes the same course whether something is made or found. A capture that is found asks the same
questions about its batch again, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

from fpipe.meshes.copies import ALONE
from fpipe.pipelines import builder, modes
from fpipe.pipelines.batch import Signature
from fpipe.pipelines.builder import Builder
from fpipe.pipelines.captures import Captures
from fpipe.pipelines.memo import Memo
from fpipe.pipelines.planner import Planner
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.fakes.eager_types import hide_fakes
from fpipe.record.questions import Ask, Question
from fpipe.record.variant import Variant


class Shelf:
    """What was made so far for one setup, by what determines it."""

    def __init__(self) -> None:
        self.made: dict[Any, Any] = {}

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what was made for this key; make it if it is not there."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Return the context in which pipelines take captures and stages from the shelf."""
        captures = Builder._captures
        explore, assemble, plan = Captures.explore, Planner._assemble, Planner._plan

        def find_captures(builder: Builder, module: Any) -> Captures:
            key = "captures", id(module), builder.gradients.backward, builder.schedule.backward
            found = self.keep(key, lambda: (captures(builder, module), module))[0]
            return replace(found, batchings=builder.batchings, cuts=builder.cuts, memo=Memo(builder.recording.plans))

        def find_capture(cache: Captures, variant: Variant, microbatch: Any, ask: Ask) -> Any:
            model, mode, known = id(cache.model), variant.capture, iter(microbatch.answers)
            told, memo = replace(microbatch, answers=()), cache.memo.microbatches
            while isinstance(found := self.made.get(("told", model, mode, told)), Question):
                memo[mode, told] = found
                told = told.with_answer(next(known, None) or ask(found))
            if found is None:
                with hide_fakes():
                    told = explore(cache, variant, told, ask)
                questions = {kind: one for kind, one in memo.items() if isinstance(one, Question)}
                for kind, one in {**questions, (mode, told): memo[mode, told]}.items():
                    self.made["told", model, *kind] = one
            memo[mode, told] = self.made["told", model, mode, told]
            return told

        def find_assembly(made: Planner, variant: Variant, microbatch: Any) -> Any:
            model, positions = id(made.captures.model), made.captures.positions(variant, microbatch)
            ranks = () if made.backend is None else made.ranks
            key = "stages", model, variant, microbatch, positions, made.schedule.placement, made.summed, ranks
            with nullcontext() if key in self.made else hide_fakes():
                return self.keep(key, lambda: assemble(made, variant, microbatch))

        def find_plan(made: Planner, variant: Variant, signature: Signature) -> StepPlan:
            if made.extra is not None:
                return plan(made, variant, signature)
            cache, copies = made.captures, made.copies

            def make() -> tuple[StepPlan, dict[Any, Any]]:
                return plan(made, variant, signature), dict(cache.memo.microbatches)

            layout = copies.replicas, copies.shards, copies.here, copies.own_rows, copies.gathered
            key = "plan", id(cache.model), variant, signature, made.schedule, made.summed, made.ranks, layout
            found, contents = self.keep((*key, made.backend is None), make)
            cache.memo.microbatches.update(contents)
            return found if copies is ALONE else replace(found, copies=copies)

        with (
            mock.patch.object(Planner, "_plan", find_plan),
            mock.patch.object(modes, "hide_fakes", nullcontext),
            mock.patch.object(builder, "hide_fakes", nullcontext),
            mock.patch.object(Builder, "_captures", find_captures),
            mock.patch.object(Captures, "explore", find_capture),
            mock.patch.object(Planner, "_assemble", find_assembly),
        ):
            yield
