# SPDX-License-Identifier: Apache-2.0
"""Build the pipeline of a case, and run one step of it."""

from __future__ import annotations

from typing import Any

import fpipe
from schedules import Schedule
from tests.common.cases import Case
from tests.common.comparison import Result


def build(
    case: Case, how: Schedule, rows: int, cuts: tuple[str, ...] | None = None, capture: str = "export", **options: Any
):
    """A pipeline of a case: (pipe, model, inputs, targets). `options` are those of `fpipe.pipeline`."""
    model, inputs, targets = case.make(rows)
    pipe = fpipe.pipeline(
        model,
        example=inputs,
        targets=targets,
        loss=case.loss,
        schedule=how,
        cuts=case.at(how.stages) if cuts is None else cuts,
        capture=capture,
        **options,
    )
    return pipe, model, inputs, targets


def run(pipe, model, inputs, targets, seed=None) -> Result:
    """One step of a pipeline from the model's parameters."""
    step, grads = fpipe.value_and_grad(pipe, outputs=True)(*pipe.init(model), inputs, targets, seed=seed)
    return Result(step.loss, step.outputs, grads, step.buffers)


def run_reference(pipe, model, inputs, targets, seed=None) -> Result:
    """The same step by fpipe's reference, from the model's parameters."""
    state = dict(model.named_parameters()), dict(model.named_buffers())
    step, grads = fpipe.reference(pipe, outputs=True)(*state, inputs, targets, seed=seed)
    return Result(step.loss, step.outputs, grads, step.buffers)
