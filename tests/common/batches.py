# SPDX-License-Identifier: Apache-2.0
"""Pipelines for batches of any size, and the check that they are exact."""

import torch

import fpipe
from schedules import Schedule, interleaved_1f1b, one_f_one_b, recompute, zb_v
from tests.common.cases import WORDS, Case
from tests.common.comparison import Result, assert_same
from tests.common.loops import eval_loop, loop
from tests.common.options import grouped
from tests.common.running import run, run_evaluation, run_reference
from tests.common.schedules import SCHEDULES

FOUR = {
    "gpipe": SCHEDULES["gpipe"](ranks=4, microbatches=3),
    "1f1b": one_f_one_b(ranks=4, microbatches=3),
    "split": SCHEDULES["split_backward"](4, 3),
    "recomputed": recompute(one_f_one_b(ranks=4, microbatches=3)),
    "interleaved": interleaved_1f1b(ranks=2, microbatches=4, chunks=2),
    "v": zb_v(ranks=2, microbatches=4),
}


def build(case: Case, how: Schedule, rows: int, **options):
    model, inputs, targets = case.make(rows)
    cuts = case.at(how.stages) if case.cuts else None
    pipe = fpipe.pipeline(
        model, example=inputs, targets=targets, loss=case.loss, schedule=how, cuts=cuts, **grouped(options)
    )
    return pipe, model, inputs, targets


def require_exact_batch(pipe, model, inputs, targets, loss, rows=None, **how) -> Result:
    """Require that a step, its reference and an evaluation equal plain loops; return the result of the step.

    If there are fewer `rows` than microbatches, each is one.
    """
    got, m = run(pipe, model, inputs, targets), min(pipe.schedule.microbatches, rows or pipe.schedule.microbatches)
    assert_same(got, loop(model, loss, inputs, targets, m, **how))
    assert_same(got, run_reference(pipe, model, inputs, targets))
    assert_same(run_evaluation(pipe, model, inputs, targets), eval_loop(model, loss, inputs, targets, m, **how))
    return got


def tokens(rows, length):
    return (torch.randint(WORDS, (rows, length)),), torch.randint(WORDS, (rows, length))
