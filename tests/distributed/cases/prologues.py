# SPDX-License-Identifier: Apache-2.0
"""Masks and tables that every rank computes from its part of the batch."""

from __future__ import annotations

from dataclasses import replace

import torch

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b, zb_v
from tests.common.loops import loop
from tests.common.masks import DECODER, decoder_batch
from tests.common.running import build, run
from tests.distributed.cases.checks import gather, raises, require_whole
from tests.distributed.cases.registry import case


@case
def masks_and_tables_of_each_rank(rank, size):
    """Batches of several lengths; every rank holds the buffer, and hidden states alone are sent."""
    cuts = ("layers.1",) if size == 2 else DECODER.cuts
    pipe, model, *_ = build(DECODER, one_f_one_b(ranks=size, microbatches=3), 7, cuts, capture="trace")
    assert gather(list(pipe.training.buffers)) == [["decay"]] * size
    assert all(len(one.specs) == 1 for stage in pipe.stages for one in stage.gives)
    for length in (5, 3, 5):
        _, inputs, targets = replace(DECODER, batch=decoder_batch(length)).make(7)
        require_whole(run(pipe, model, inputs, targets), loop(model, DECODER.loss, inputs, targets, 3), rank, size)
    outputs = fpipe.predict(pipe)(*pipe.init(model), inputs)
    parts = zip(*[leaf.tensor_split(3) for leaf in inputs], strict=True)
    assert same_bits(outputs, torch.cat([model(*part) for part in parts]))


@case
def masks_in_a_vee(rank, size):
    how = zb_v(ranks=2, microbatches=4)
    pipe, model, inputs, targets = build(DECODER, how, 8, capture="trace", backward="graph")
    require_whole(run(pipe, model, inputs, targets), loop(model, DECODER.loss, inputs, targets, 4), 1 - rank, size)


@case
def a_rank_without_the_mask(rank, size):
    """A rank in the middle needs the leaf that its mask is made from, and nothing else of the batch."""
    cuts = ("layers.1",) if size == 2 else DECODER.cuts
    pipe, model, (x, mask), targets = build(DECODER, one_f_one_b(ranks=size, microbatches=4), 8, cuts, capture="trace")
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    if rank == 1:
        with raises(fpipe.InputError, "inputs[1]: got nothing", "a stage of this rank reads it"):
            step(*state, None, targets)
    else:
        with raises(fpipe.TransportError, "- rank 1: InputError: ", "inputs[1]: got nothing"):
            step(*state, (x, mask), targets)
    mine = (x if rank == 0 else x.to("meta"), mask), (targets if rank == size - 1 else None)
    out, _ = step(*state, *mine)
    assert same_bits(out.loss, loop(model, DECODER.loss, (x, mask), targets, 4).loss)
