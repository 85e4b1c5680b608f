# SPDX-License-Identifier: Apache-2.0
"""Turn the user's arguments into each rank's inputs.

Runs in every step, before ranks agree to begin it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from fpipe.batching.batch import SplitBatch
from fpipe.batching.memory import require_apart
from fpipe.errors import InputError
from fpipe.ir.captured import Tensors
from fpipe.pipelines.plan import Plan
from fpipe.runtime.executor import Inputs
from fpipe.stages.stage import Stage
from fpipe.tensors import random
from fpipe.weights.state import require_state_names

State: TypeAlias = dict[str, Tensor]
"""Parameters, buffers or gradients, by the model's own names."""


def scatter(plan: Plan, params: State, buffers: State, batch: SplitBatch, seed: int | None) -> Inputs:
    """Return the executor's inputs for this process's stages; raise `InputError` if anything is missing or wrong."""
    require_apart(batch.memories, plan.modified_leaves)
    local, microbatches = plan.local_stages, len(plan.assemblies)
    require_state_names([name for stage in local for name in (*stage.parameters, *stage.buffers)], params, buffers)
    here = {cut: [cut.stages[stage.index] for stage in local] for cut in plan.cuts}
    leaves = batch.take({leaf for stages in here.values() for stage in stages for leaf in stage.batch})
    by_cut = {cut: {s.index: s.leaves(params) for s in stages} for cut, stages in here.items()}
    parts = {cut: {s.index: _split_rows(s.batch, leaves, microbatches) for s in stages} for cut, stages in here.items()}
    rows = [parts[cut] for cut in plan.assemblies]
    return Inputs(
        params=[by_cut[cut] for cut in plan.assemblies],
        buffers=[{stage.index: tuple([buffers[name] for name in stage.buffers]) for stage in local}] * microbatches,
        batch=lambda stage, i: rows[i][stage][i],
        keys=make_keys(plan, seed),
    )


def start_backward(stages: Iterable[Stage], scale: float | None) -> dict[int, Tensors]:
    """Return the cotangents of the loss, by stage, for stages that are passed one."""
    return {
        stage.index: tuple([torch.full(s.shape, scale or 1.0, dtype=s.dtype, device=s.device) for s in stage.start])
        for stage in stages
        if stage.start
    }


def _split_rows(numbers: Sequence[int], leaves: Mapping[int, Sequence[Tensor]], microbatches: int) -> Sequence[Tensors]:
    """Return each microbatch's part of the leaves with these numbers."""
    return list(zip(*[leaves[leaf] for leaf in numbers], strict=True)) if numbers else [()] * microbatches


def make_keys(plan: Plan, seed: int | None) -> list[int]:
    """Return one key per microbatch; raise `InputError` if the model draws random numbers and there is no seed.

    Keys are slow to make, so none are made if nothing is drawn. If data decide whether anything is drawn, drawing
    without a seed raises in the forward that does it.
    """
    if seed is None and plan.devices:
        raise InputError(
            "seed: got none, expected an integer: the model draws random numbers. Pass seed=step, a new one each step."
        )
    count = len(plan.assemblies)
    if seed is None or not plan.generators:
        return [random.Unseeded()] * count
    return [random.key(seed, i) for i in range(count)]
