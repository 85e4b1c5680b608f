# SPDX-License-Identifier: Apache-2.0
"""Build the pipeline of a case, and run one step of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import fpipe
from fpipe.record.questions import Question
from schedules import Schedule, one_f_one_b
from tests.common.cases import Case, mse, rows_of
from tests.common.comparison import Result, assert_same
from tests.common.loops import loop, loop_as_stated
from tests.common.options import grouped
from tests.common.sizes import NIGHTLY

SEED = 5
FRONT_END = "export" if NIGHTLY else "trace"  # the slower one by night, where any will do


def build(
    case: Case, how: Schedule, rows: int, cuts: tuple[str, ...] | None = None, capture: str = FRONT_END, **options: Any
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
        **grouped({"front_end": capture, **options}),
    )
    return pipe, model, inputs, targets


def run(pipe, model, inputs, targets, seed=None) -> Result:
    """One step of a pipeline from the model's parameters."""
    step, grads = fpipe.value_and_grad(pipe, outputs=True)(*pipe.init(model), inputs, targets, seed=seed)
    return Result(step.loss, step.outputs, grads, step.buffers)


def require_loop(model, how: Schedule, cuts: Iterable[str] = (), rows: int = 6, loss=mse, **options: Any):
    """Return a pipeline of a model for rows of the usual batch; raise unless a step of it equals the plain loop."""
    inputs, targets = rows_of()(rows)
    pipe = fpipe.pipeline(
        model, example=inputs, targets=targets, loss=loss, schedule=how, cuts=[*cuts], **grouped(options)
    )
    want = loop(model, loss, inputs, targets, how.microbatches)
    assert_same(run(pipe, model, inputs, targets), want)
    return pipe


def run_reference(pipe, model, inputs, targets, seed=None) -> Result:
    """The same step by fpipe's reference, from the model's parameters."""
    state = dict(model.named_parameters()), dict(model.named_buffers())
    step, grads = fpipe.reference(pipe, outputs=True)(*state, inputs, targets, seed=seed)
    return Result(step.loss, step.outputs, grads, step.buffers)


def run_evaluation(pipe, model, inputs, targets) -> Result:
    """One evaluation, with the model's parameters."""
    step = fpipe.evaluate(pipe)(*pipe.init(model), inputs, targets)
    return Result(step.loss, step.outputs, {}, step.buffers)


def require_exact(
    case: Case,
    how: Schedule,
    rows: int | None = None,
    cuts: tuple[str, ...] | None = None,
    capture: str = FRONT_END,
    order: Iterable[int] | None = None,
) -> Result:
    """Raise unless a step of a case equals the reference and, if the model draws nothing, the plain loop.

    The batch has two rows for each microbatch where `rows` are not given. The loop runs its backwards in `order`; where
    stages have replicas, it adds gradients as the schedule states.
    """
    pipe, model, inputs, targets = build(case, how, rows or 2 * how.microbatches, cuts, capture)
    seed = SEED if case.random else None
    got = run(pipe, model, inputs, targets, seed=seed)
    assert_same(got, run_reference(pipe, model, inputs, targets, seed=seed))
    if not case.random and how.placement.mirrors:
        assert_same(got, loop_as_stated(pipe, model, case.loss, inputs, targets))
    elif not case.random:
        assert_same(got, loop(model, case.loss, inputs, targets, how.microbatches, order))
    return got


def open_questions(pipe):
    """The questions that a pipeline remembers, by kind of microbatch."""
    return {kind: one for kind, one in pipe.memo.microbatches.items() if isinstance(one, Question)}


def staged(model, inputs, targets=None, cuts: Iterable[str] = ("1",), microbatches: int = 2, **options: Any):
    """A pipeline with a stage more than `cuts`, under 1F1B and of mean squares unless `options` say otherwise."""
    how = one_f_one_b(ranks=len([*cuts]) + 1, microbatches=microbatches)
    loss = (lambda out: out.square().mean()) if targets is None else mse
    options = {"schedule": how, "loss": loss, **options}
    return fpipe.pipeline(model, example=inputs, targets=targets, cuts=[*cuts], **grouped(options))


def require_eager(model, inputs, targets=None, steps: int = 1, seed: int | None = None, **options: Any):
    """Return `staged(...)` of these; raise unless it equals the model, run eagerly."""
    pipe = staged(model, inputs, targets, **options)
    assert fpipe.verify(pipe, model, inputs, targets, steps=steps, seed=seed).eager
    return pipe
