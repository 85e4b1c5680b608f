# SPDX-License-Identifier: Apache-2.0
"""Turn the user's arguments into each rank's inputs.

Runs in every step, before ranks agree to begin it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from fpipe.errors import InputError
from fpipe.meshes.exchange import CopyLinks, Exchange
from fpipe.pipelines.batch import SplitBatch
from fpipe.pipelines.memory import require_apart
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.captured import Tensors
from fpipe.runtime.executor import Inputs
from fpipe.stages.accumulation import Grads
from fpipe.stages.assembly import Assembly
from fpipe.stages.prologue import Feed
from fpipe.stages.stage import ModelStage
from fpipe.tensors import random
from fpipe.tensors.placed import complete_part
from fpipe.weights.state import require_state_names

EVERY: Final = slice(None)
State: TypeAlias = dict[str, Tensor]
"""Parameters, buffers or gradients, by the model's own names."""


def scatter(
    plan: StepPlan, params: State, buffers: State, batch: SplitBatch, seed: int | None, links: CopyLinks | None = None
) -> Inputs:
    """Return the executor's inputs for this process's stages, of one copy of the pipeline.

    `params` are the plain tensors of that copy; `links` are its groups, if there are others. Raise `InputError` if
    anything is missing or wrong.
    """
    local, slices = plan.local_stages, plan.slices
    try:
        weights = Weights(plan, params)
        own = {stage.index: tuple([buffers[name] for name in stage.buffers]) for stage in local}
    except KeyError:
        require_state_names([name for stage in local for name in (*stage.parameters, *stage.buffers)], params, buffers)
        raise
    rows, skips = feed_stages(plan, buffers, batch)
    return Inputs(
        params=[weights.by_cut[cut] for cut in plan.assemblies],
        buffers=[own] * len(plan.assemblies),
        batch=lambda stage, unit: rows[unit][stage](unit // slices),
        keys=make_keys(plan, seed),
        skips=[i * slices + k for i in skips for k in range(slices)],
        group=None if links is None else weights.exchange(links),
    )


def feed_stages(plan: StepPlan, buffers: State, batch: SplitBatch) -> tuple[list[Mapping[int, Feed]], Sequence[int]]:
    """Return what enters this process's stages, per microbatch and stage, and the microbatches of weight 0.

    These are empty where the loss isn't computed. Raise `InputError` if leaves that the model modifies share memory.
    """
    require_apart(batch.memories, plan.modified_leaves)
    here = {cut: [cut.stages[stage.index] for stage in plan.local_stages] for cut in plan.cuts}
    leaves = _take_share(plan, batch, {leaf for stages in here.values() for stage in stages for leaf in stage.batch})
    feeds = {cut: {stage.index: feed(stage, leaves, buffers) for stage in stages} for cut, stages in here.items()}
    skips = find_skips(batch, plan.rows_of(plan.copy)) if len(batch.known) in leaves else ()
    return [feeds[cut] for cut in plan.assemblies], skips


class Weights:
    """The parameters of this process's stages in one step, in the form that their functions take.

    If weights are sharded, a stage has them only while they are gathered.

    - `by_cut`: for each way in which microbatches are cut, by stage.
    - `users`: how many ranks of this process have gathered each stage.
    """

    def __init__(self, plan: StepPlan, params: State) -> None:
        self.plan, self.params = plan, params
        self.by_cut: dict[Assembly, dict[int, Any]] = {cut: {} for cut in plan.cuts}
        self.users: Counter[int] = Counter()
        if plan.copies.shards == 1:
            for stage in plan.local_stages:
                self._put(stage.index, params)

    def exchange(self, links: CopyLinks) -> Exchange:
        """Return the collectives of a step with these weights."""
        shards = {s.index: tuple([self.params[name] for name in s.parameters]) for s in self.plan.local_stages}
        return Exchange(links, self.plan.layouts, shards, self._enter, self._leave, self._complete)

    def _put(self, s: int, params: State) -> None:
        for cut, by_stage in self.by_cut.items():
            by_stage[s] = cut.stages[s].leaves(params)

    def _enter(self, s: int, tensors: Tensors) -> None:
        self.users[s] += 1
        if self.users[s] == 1:
            self._put(s, dict(zip(self.plan.assembly.stages[s].parameters, tensors, strict=True)))

    def _leave(self, s: int) -> None:
        self.users[s] -= 1  # two ranks of this process may hold replicas of a stage: the last one frees it
        for by_stage in self.by_cut.values() if not self.users[s] else ():
            del by_stage[s]

    def _complete(self, s: int, grads: Grads) -> Grads:
        """Return the gradients of a stage, dense; those that are still to be summed over the model's modules are."""
        placed, names = self.plan.placed_gradients, self.plan.assembly.stages[s].grads
        dense = [one.to_dense() if one is not None and one.is_sparse else one for one in grads]
        return tuple(
            complete_part(placed[name], one) if one is not None and name in placed else one
            for name, one in zip(names, dense, strict=True)
        )


def find_skips(batch: SplitBatch, rows: slice = EVERY) -> list[int]:
    """Return which of some microbatches count for nothing, because their weight is 0, in all slices."""
    if batch.batching.weight is None:
        return []
    slices, scales = batch.batching.slices, batch.scales
    counts = [any(scales[first : first + slices]) for first in range(0, len(scales), slices)]
    return [i for i, some in enumerate(counts[rows]) if not some]


def _take_share(plan: StepPlan, batch: SplitBatch, needed: Iterable[int]) -> dict[int, Sequence[Tensor]]:
    """Return the microbatches of the needed leaves that a copy trains on."""
    return {leaf: parts[plan.rows_of(plan.copy)] for leaf, parts in batch.take(needed).items()}


def start_backward(units: Sequence[Iterable[ModelStage]], scale: float | None) -> dict[tuple[int, int], Tensors]:
    """Return the cotangents of the loss, by stage and unit, for stages that are passed one.

    `units` has the stages of each microbatch or slice.
    """
    made = {
        spec: torch.full(spec.shape, scale or 1.0, dtype=spec.dtype, device=spec.device)
        for spec in {spec for stages in units for stage in stages for spec in stage.start}
    }
    pairs = [(stage, i) for i, stages in enumerate(units) for stage in stages if stage.start]
    return {(stage.index, i): tuple([made[spec] for spec in stage.start]) for stage, i in pairs}


def feed(stage: ModelStage, leaves: Mapping[int, Sequence[Tensor]], buffers: State) -> Feed:
    """Return what enters a stage from outside of the pipeline in one step, given the leaves and buffers it needs."""
    rows = list(zip(*[leaves[leaf] for leaf in stage.batch], strict=True))
    return Feed(stage.prologue, rows, tuple([buffers[name] for name in stage.buffers]))


def make_keys(plan: StepPlan, seed: int | None) -> list[int]:
    """Return one key per microbatch; raise `InputError` if the model draws random numbers and there is no seed.

    Keys are slow to make, so none are made if nothing is drawn. If data decide whether anything is drawn, drawing
    without a seed raises in the forward that does it.
    """
    if seed is None and plan.devices:
        raise InputError(
            "seed: got none, expected an integer: the model draws random numbers. Pass seed=step, a new one each step."
        )
    count, slices = len(plan.assemblies), plan.slices
    if seed is None or not plan.generators:
        return [random.Unseeded()] * count
    first = plan.copy * plan.microbatches
    return [random.key(seed, first + unit // slices) for unit in range(count)]
