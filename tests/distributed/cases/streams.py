# SPDX-License-Identifier: Apache-2.0
"""Streams of batches over processes: those of one device with the same delays; and what ends them early."""

from __future__ import annotations

import itertools

import optree
import torch

import fpipe
from schedules import pipedream, pipedream_2bw, split_backward
from tests.common.comparison import require_part
from tests.common.running import build
from tests.common.sizes import NIGHTLY, in_turn
from tests.common.streams import Trained, decay, train
from tests.common.tensor_parallel import whole
from tests.common.training import MODELS as SCRIPTS
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import case, gather, raises
from tests.distributed.cases.meshes import mesh_of

ADAM = fpipe.optimizer(torch.optim.AdamW, lr=0.05, weight_decay=0.01)
COUNT = 50 if NIGHTLY else 12
BY_NIGHT = ("mlp", "dropping", "skips", "unet", "later", "strides", "mixed_precision", "one_weight", "frozen_below")
MODELS = BY_NIGHT if NIGHTLY else ("dropping", "skips", "tied_sequence")


def require_stream_of_one_device(pipe, model, batches, what: str) -> None:
    """Raise unless two streams are those of one device: the losses, and this rank's share of all else."""
    functions = fpipe.train_stream, fpipe.reference_stream
    got, want = (train(one, pipe, model, batches, ADAM, streams=2) for one in functions)
    for field, mine, theirs in zip(Trained._fields, optree.tree_map(whole, got, none_is_leaf=True), want, strict=True):
        require_part(mine, theirs, f"{what}: {field}")
    shares = gather(list(got.params))
    assert {key for keys in shares for key in keys} == want.params.keys()


def stream_of(pipe, model, batches, **options) -> fpipe.Stream:
    params, buffers = pipe.init(model)
    return fpipe.train_stream(pipe, ADAM)(params, buffers, ADAM.init(params), batches, **options)


@case(sizes=[2, 4], day=[2, 4])
def streams_are_those_of_one_device(rank, size):
    """Losses on every rank; of parameters, buffers and state, each rank's share."""
    hows = (pipedream(size, 1), pipedream_2bw(size, size, accumulate=size), split_backward(pipedream(size, 1)))
    for name, how in in_turn(MODELS, hows):
        pipe, model, *batch = build(ZOO[name], how, 2 * how.microbatches, capture="trace")
        require_stream_of_one_device(pipe, model, [(*batch,)] * COUNT, f"{name}, {how!r}")


@case(sizes=[2, 4], day=[])
def larger_models_train_as_on_one_device(rank, size):
    """A GPT with tied weights, a Llama with grouped queries, and an MLP with BatchNorm and dropout, for 50 batches."""
    for name, trained in SCRIPTS.items():
        for how in (pipedream(size, 1), pipedream_2bw(size, 4, accumulate=4)):
            model, some = trained.make()
            batches = [*itertools.islice(itertools.cycle(some), COUNT)]
            inputs, targets = batches[0]
            pipe = fpipe.pipeline(model, example=inputs, targets=targets, loss=trained.loss, schedule=how)
            require_stream_of_one_device(pipe, model, batches, f"{name}, {how!r}")


@case(sizes=[4], day=[4])
def streams_of_copies_are_those_of_one_device(rank, size):
    """Each process has a copy of its stage; gradients of every batch are reduced over the mesh."""
    models = (("dropping", "dp"), ("dropping", "shard"), ("tied_sequence", "dp"))
    for (name, kind), how in in_turn(models, (pipedream(2, 1), pipedream_2bw(2, 2, accumulate=2))):
        place = {"mesh": mesh_of(pp=2, dp=2), kind: "dp"}
        pipe, model, inputs, targets = build(ZOO[name], how, 4 * how.microbatches, capture="trace", **place)
        require_stream_of_one_device(pipe, model, [(inputs, targets)] * COUNT, f"{name}, {kind}, {how!r}")
    with raises((fpipe.InputError, fpipe.RankError, fpipe.TransportError), "batches"):
        list(stream_of(pipe, model, [(inputs, targets)] * (9 if rank % 2 else 6), seed=1))


@case(sizes=[2, 4], day=[4])
def streams_that_are_stopped_end_alike_on_all_ranks(rank, size):
    """Whoever calls `finish()` after the same loss has the same number of updates."""
    how = pipedream(size, 1)
    pipe, model, inputs, targets = build(ZOO["mlp"], how, 2, capture="trace")
    stream = stream_of(pipe, model, itertools.repeat((inputs, targets)), options=decay)
    losses = list(itertools.islice(stream, 5))
    state = stream.finish().state
    counts = {int(slots["step"]) for slots in state.values()}
    assert {*map(frozenset, gather(counts))} == {frozenset(counts)}
    assert all(map(torch.equal, losses, gather(losses)[0]))
    fpipe.evaluate(pipe)(stream.end.params, stream.end.buffers, inputs, targets)


@case(sizes=[2, 4], day=[2])
def ranks_with_other_numbers_of_batches(rank, size):
    """Whoever has more, first or last, hears of it at once; nobody waits for the rest."""
    how = pipedream(size, 1)
    for longer in (0, size - 1):
        pipe, model, inputs, targets = build(ZOO["mlp"], how, 2, capture="trace")
        with raises((fpipe.InputError, fpipe.RankError, fpipe.TransportError), "batches"):
            list(stream_of(pipe, model, [(inputs, targets)] * (9 if rank == longer else 6)))


@case(sizes=[2, 4], day=[2])
def a_rank_fails_in_a_stream(rank, size):
    """All ranks name the first cause: of the data, of the optimizer, and of whoever leaves the loop."""
    how = pipedream(size, 1)

    def broken(batch):
        yield from itertools.repeat(batch, 5)
        raise ValueError("no more data")

    boom = raises(ValueError, "no more data") if rank == 1 else raises(fpipe.RankError, "rank 1", "no more data")
    pipe, model, inputs, targets = build(ZOO["mlp"], how, 2, capture="trace")
    with boom:
        list(stream_of(pipe, model, broken((inputs, targets)) if rank == 1 else [(inputs, targets)] * 99))
    pipe, model, inputs, targets = build(ZOO["mlp"], how, 2, capture="trace")
    stream = stream_of(pipe, model, [(inputs, targets)] * 99)
    if rank == 1:
        next(stream)
        stream.close()
    else:
        with raises(fpipe.RankError, "rank 1", "left its stream"):
            list(stream)
