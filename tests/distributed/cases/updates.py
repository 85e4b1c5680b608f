# SPDX-License-Identifier: Apache-2.0
"""Updates within the step."""

from __future__ import annotations

import torch

import fpipe
from schedules import dualpipe, one_f_one_b, zb_h1, zb_v
from tests.common.running import build
from tests.common.schedules import SCHEDULES
from tests.common.sizes import NIGHTLY
from tests.common.updates import require_same_updates, require_training_of_a_plain_loop
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import raises
from tests.distributed.cases.registry import case


@case
def updates_within_the_step(rank, size):
    """Training with updates in the drain is training on one device; of replicas, a step, a clip and an update."""
    require_training_of_a_plain_loop(
        ZOO["gpt" if NIGHTLY else "mlp"], (zb_v if size == 2 else zb_h1)(ranks=size, microbatches=4)
    )
    require_same_updates(ZOO["tied_sequence"], dualpipe(ranks=size, microbatches=4), None)


@case
def updates_of_other_schedules_and_ties(rank, size):
    for how in (one_f_one_b, zb_h1):
        require_training_of_a_plain_loop(ZOO["gpt"], how(ranks=size, microbatches=4))
    for how in (dualpipe(ranks=size, microbatches=4), *[zb_v(ranks=2, microbatches=3)] * (size == 2)):
        require_same_updates(ZOO["gpt"], how, "median")
        require_same_updates(ZOO["gpt"], how, None, steps=2, tied="sum")
    require_same_updates(ZOO["dropping"], one_f_one_b(ranks=size, microbatches=4), "median")


@case
def updates_that_differ_on_one_rank(rank, size):
    pipe, model, inputs, targets = build(ZOO["mlp"], SCHEDULES["one_f_one_b"](size, 4), 8)
    params, buffers = pipe.init(model)
    adam = fpipe.optimizer(torch.optim.AdamW, lr=0.1)
    state, batch = adam.init(params), (inputs, targets)
    last = float(rank == size - 1)
    with raises(fpipe.TransportError, "train_step", "max_norm: got on rank 0: 1.0"):
        fpipe.train_step(pipe, adam, 1.0 + last)
    step, backward = fpipe.train_step(pipe, adam, 1.0), fpipe.value_and_grad(pipe)
    with raises(fpipe.TransportError, "update", "0.5"):
        step(params, buffers, state, *batch, lr=0.5 + last)
    with raises(fpipe.InputError if last else fpipe.TransportError, "state: got one for 0 parameters"):
        step(params, buffers, {} if last else state, *batch)
    with raises(fpipe.TransportError, "a training step", "a step"):
        step(params, buffers, state, *batch) if last else backward(params, buffers, *batch)
    step(params, buffers, state, *batch)
