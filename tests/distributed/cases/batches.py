# SPDX-License-Identifier: Apache-2.0
"""Batches of other shapes, of which each rank holds the part that it needs."""

from __future__ import annotations

import torch
from torch import nn

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import dualpipe, one_f_one_b
from tests.common.cases import WORDS
from tests.common.comparison import Result
from tests.common.loops import eval_loop, loop
from tests.common.running import build, run, run_reference
from tests.common.sizes import NIGHTLY
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import raises, require_whole
from tests.distributed.cases.registry import case


def words_like(rows: int, length: int):
    """Return a batch for the transformer, the same on every rank."""
    torch.manual_seed(rows * length)
    return (torch.randint(WORDS, (rows, length)),), torch.randint(WORDS, (rows, length))


def as_needed(inputs, targets, rank: int, size: int):
    """Return the inputs on the first rank, the targets on the last, and meta tensors elsewhere."""
    return (inputs if rank == 0 else (inputs[0].to("meta"),)), (targets if rank == size - 1 else targets.to("meta"))


@case
def batches_of_other_shapes(rank, size):
    """Rows and lengths change from step to step, and microbatches differ in size."""
    one = ZOO["gpt" if NIGHTLY else "tied_sequence"]
    front = "export" if NIGHTLY else "trace"
    pipe, model, *_ = build(one, one_f_one_b(ranks=size, microbatches=4), 8, capture=front)
    state, step = pipe.init(model), fpipe.value_and_grad(pipe, outputs=True)
    for rows, length in ((7, 3), (11, 2), (7, 3)):
        inputs, targets = words_like(rows, length)
        want = loop(model, one.loss, inputs, targets, 4)
        for mine in ((inputs, targets), as_needed(inputs, targets, rank, size)):
            out, grads = step(*state, *mine)
            require_whole(Result(out.loss, out.outputs, grads, out.buffers), want, rank, size)
        out = fpipe.evaluate(pipe)(*state, *as_needed(inputs, targets, rank, size))
        want = eval_loop(model, one.loss, inputs, targets, 4)
        require_whole(Result(out.loss, out.outputs, {}, out.buffers), want, rank, size)


@case
def uneven_microbatches_on_two_ranks_each(rank, size):
    one = ZOO["tied_sequence"]
    pipe, model, inputs, targets = build(one, dualpipe(ranks=size, microbatches=4), 7)
    got = run(pipe, model, inputs, targets)
    want = run_reference(pipe, model, inputs, targets)
    require_whole(got, want, size - 1 if rank in (0, size - 1) else 0, size)


@case
def weights_where_the_loss_is(rank, size):
    """Only the last rank computes weights, and it needs only the tensors that they depend on."""
    model, *_ = ZOO["tied_sequence"].make(8)
    inputs, targets = words_like(7, 3)
    targets[:, 1:] = -100
    targets[0] = inputs[0][0]

    def count(_, wanted):
        return (wanted != -100).sum()

    pipe = fpipe.pipeline(
        model,
        example=inputs,
        targets=targets,
        loss=ZOO["tied_sequence"].loss,
        schedule=one_f_one_b(ranks=size, microbatches=4),
        cuts=ZOO["tied_sequence"].at(size),
        weight=count,
    )
    mine = (inputs if rank == 0 else None), (targets if rank == size - 1 else None)
    out, grads = fpipe.value_and_grad(pipe, outputs=True)(*pipe.init(model), *mine)
    want = loop(model, ZOO["tied_sequence"].loss, inputs, targets, 4, weight=count)
    require_whole(Result(out.loss, out.outputs, grads, out.buffers), want, rank, size)


@case
def a_batch_that_the_model_cannot_take(rank, size):
    """Every rank raises before anything is sent; a valid step works afterwards."""
    pipe, model, inputs, targets = build(ZOO["tied_sequence"], one_f_one_b(ranks=size, microbatches=4), 8)
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    with raises(fpipe.InputError, "targets: got 7 in dimension 0", "8 in dimension 0 of inputs[0]"):
        step(*state, *as_needed(inputs, targets[:7], rank, size))
    with raises(fpipe.InputError, "inputs[0]: got int64[4, 3], where the example has int64[8, 3]"):
        step(*state, *as_needed((inputs[0][:4],), targets, rank, size))
    out, _ = step(*state, inputs, targets)
    assert same_bits(out.loss, loop(model, ZOO["tied_sequence"].loss, inputs, targets, 4).loss)


@case
def other_shapes_on_one_rank(rank, size):
    pipe, model, *_ = build(ZOO["tied_sequence"], one_f_one_b(ranks=size, microbatches=4), 8)
    inputs, targets = words_like(7 if rank else 11, 3)
    with raises(fpipe.TransportError, "- batch: got on rank 0: inputs[0]: int64[11, 3]", "on rank", "int64[7, 3]"):
        fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets)


@case
def told_no_shapes(rank, size):
    """The ranks in the middle do not know the batch's new shapes: all ranks raise before anything is captured."""
    pipe, model, *_ = build(ZOO["tied_sequence"], one_f_one_b(ranks=size, microbatches=4), 8)
    inputs, targets = words_like(7, 3)
    mine = as_needed(inputs, targets, rank, size) if rank in (0, size - 1) else (None, None)
    with raises(fpipe.TransportError, "- batch: got on ranks 0, 3: inputs[0]: int64[7, 3]", "on ranks 1-2: inputs[0]"):
        fpipe.value_and_grad(pipe)(*pipe.init(model), *mine)


class Padding(nn.Module):
    """Fills the padded positions, if there are any."""

    def __init__(self, size):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(size)))

    def forward(self, x, mask):
        return self.layers(x if mask.all() else x.masked_fill(~mask[..., None], 0.5))


@case
def questions_that_one_rank_can_answer(rank, size):
    """Only the first rank gets the mask on which the model branches; padded and unpadded batches take turns."""
    torch.manual_seed(0)
    model, x = Padding(size), torch.randn(8, 3, 4)
    full, padded = torch.ones(8, 3, dtype=torch.bool), torch.arange(24).view(8, 3) > 7
    how, cuts = one_f_one_b(ranks=size, microbatches=4), [f"layers.{k}" for k in range(1, size)]
    pipe = fpipe.pipeline(model, example=(x, full), loss=torch.sum, schedule=how, cuts=cuts)
    state, step = pipe.init(model), fpipe.value_and_grad(pipe, outputs=True)
    for mask in (padded, full, padded):
        mine = (x, mask) if rank == 0 else (x.to("meta"), mask.to("meta"))
        found, grads = step(*state, mine)
        want = loop(model, torch.sum, (x, mask), None, 4)
        require_whole(Result(found.loss, found.outputs, grads, found.buffers), want, rank, size)
    with raises(fpipe.InputError, "got batches on ranks", "__bool__ finds", "the same batch on every rank"):
        step(*state, (x, padded if rank else full))
    with raises(fpipe.InputError, "got no values of inputs[1]", "Pass the values on some rank"):
        step(*state, (x, mask.to("meta")))
