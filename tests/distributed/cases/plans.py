# SPDX-License-Identifier: Apache-2.0
"""Plans that are forgotten, and made ahead."""

from __future__ import annotations

import fpipe
from schedules import one_f_one_b
from tests.common.comparison import Result
from tests.common.loops import loop
from tests.common.running import build
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import gather, raises, require_whole
from tests.distributed.cases.registry import case


@case
def plans_are_forgotten_alike(rank, size):
    """Every rank keeps the plans of the same batches, in the same order of use, whatever one rank does or refuses."""
    one = ZOO["mlp"]
    pipe, model, *_ = build(one, one_f_one_b(ranks=size, microbatches=2), 2, plans=2)
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    whole = dict(model.named_parameters()), dict(model.named_buffers())
    for k, rows in enumerate((4, 6, 4, 8, 6, 4)):
        _, inputs, targets = one.make(rows)
        if k % 3 == 2:
            given = (inputs[0].double(),) if rank == k % size else inputs
            with raises(fpipe.PipelineError, "float64"):
                step(*state, given, targets)
        if rank == k % size:
            fpipe.reference(pipe)(*whole, *one.make(rows + 8)[1:])
        out, grads = step(*state, inputs, targets)
        got = Result(out.loss, None, grads, out.buffers)
        require_whole(got, loop(model, one.loss, inputs, targets, 2)._replace(outputs=None), rank, size)
        orders = gather([str(signature) for _, signature in pipe.memo.agreements])
        assert orders == [orders[0]] * size
        assert len(orders[0]) <= 3
    with raises(fpipe.TransportError, "plans: got on rank", "4", "5"):
        build(one, one_f_one_b(ranks=size, microbatches=2), 2, plans=4 + (rank == 0))


@case
def steps_are_prepared_by_all_ranks(rank, size):
    one = ZOO["mlp"]
    pipe, model, *_ = build(one, one_f_one_b(ranks=size, microbatches=2), 2, plans=3)
    with raises(fpipe.TransportError, "examples: got on rank", "1 examples", "2 examples"):
        pipe.prepare([one.make(4)[1:]] * (1 + (rank == 0)))
    with raises(fpipe.PipelineError, "got 4 kinds of batches"):
        pipe.prepare([one.make(rows)[1:] for rows in (4, 5, 6, 7)])
    pipe.prepare([one.make(rows)[1:] for rows in (4, 5, 2)])
    plans, step = dict(pipe.memo.batches), fpipe.value_and_grad(pipe)
    for rows in (5, 2, 4):
        _, inputs, targets = one.make(rows)
        out, grads = step(*pipe.init(model), inputs, targets)
        got = Result(out.loss, None, grads, out.buffers)
        require_whole(got, loop(model, one.loss, inputs, targets, 2)._replace(outputs=None), rank, size)
    assert pipe.memo.batches == plans
