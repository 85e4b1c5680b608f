# SPDX-License-Identifier: Apache-2.0
"""A step on one device: the function that `fpipe.reference` returns.

Runs when `reference` or `verify` is called; the function that it returns runs one step per call.
"""

from __future__ import annotations

from typing import Any

from fpipe.errors import InputError
from fpipe.network.ranks import wait_for_turn
from fpipe.pipelines.earlier_sums import add_reduced, join_sums, negative_zeros
from fpipe.pipelines.inputs import State, make_keys, start_backward
from fpipe.pipelines.memory import require_apart
from fpipe.pipelines.modes import require_gradients, suspend_autocast
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.results import Step, merge_results
from fpipe.pipelines.signature import Signature
from fpipe.pipelines.step import ValueAndGrad, place_buffers, scale_variant
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.variant import Variant
from fpipe.stages.kinds import require_alike_uncut
from fpipe.tensors import random
from fpipe.tensors.arguments import require_seed, require_tensors
from fpipe.tensors.placed import unwrap_state, wrap_state
from fpipe.verification.one_device import run_on_one_device
from fpipe.weights.state import Form, require_recordable


def make_reference_step(pipe: Pipeline, variant: Variant) -> ValueAndGrad:
    """Return the function that runs a step of the captured, uncut model in a plain microbatch loop."""
    known = pipe.plan(variant).assembly
    require_whole_batches(pipe)
    forms = Form("params", known.parameters, known.placed), Form("buffers", known.buffers, known.placed)

    def step(
        params: State,
        buffers: State,
        inputs: Any,
        targets: Any = None,
        *,
        seed: int | None = None,
        onto: State | None = None,
        scale: float | None = None,
        total: float | None = None,
    ) -> tuple[Step, State]:
        params, buffers = forms[0].unwrap(params), forms[1].unwrap(buffers)
        require_gradients()
        require_seed(seed)
        require_tensors("onto", {} if onto is None else onto)
        sums = {} if onto is None else unwrap_state("onto", onto, known.placed_gradients)
        with suspend_autocast(variant) as cast:
            what = scale_variant(cast, scale)
            batch = pipe.batch(what, inputs, targets, total=total)
            require_recordable(batch.named_leaves())
            for name, leaves in (("params", params), ("buffers", buffers), ("onto", sums)):
                require_recordable(leaves, name)
            plan = _plan(pipe, what, batch.signature)
            plan.watch.require_unchanged()
            require_apart(batch.memories, plan.modified_leaves)
            parts = batch.take({leaf for cut in plan.assemblies for leaf in cut.whole.batch})
            whole = plan.assembly.whole
            first = {} if what.sums is None else dict(zip(whole.grads, map(negative_zeros, whole.totals), strict=True))
            keys, start = make_keys(plan, seed), start_backward([whole], scale).get(0, ())
            with wait_for_turn(), random.preserve_generators(plan.generators):
                results, state, made = run_on_one_device(plan, params, buffers, parts, keys, sums, first, start)
        new = {**buffers, **dict(zip(plan.assembly.whole.buffers, state, strict=True))}
        grads = join_sums(sums, made, plan) if plan.copies.count == 1 else add_reduced(sums, join_sums({}, made, plan))
        out = place_buffers(Step(*merge_results(plan, results), new), plan)
        return out, wrap_state({name: grads[name] for name in params if name in grads}, known.placed_gradients)

    return step


def require_whole_batches(pipe: Pipeline) -> None:
    """Raise `InputError` for a pipeline whose processes are passed the rows of their own copy only."""
    if pipe.copies.own_rows and pipe.copies.count > 1:
        raise InputError(
            "pipe: got rows='own', expected rows='whole': one device runs the whole batch, which no process is passed. "
            "Build the pipeline with rows='whole' to compare."
        )


def _plan(pipe: Pipeline, variant: Variant, signature: Signature) -> StepPlan:
    """Return the plan for a kind of batch; of the plans on which ranks have not agreed, keep the last ones."""
    with wait_for_turn():
        plan = pipe.plan(variant, signature)
        require_alike_uncut(plan.assemblies)
        pipe.planner.keep_last(alone=pipe.planner.most)
        return plan
