# SPDX-License-Identifier: Apache-2.0
"""Steps that go on from earlier sums, with a total and a scale."""

from __future__ import annotations

import torch

import fpipe
from schedules import dualpipe, zb_h1, zb_v
from tests.common.comparison import Result
from tests.common.loops import loop
from tests.common.running import build
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import raises, require_whole
from tests.distributed.cases.registry import case


@case
def steps_go_on_from_earlier_sums(rank, size):
    """Three steps are one plain loop over all of their microbatches; copies of tied gradients are the same."""
    for name in ("gpt", "normalised"):
        one = ZOO[name]
        model, inputs, targets = one.make(24)
        pipe, *_ = build(one, (zb_v if size == 2 else zb_h1)(ranks=size, microbatches=4), 8, capture="trace")
        step, (params, buffers), grads = fpipe.value_and_grad(pipe), pipe.init(model), None
        for x, y in zip(inputs[0].chunk(3), targets.chunk(3), strict=True):
            out, grads = step(params, buffers, (x,), y, onto=grads, total=12)
            buffers = out.buffers
        want = loop(model, one.loss, inputs, targets, 12)
        require_whole(Result(None, None, grads, buffers), want._replace(loss=None, outputs=None), rank, size)


@case
def replicas_go_on_from_earlier_sums(rank, size):
    """Gradients are added in float32 on both replicas of a stage, and sent so."""
    one = ZOO["one_weight"]
    model, inputs, targets = one.make(8)
    model, inputs, targets = model.bfloat16(), (inputs[0].bfloat16(),), targets.bfloat16()
    how, cuts = dualpipe(ranks=size, microbatches=4), one.at(size)
    pipe = fpipe.pipeline(model, example=inputs, targets=targets, loss=one.loss, schedule=how, cuts=cuts)
    step, plain = fpipe.value_and_grad(pipe, sums=torch.float32), fpipe.reference(pipe, sums=torch.float32)
    state, whole = pipe.init(model), (dict(model.named_parameters()), dict(model.named_buffers()))
    got = want = None
    for scale in (2.0, 3.0):
        got = step(*state, inputs, targets, onto=got, scale=scale)[1]
        want = plain(*whole, inputs, targets, onto=want, scale=scale)[1]
    require_whole(Result(None, None, got, {}), Result(None, None, want, {}), rank, size)


@case
def step_arguments_on_one_rank(rank, size):
    one = ZOO["mlp"]
    pipe, model, inputs, targets = build(one, zb_h1(ranks=size, microbatches=4), 8, capture="trace")
    step, state = fpipe.value_and_grad(pipe), pipe.init(model)
    _, grads = step(*state, inputs, targets)
    first = rank == 0
    for given in ({"scale": 2.0}, {"total": 8}):
        with raises(fpipe.TransportError, next(iter(given))):
            step(*state, inputs, targets, **(given if first else {}))
    with raises(fpipe.TransportError, "with onto", "without onto"):
        step(*state, inputs, targets, onto=grads if first else None)
    with raises(fpipe.InputError if first else fpipe.TransportError, "onto: got gradients of ['strange']"):
        step(*state, inputs, targets, onto={"strange": torch.ones(1)} if first else {})
    step(*state, inputs, targets, onto=grads)
