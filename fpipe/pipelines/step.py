# SPDX-License-Identifier: Apache-2.0
"""The functions that a user calls in every step: check the arguments, agree with all ranks, run, and collect.

Runs when `value_and_grad` or `evaluate` is called; the functions that they return run in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from typing import Any, Protocol

from fpipe.errors import InputError
from fpipe.ir.variant import EVALUATION, Variant
from fpipe.pipelines.autocast import require_gradients, suspend_autocast
from fpipe.pipelines.earlier_sums import assign_sums, join_sums, require_sums
from fpipe.pipelines.fields import CommonArguments
from fpipe.pipelines.handshake import agree_on_plan, agree_to_step
from fpipe.pipelines.inputs import State, start_backward
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.results import Step, collect_gradients, gather
from fpipe.runtime.recording import Record
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
            require_gradients()
            require_state("params", params, pipe.training.params)
            require_state("buffers", buffers, pipe.training.buffers)
            require_flags(params, pipe.training.assembly.captured.trainable, pipe.caches.trainable)
            sums, what = {} if onto is None else onto, scale_variant(cast, scale)
            require_sums(sums, params, pipe.training, what)
            batch = pipe.batch(what, inputs, targets, pipe.ranks.exchange_text, total)
            call = CommonArguments(seed, scale, total, onto is not None)
            plan, given = agree_to_step(pipe, what, params, buffers, batch, call)
            given = given._replace(starts=start_backward(plan.local_stages, scale), onto=assign_sums(sums, plan, what))
            outcomes = pipe.run(plan, given, record)
            grads = join_sums(sums, collect_gradients(plan, outcomes), plan)
            return gather(plan, pipe.ranks, outcomes, buffers), {name: grads[name] for name in params if name in grads}

    return step


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
            require_state("params", params, pipe.training.params)
            require_state("buffers", buffers, pipe.training.buffers)
            has_loss = pipe.computes_loss or pipe.ranks.agree_if_any(targets is not None)
            variant = replace(what, loss=has_loss)
            batch = pipe.batch(variant, inputs, targets, pipe.ranks.exchange_text)
            plan, given = agree_to_step(pipe, variant, params, buffers, batch, CommonArguments(seed))
            outcomes = pipe.run(plan, given, record)
            return gather(plan, pipe.ranks, outcomes, buffers)

    return step
