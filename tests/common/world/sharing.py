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
from fpipe.pipelines import modes
from fpipe.pipelines.builder import Builder
from fpipe.pipelines.capture_cache import CaptureCache
from fpipe.pipelines.planner import Planner
from fpipe.pipelines.signature import Signature
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.fakes.eager_types import hide_fakes
from fpipe.record.questions import Ask
from fpipe.record.reads.accesses import Reads
from fpipe.record.reads.watch import Watcher
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
        captures, watch = Builder._captures, Watcher.watch
        explore, assemble, plan = CaptureCache.explore, Planner._assemble, Planner._plan

        def find_captures(builder: Builder, module: Any) -> CaptureCache:
            key = "captures", id(module), builder.backend is None, builder.schedule.backward
            found = self.keep(key, lambda: (captures(builder, module), module))[0]
            empty: dict[str, Any] = {name: {} for name in ("captured", "reads", "positions", "questions", "watches")}
            return replace(found, batchings=builder.batchings, cuts=builder.cuts, **empty)

        def find_capture(cache: CaptureCache, variant: Variant, microbatch: Any, ask: Ask) -> Any:
            model, mode = id(cache.model), variant.capture
            told, known = replace(microbatch, answers=()), iter(microbatch.answers)
            while ("question", model, mode, told) in self.made:
                cache.questions[mode, told] = question = self.made["question", model, mode, told]
                told = told.with_answer(next(known, None) or ask(question))
            if ("captured", model, mode, told) not in self.made:
                with hide_fakes():
                    told = explore(cache, variant, told, ask)
                for asked, question in cache.questions.items():
                    self.made["question", model, *asked] = question
                self.made["captured", model, mode, told] = cache.captured[mode, told], cache.reads[mode, told]
            cache.captured[mode, told], cache.reads[mode, told] = self.made["captured", model, mode, told]
            return told

        def find_watch(watcher: Watcher, reads: Reads, training: bool) -> Any:
            return self.keep(("watch", id(reads), training), lambda: (watch(watcher, reads, training), reads))[0]

        def find_assembly(made: Planner, variant: Variant, microbatch: Any) -> Any:
            model, positions = id(made.captures.model), made.captures.of(variant, microbatch)[1]
            ranks = () if made.backend is None else made.ranks
            key = "stages", model, variant, microbatch, positions, made.schedule.placement, made.summed, ranks
            with nullcontext() if key in self.made else hide_fakes():
                return self.keep(key, lambda: assemble(made, variant, microbatch))

        def find_plan(made: Planner, variant: Variant, signature: Signature) -> StepPlan:
            if made.extra is not None:
                return plan(made, variant, signature)
            cache, copies = made.captures, made.copies
            caches = cache.captured, cache.reads, cache.positions, cache.watches, cache.questions
            filled: list[dict[Any, Any]] = [made.assemblies, *caches]

            def make() -> tuple[StepPlan, list[dict[Any, Any]]]:
                return plan(made, variant, signature), [dict(one) for one in filled]

            layout = copies.replicas, copies.shards, copies.here, copies.own_rows, copies.mean, copies.gathered
            key = "plan", id(cache.model), variant, signature, made.schedule, made.summed, made.ranks, layout
            found, contents = self.keep((*key, made.backend is None), make)
            for one, more in zip(filled, contents, strict=True):
                one.update(more)
            return found if copies is ALONE else replace(found, copies=copies)

        with (
            mock.patch.object(Planner, "_plan", find_plan),
            mock.patch.object(modes, "hide_fakes", nullcontext),
            mock.patch.object(Builder, "_captures", find_captures),
            mock.patch.object(CaptureCache, "explore", find_capture),
            mock.patch.object(Watcher, "watch", find_watch),
            mock.patch.object(Planner, "_assemble", find_assembly),
        ):
            yield
