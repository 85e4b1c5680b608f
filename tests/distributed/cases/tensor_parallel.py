# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism inside stages: a mesh of pipelines by two, and modules that torch has parallelized."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils.checkpoint import checkpoint

import fpipe
from schedules import interleaved_1f1b, one_f_one_b, zb_h1, zb_v
from tests.common.sizes import NIGHTLY
from tests.common.tensor_parallel import (
    GPT,
    MICROBATCHES,
    Block,
    by_sequence,
    column_and_row,
    entropy,
    local,
    plain_loop,
    require_same_gradients,
    split_llama,
    whole,
    words,
)
from tests.common.training import llama
from tests.distributed.cases.checks import gather, raises
from tests.distributed.cases.registry import case


@cache
def grid(size: int) -> DeviceMesh:
    """Return the mesh, the same in all cases: torch caches what it computes for a mesh, with its groups."""
    return init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("pp", "tp"))


def schedules(size):
    """Return one schedule of each kind."""
    return {
        "1F1B": one_f_one_b(size // 2, MICROBATCHES),
        "interleaved": interleaved_1f1b(size // 2, MICROBATCHES, 2),
        "ZB-H1": zb_h1(size // 2, MICROBATCHES),
        "ZB-V": zb_v(size // 2, MICROBATCHES),
    }


def build(model, how, size, **options):
    ids, wanted = words()
    return fpipe.pipeline(
        model, example=(ids,), targets=wanted, loss=entropy, schedule=how, group=grid(size)["pp"], **options
    )


def eager(model):
    """Return what a plain loop over the parallelized module computes."""
    ids, wanted = words()
    return plain_loop(model, {"ids": ids}, wanted, entropy)


def require_exact(model, how, size, want=None, **options):
    """Require that a step has the bits of a plain loop over the parallelized module; return pipeline and gradients."""
    ids, wanted = words()
    want = eager(model) if want is None else want
    pipe = build(model, how, size, **options)
    step, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (ids,), wanted)
    assert torch.equal(step.loss, want.loss)
    require_same_gradients(grads, want.grads)
    found = [name for names in gather(list(grads)) for name in names]
    assert set(found) == set(want.grads)
    return pipe, grads


def require_close(grads):
    """Require what one process computes on the whole model, up to rounding."""
    want = eager(GPT()).grads
    for name, grad in grads.items():
        torch.testing.assert_close(whole(grad), want[name], rtol=0, atol=1e-6)


@case
def columns_and_rows(rank, size):
    """Attention and linears split over two processes; weights of split linears wait for the weight half."""
    model, hows = column_and_row(GPT(), grid(size)["tp"]), schedules(size)
    want = eager(model)
    for name in ("1F1B", "ZB-V") if NIGHTLY else ("ZB-V",):
        pipe, grads = require_exact(model, hows[name], size, want)
    require_close(grads)
    kept = str(pipe)
    assert "undeferred" in kept
    assert "EnterBackward" not in kept, "the gradients of split linears are left to the weight half"


@case
def sequences_in_parts(rank, size):
    """Sequence parallelism; gradients of norms are still to be summed over processes, as in the eager module."""
    model = by_sequence(GPT(), grid(size)["tp"])
    want = eager(model)
    for name, how in schedules(size).items():
        if NIGHTLY or name == "ZB-V":
            _, grads = require_exact(model, how, size, want)
    require_close(grads)
    placements = {name: grad.placements for name, grad in grads.items()}
    assert any(one == (Partial(),) for name, one in placements.items() if "norm" in name)


@case
def a_dtensor_crosses_a_cut(rank, size):
    """A cut between a norm and the attention that reads it: the local tensor is sent, and placed again."""
    cuts = ["blocks.1.attention"] if size == 4 else []
    options = {"cuts": cuts} if cuts else {}
    require_exact(by_sequence(GPT(), grid(size)["tp"]), zb_h1(size // 2, MICROBATCHES), size, **options)


@case
def recorded_stages_of_split_modules(rank, size):
    """A graph has the local operators and the collectives between them."""
    for split in (column_and_row, by_sequence) if NIGHTLY else (by_sequence,):
        pipe, _ = require_exact(split(GPT(), grid(size)["tp"]), zb_v(size // 2, MICROBATCHES), size, backward="graph")
        assert "by autograd" not in str(pipe)


@case
def a_split_llama(rank, size):
    """A Llama of transformers, with fewer keys than heads."""
    torch.manual_seed(0)
    model = split_llama(llama(), grid(size)["tp"])
    ids, _ = words()
    batch = {"input_ids": ids, "labels": ids}
    want = plain_loop(model, batch, None, lambda out: out.loss)
    for how in (one_f_one_b(size // 2, MICROBATCHES), zb_v(size // 2, MICROBATCHES)):
        pipe = fpipe.pipeline(model, example=batch, loss=lambda out: out.loss, schedule=how, group=grid(size)["pp"])
        step, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), batch)
        assert torch.equal(step.loss, want.loss)
        require_same_gradients(grads, want.grads)


class Checkpointed(Block):
    """A block whose forward runs again in the backward."""

    reentrant = False

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    """The same, in the older way."""

    reentrant = True


@case
def split_blocks_that_run_again(rank, size):
    for block in (Checkpointed, Reentrant):
        require_exact(by_sequence(GPT(block), grid(size)["tp"]), one_f_one_b(size // 2, MICROBATCHES), size)


@case
def a_split_and_tied_embedding(rank, size):
    """One split parameter on two stages, its gradients added through cotangents, or at the end."""
    for tied in ("exact", "sum") if NIGHTLY else ("exact",):
        model = by_sequence(GPT(), grid(size)["tp"])
        model.head.weight = model.embed.weight
        if tied == "exact" or size == 2:
            require_exact(model, one_f_one_b(size // 2, MICROBATCHES), size, tied=tied)
        else:
            pipe, ids, wanted = build(model, one_f_one_b(2, MICROBATCHES), size, tied=tied), *words()
            _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (ids,), wanted)
            want = eager(model).grads
            for name, grad in grads.items():
                torch.testing.assert_close(whole(grad), whole(want[name]), rtol=0, atol=1e-6)


@case
def split_models_are_verified(rank, size):
    """Pipeline, reference and eager module agree, over several steps, and from other values."""
    model = by_sequence(GPT(), grid(size)["tp"])
    pipe, ids, wanted = build(model, one_f_one_b(size // 2, MICROBATCHES), size), *words()
    found = fpipe.verify(pipe, model, (ids,), wanted, steps=2)
    assert found.eager == found.reference > 60 * 2 // size
    params, buffers = pipe.init(model)
    double = {name: (2 * p.detach()).requires_grad_() for name, p in params.items()}
    assert fpipe.verify(pipe, model, (ids,), wanted, params=double, buffers=buffers).eager == found.eager // 2


@case
def split_models_are_trained(rank, size):
    """AdamW, the norm, and earlier sums, as torch computes them on the parallelized module."""
    model = by_sequence(GPT(), grid(size)["tp"])
    pipe, ids, wanted = build(model, one_f_one_b(size // 2, MICROBATCHES), size), *words()
    params, buffers = pipe.init(model)
    step = fpipe.value_and_grad(pipe)
    _, grads = step(params, buffers, (ids,), wanted)
    want = eager(model).grads
    for name, p in model.named_parameters():
        p.grad = want[name]
    total = torch.stack([whole(want[name]).norm() for name in want]).norm()
    torch.testing.assert_close(fpipe.norm(pipe, grads), total)
    clipped, before = fpipe.clip(pipe, grads, 0.01)
    torch.testing.assert_close((before, fpipe.norm(pipe, clipped)), (total, torch.tensor(0.01)))
    assert all(type(clipped[name]) is type(grads[name]) for name in grads)
    assert fpipe.all_finite(pipe, grads)
    wrong = {name: grad.clone() for name, grad in grads.items()}
    if rank % 2:
        local(next(iter(wrong.values())))[0] = torch.inf
    assert not fpipe.all_finite(pipe, wrong)
    adam = fpipe.optimizer(torch.optim.AdamW, lr=0.01)
    new, _ = adam.update(grads, adam.init(params), params)
    torch.optim.AdamW(model.parameters(), lr=0.01).step()
    theirs = dict(model.named_parameters())
    assert all(torch.equal(local(new[name]), local(theirs[name])) for name in new)
    once = {name: local(grad).clone() for name, grad in grads.items()}
    _, twice = step(params, buffers, (ids,), wanted, onto=grads)
    assert all(torch.allclose(local(twice[name]), 2 * once[name], atol=1e-6) for name in twice)
    out = fpipe.evaluate(pipe)(params, buffers, (ids,), wanted)
    assert torch.equal(out.loss, eager(by_sequence(GPT(), grid(size)["tp"])).loss)


@case
def state_that_is_placed_otherwise(rank, size):
    """Refused before anything is sent: plain tensors for DTensors, the reverse, and other placements."""
    tp = grid(size)["tp"]
    model = column_and_row(GPT(), tp)
    pipe, ids, wanted = build(model, one_f_one_b(size // 2, MICROBATCHES), size), *words()
    params, buffers = pipe.init(model)
    step = fpipe.value_and_grad(pipe)
    split = next(name for name in params if name.endswith("feed.up.weight"))
    plain = next(name for name in params if name.endswith("norm1.weight"))
    whole_one = params[split].detach().redistribute(placements=[Replicate()])
    for name, value, words_ in (
        (split, params[split].detach().full_tensor(), ("got a plain tensor", "Shard(dim=0)", "'tp'")),
        (split, whole_one, ("Replicate()", "Shard(dim=0)")),
        (plain, DTensor.from_local(params[plain].detach(), tp, [Replicate()]), ("expected a plain tensor",)),
    ):
        with raises(fpipe.InputError, f"params['{name}']", *words_):
            step({**params, name: value}, buffers, (ids,), wanted)
    _, grads = step(params, buffers, (ids,), wanted)
    with raises(fpipe.InputError, f"onto['{split}']", "got a plain tensor"):
        step(params, buffers, (ids,), wanted, onto={split: local(grads[split])})
    with raises(fpipe.InputError, "source['", "got a plain tensor"):
        pipe.init(GPT())
    with raises(fpipe.InputError, "initialise", "pipe.init"):
        pipe.initialise(seed=0)
    with raises(fpipe.InputError, "train_step", "value_and_grad"):
        fpipe.train_step(pipe, fpipe.optimizer(torch.optim.SGD, lr=0.1))
    with raises(fpipe.InputError, "mesh=mesh instead of group="):
        fpipe.save(pipe, "nowhere", params=params)
    with raises(fpipe.InputError, "inputs[0]", "got a DTensor"):
        step(params, buffers, (DTensor.from_local(ids, tp, [Replicate()]),), wanted)


class Dropping(nn.Module):
    """A norm, and dropout of what it returns."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return nn.functional.dropout(self.norm(x), 0.5)


@case
def what_a_split_model_cannot_do(rank, size):
    """Random draws for a part of a tensor, and losses of which each process has a part, are refused."""
    model = by_sequence(GPT(), grid(size)["tp"])
    model.blocks[0].norm1 = Dropping(model.blocks[0].norm1)
    with raises(fpipe.CaptureError, "random numbers", "Shard(dim=1)"):
        build(model, one_f_one_b(size // 2, MICROBATCHES), size)
    model = by_sequence(GPT(), grid(size)["tp"])
    model.head.weight.register_hook(lambda grad: 2 * grad)
    with raises(fpipe.CaptureError, "head.weight", "gradient hook on a DTensor"):
        build(model, one_f_one_b(size // 2, MICROBATCHES), size)
    model, (ids, _) = by_sequence(GPT(), grid(size)["tp"]), words()
    parts = nn.Sequential(model.embed, model.norm)
    with raises(fpipe.CaptureError, "loss", "Partial", "full_tensor()"):
        fpipe.pipeline(
            parts,
            example=(ids,),
            loss=lambda out: out.mean(),
            schedule=one_f_one_b(size // 2, MICROBATCHES),
            group=grid(size)["pp"],
        )
