# SPDX-License-Identifier: Apache-2.0
"""Evaluations, with a loss and without."""

from __future__ import annotations

import fpipe
from schedules import dualpipe, one_f_one_b
from tests.common.comparison import Result
from tests.common.loops import eval_loop, loop
from tests.common.running import build
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import require_whole
from tests.distributed.cases.registry import case


@case
def evaluation_everywhere(rank, size):
    """The loss is on every rank; the outputs are on the rank of the last stage."""
    for name in ("normalised", "several"):
        one = ZOO[name]
        pipe, model, inputs, targets = build(one, one_f_one_b(ranks=size, microbatches=4), 8)
        for wanted in (targets, None):
            step = fpipe.evaluate(pipe)(*pipe.init(model), inputs, wanted)
            want = eval_loop(model, one.loss if wanted is not None else None, inputs, wanted, 4)
            assert (step.outputs is None) == (rank != size - 1)
            require_whole(Result(step.loss, step.outputs, {}, step.buffers), want, rank, size)


@case
def evaluation_on_two_ranks(rank, size):
    one = ZOO["several"]
    pipe, model, inputs, targets = build(one, dualpipe(ranks=size, microbatches=4), 8)
    for wanted in (targets, None):
        step = fpipe.evaluate(pipe)(*pipe.init(model), inputs, wanted)
        want = eval_loop(model, one.loss if wanted is not None else None, inputs, wanted, 4)
        assert (step.outputs is None) == (rank not in (0, size - 1))
        turned = size - 1 if rank in (0, size - 1) else 0
        require_whole(Result(step.loss, step.outputs, {}, step.buffers), want, turned, size)


@case
def only_the_ends_hold_the_batch(rank, size):
    """Only the first rank has the inputs, and only the last the targets."""
    one = ZOO["mlp"]
    pipe, model, inputs, targets = build(one, one_f_one_b(ranks=size, microbatches=4), 8)
    params, buffers = pipe.init(model)
    mine = (inputs if rank == 0 else None), (targets if rank == size - 1 else None)
    step, grads = fpipe.value_and_grad(pipe, outputs=True)(params, buffers, *mine)
    want = loop(model, one.loss, inputs, targets, 4)
    require_whole(Result(step.loss, step.outputs, grads, step.buffers), want, rank, size)
    step = fpipe.evaluate(pipe)(params, buffers, *mine)
    want = eval_loop(model, one.loss, inputs, targets, 4)
    require_whole(Result(step.loss, step.outputs, {}, step.buffers), want, rank, size)
