# SPDX-License-Identifier: Apache-2.0
"""Outputs on every rank, and as they come."""

from __future__ import annotations

from contextlib import nullcontext

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import mirror, one_f_one_b
from tests.common.loops import eval_loop, loop
from tests.common.running import build
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import raises
from tests.distributed.cases.registry import case


@case
def outputs_on_every_rank_and_as_they_come(rank, size):
    """Merged outputs are the same everywhere; streamed ones come on the last rank only, whose error is its own."""
    one = ZOO["normalised"]
    pipe, model, inputs, targets = build(one, one_f_one_b(ranks=size, microbatches=4), 8)
    state, seen = pipe.init(model), {}
    want = eval_loop(model, one.loss, inputs, targets, 4).outputs
    assert same_bits(fpipe.predict(pipe)(*state, inputs if rank == 0 else None), want)
    fpipe.stream(pipe, seen.__setitem__)(*state, inputs)
    assert list(seen) == ([0, 1, 2, 3] if rank == size - 1 else [])
    assert all(same_bits(seen[i], want[2 * i : 2 * i + 2]) for i in seen)

    def refuse(i, outputs):
        raise ValueError("full")

    with raises(ValueError, "full") if rank == size - 1 else nullcontext():
        fpipe.stream(pipe, refuse)(*state, inputs)
    step, _ = fpipe.value_and_grad(pipe)(*state, inputs, targets)
    assert same_bits(step.loss, loop(model, one.loss, inputs, targets, 4).loss)
    with raises(fpipe.InputError, "params: got 0 leaves") if rank == 0 else raises(fpipe.TransportError, "0 leaves"):
        fpipe.predict(pipe)({} if rank == 0 else state[0], state[1], inputs)


@case
def predictions_of_two_ranks(rank, size):
    """Each replica of the last stage has the outputs of half of the microbatches; all ranks get all of them."""
    one = ZOO["mlp"]
    pipe, model, inputs, targets = build(one, mirror(one_f_one_b(ranks=size, microbatches=4)), 16)
    want = eval_loop(model, one.loss, inputs, targets, 8).outputs
    assert same_bits(fpipe.predict(pipe)(*pipe.init(model), inputs), want)
