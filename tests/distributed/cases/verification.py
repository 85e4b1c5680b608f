# SPDX-License-Identifier: Apache-2.0
"""`fpipe.verify` on several ranks, and changes of the model after it was captured."""

from __future__ import annotations

import copy

from torch import nn

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b
from tests.common.loops import loop
from tests.common.running import build, run
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import raises, require_whole
from tests.distributed.cases.registry import case


@case
def verify_on_every_rank(rank, size):
    pipe, model, inputs, targets = build(ZOO["normalised"], one_f_one_b(ranks=size, microbatches=4), 8)
    found = fpipe.verify(pipe, model, inputs, targets)
    assert found.reference > 0
    assert found.eager > 0


@case
def what_is_trained_is_verified_from_shares(rank, size):
    """Each rank passes its share; `verify` puts them together for the reference and the eager model."""
    pipe, model, inputs, targets = build(ZOO["normalised"], one_f_one_b(ranks=size, microbatches=3), 6)
    params, buffers = pipe.init(model)
    moved = {name: (3 * p.detach()).requires_grad_() for name, p in params.items()}
    shifted = {name: buffer + 1 for name, buffer in buffers.items()}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = fpipe.verify(pipe, model, inputs, targets, params=moved, buffers=shifted, steps=2)
    assert found.eager == found.reference > 2
    assert all(same_bits(tensor, before[name]) for name, tensor in model.state_dict().items())
    other = copy.deepcopy(model)
    next(module for module in other.modules() if isinstance(module, nn.BatchNorm1d)).eps = 0.5
    with raises(fpipe.MismatchError, "got different bits from the model run eagerly"):
        fpipe.verify(pipe, other, inputs, targets, params=moved)


@case
def a_change_that_one_rank_makes_is_raised_on_all(rank, size):
    pipe, model, inputs, targets = build(ZOO["normalised"], one_f_one_b(ranks=size, microbatches=3), 6)
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    step(*state, inputs, targets)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
    if rank == size - 1:
        norms[0].eps = 0.1
    with raises(fpipe.PipelineError, "attribute 'eps': got 0.1, expected 1e-05"):
        step(*state, inputs, targets)
    norms[0].eps = 0.1
    again = pipe.rebuilt(model)
    assert again.ranks is pipe.ranks
    require_whole(
        run(again, model, inputs, targets), loop(model, ZOO["normalised"].loss, inputs, targets, 3), rank, size
    )


@case
def what_is_not_finite_is_named_on_every_rank(rank, size):
    """A parameter of the last rank becomes infinite."""
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    params, buffers = pipe.init(model)
    assert fpipe.find_nonfinite(pipe)(params, buffers, inputs, targets) is None
    if rank == size - 1:
        name = min(params)
        params[name].data.fill_(float("inf"))
    found = fpipe.find_nonfinite(pipe)(params, buffers, inputs, targets)
    assert found[:2] == (size - 1, None)
    assert found.leaf.startswith("params['")
    assert found.got == "inf"
