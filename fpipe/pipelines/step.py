# SPDX-License-Identifier: Apache-2.0
"""The functions that a user calls in every step: check the arguments, agree with all ranks, run, and collect.

Runs when `value_and_grad` or `evaluate` is called; the functions that they return run in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isfinite
from typing import Any, NamedTuple, Protocol

from fpipe.errors import InputError
from fpipe.ir.variant import EVALUATION, Variant
from fpipe.pipelines.autocast import require_gradients, suspend_autocast
from fpipe.pipelines.earlier_sums import assign_sums, join_sums, require_sums
from fpipe.pipelines.fields import CommonArguments
from fpipe.pipelines.handshake import agree_on_plan, agree_to_step
from fpipe.pipelines.inputs import State, start_backward
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.plan import Plan
from fpipe.pipelines.results import Step, collect_gradients, gather
from fpipe.runtime.executor import Inputs, Outcome
from fpipe.runtime.recording import Record
from fpipe.weights.border import unwrap_state, wrap_state
from fpipe.weights.state import require_flags, require_state


class ValueAndGrad(Protocol):
    """The type of the functions that `value_and_grad` and `reference` return."""

    def __call__(
        self,
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
        """Run one step; return its loss, outputs and new buffers, and the gradients by parameter name."""


def make_training_step(pipe: Pipeline, variant: Variant, record: Record | None) -> ValueAndGrad:
    """Return the function that `fpipe.value_and_grad` returns, once all ranks have agreed on the example's plan."""
    with suspend_autocast(variant), pipe.ranks.enter_call("value_and_grad"):
        agree_on_plan(pipe, variant)

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
        with suspend_autocast(variant) as cast, pipe.ranks.enter_call("a step"):
            start = Start(params, buffers, {} if onto is None else onto)
            call = CommonArguments(seed, scale, total, onto is not None)
            plan, given = begin_step(pipe, cast, start, (inputs, targets), call)
            return finish_step(pipe, plan, start, pipe.run(plan, given, record))

    return step


class Start(NamedTuple):
    """The tensors of this process that a step begins with; `onto`: earlier sums of gradients, if any."""

    params: State
    buffers: State
    onto: State


def begin_step(
    pipe: Pipeline, cast: Variant, start: Start, batch: tuple[Any, Any], call: CommonArguments
) -> tuple[Plan, Inputs]:
    """Check the arguments of a step and agree with all ranks; return its plan, and what this process runs it with."""
    require_gradients()
    given_params, start = start.params, _unwrap(pipe, start)
    require_state("params", start.params, pipe.training.params)
    require_state("buffers", start.buffers, pipe.training.buffers)
    require_flags(given_params, pipe.training.assembly.captured.trainable, pipe.caches.trainable)
    variant = scale_variant(cast, call.scale)
    require_sums(start.onto, start.params, pipe.training, variant)
    split = pipe.batch(variant, *batch, pipe.ranks.exchange_text, call.total)
    plan, given = agree_to_step(pipe, variant, start.params, start.buffers, split, call)
    starts = start_backward(plan.local_stages, call.scale)
    return plan, given._replace(starts=starts, onto=assign_sums(start.onto, plan, variant))


def finish_step(pipe: Pipeline, plan: Plan, start: Start, outcomes: Mapping[int, Outcome]) -> tuple[Step, State]:
    """Return what all ranks computed, and the gradients of this process, in the order of its parameters."""
    start = _unwrap(pipe, start)
    grads = join_sums(start.onto, collect_gradients(plan, outcomes), plan)
    step = gather(plan, pipe.ranks, outcomes, start.buffers)
    ordered = {name: grads[name] for name in start.params if name in grads}
    return place_buffers(step, plan), wrap_state(ordered, plan.placed_gradients)


def place_buffers(step: Step, plan: Plan) -> Step:
    """Return the step with DTensors for those buffers that are DTensors in the model."""
    return step._replace(buffers=wrap_state(step.buffers, plan.placed))


def _unwrap(pipe: Pipeline, start: Start) -> Start:
    """Return the local tensors that a step begins with; raise `InputError` if some are not placed as expected."""
    plan = pipe.training
    return Start(
        unwrap_state("params", start.params, plan.placed),
        unwrap_state("buffers", start.buffers, plan.placed),
        unwrap_state("onto", start.onto, plan.placed_gradients),
    )


def scale_variant(variant: Variant, scale: object) -> Variant:
    """Return the variant for losses scaled by `scale`, if not `None`; raise `InputError` unless it is a number."""
    if scale is None:
        return variant
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not (isfinite(scale) and scale > 0):
        raise InputError(
            f"scale: got {scale!r}, expected a finite number above 0, the same on every rank. Pass a float; for a "
            "tensor, its .item()."
        )
    return replace(variant, scaled=True)


def make_evaluation_step(pipe: Pipeline, record: Record | None) -> Callable[..., Step]:
    """Return the function that `fpipe.evaluate` returns."""

    def step(params: State, buffers: State, inputs: Any, targets: Any = None, *, seed: int | None = None) -> Step:
        with suspend_autocast(EVALUATION) as what, pipe.ranks.enter_call("an evaluation"):
            params, buffers, _ = _unwrap(pipe, Start(params, buffers, {}))
            require_state("params", params, pipe.training.params)
            require_state("buffers", buffers, pipe.training.buffers)
            has_loss = pipe.computes_loss or pipe.ranks.agree_if_any(targets is not None)
            variant = replace(what, loss=has_loss)
            batch = pipe.batch(variant, inputs, targets, pipe.ranks.exchange_text)
            plan, given = agree_to_step(pipe, variant, params, buffers, batch, CommonArguments(seed))
            outcomes = pipe.run(plan, given, record)
            return place_buffers(gather(plan, pipe.ranks, outcomes, buffers), plan)

    return step
