# SPDX-License-Identifier: Apache-2.0
"""Stages that exchange gradients of shared parameters with every batch of a stream.

Idea. `schedules.endless` adds stages for that, which give and take as others do. Here they get their part: which
tensors cross, and what a rank does with them.

Runs in every window of a stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fpipe.pipelines.step_plan import StepPlan
from fpipe.runtime.contract import StageCrossing
from fpipe.runtime.executor import Execution
from fpipe.runtime.handlers import HANDLERS
from fpipe.runtime.transport import Payload
from fpipe.stages.stage import ModelStage
from fpipe.streams.updates import StageUpdates
from fpipe.streams.versions import find_shared
from fpipe.tensors.spec import Spec
from schedules import Action
from schedules.endless import EndlessProgram

EMPTY: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class ExchangeStage:
    """A stage of a program that only gives or takes; it has what a linker asks of a stage.

    `act(slot, arrived)` returns what it gives with the batch of a slot.
    """

    gives: tuple[StageCrossing, ...]
    gets: tuple[StageCrossing, ...]
    act: Callable[[int, Payload], Payload]
    results = totals = pulls = pulled_by = shares = shared_by = EMPTY


def forward(run: Execution, action: Action, stage: Any, arrived: Payload) -> Payload:
    """Handle the forward of a stage, which may only give or take."""
    if isinstance(stage, ExchangeStage):
        return stage.act(action.microbatch, arrived)
    return HANDLERS["F"](run, action, stage, arrived)


class SharedGradients:
    """The gradients of shared parameters that one rank has, own and others', until it updates them.

    - `tied`: the stages of the rank that share parameters. `totals`: per stage and batch, its own gradients.
    - `arrived`: those of other stages, of the batch that the rank is about to take.
    """

    def __init__(self, plan: StepPlan, program: EndlessProgram, rank: int, updates: StageUpdates) -> None:
        self.plan, self.updates, self.shared = plan, updates, find_shared(plan.assembly)
        self.stages = plan.assembly.stages
        self.graph, self.count, self.tied = program.program.graph, len(self.stages), program.sharing
        self.own = [s for s in plan.placement.stages_on(rank) if s in self.tied]
        self.totals: dict[tuple[int, int], Any] = {}
        self.arrived: dict[tuple[int, int], Payload] = {}

    def keep(self, s: int, batch: int, total: Any) -> None:
        """Keep what a stage has summed of the shared parameters over a batch."""
        if s in self.tied:
            pairs = zip(self.stages[s].grads, total, strict=False)
            self.totals[s, batch] = tuple([grad if name in self.shared else None for name, grad in pairs])

    def make_stages(self, homes: tuple[int, ...], batch_of: Callable[[int], int]) -> dict[int, Any]:
        """Return the stages of a rank that give and take; `batch_of` maps slots to batches."""
        found: dict[int, Any] = {}
        ends = 3 * self.count if self.tied else self.count
        for q in homes:
            s = self.stages[q % self.count]
            if q < self.count:
                continue
            gives = tuple([self._crossing(q, target) for target in self.graph.feeds[q]])
            gets = tuple([self._crossing(source, q) for source in self.graph.fed_by[q]])
            if q >= ends:
                act = self._answer(gives)
            else:
                act = self._give(s, batch_of, gives) if q < 2 * self.count else self._take(s, batch_of, gets)
            found[q] = ExchangeStage(gives, gets, act)
        return found

    def _crossing(self, source: int, target: int) -> StageCrossing:
        """Return what crosses from a stage that gives to one that takes."""
        s, t = source % self.count, target % self.count
        if source < 2 * self.count and self.tied:
            stage = self.stages[s]
            (found,) = [one for one in stage.shares if one.target == t]
            return found._replace(source=source, target=target)
        return StageCrossing(source, target, ("answer",), (self._answer_spec,))

    @property
    def _answer_spec(self) -> Spec:
        device = next((spec.device for spec in self.plan.params.values()), torch.device("cpu"))
        return Spec((1,), (1,), torch.uint8, device)

    def _answer(self, gives: tuple[StageCrossing, ...]) -> Callable[[int, Payload], Payload]:
        spec = self._answer_spec
        return lambda slot, arrived: tuple([torch.zeros(1, dtype=spec.dtype, device=spec.device) for _ in gives])

    def _give(
        self, stage: ModelStage, batch_of: Callable[[int], int], gives: tuple[StageCrossing, ...]
    ) -> Callable[[int, Payload], Payload]:
        def act(slot: int, arrived: Payload) -> Payload:
            total = self.totals[stage.index, batch_of(slot)]
            parts = [stage.gradients_for(one.target % self.count, total) for one in gives]
            return tuple([grad for part in parts for grad in part])

        return act

    def _take(
        self, stage: ModelStage, batch_of: Callable[[int], int], gets: tuple[StageCrossing, ...]
    ) -> Callable[[int, Payload], Payload]:
        t = stage.index

        def act(slot: int, arrived: Payload) -> Payload:
            values = iter(arrived)
            for one in gets:
                self.arrived[one.source % self.count, t] = tuple([next(values) for _ in one.specs])
            if t == self.own[-1]:  # all gradients of the batch are here
                batch, others = batch_of(slot), dict(self.arrived)
                self.arrived.clear()
                grads = {s: self.totals.pop((s, batch)) for s in self.own}
                self.updates.apply_shared(self.own, batch, grads, others)
            return ()

        return act
