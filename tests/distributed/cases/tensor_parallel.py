# SPDX-License-Identifier: Apache-2.0
"""Modules that compute over other dimensions of the mesh: split by torch, experts, parts of sequences."""

from __future__ import annotations

from functools import cache, partial
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import interleaved_1f1b, one_f_one_b, recompute, zb_h1, zb_v
from tests.common import collectives, contexts, experts
from tests.common.cases import mse
from tests.common.gates import Marked, Rare
from tests.common.options import grouped
from tests.common.sizes import NIGHTLY, covering_array
from tests.common.tensor_parallel import (
    GPT,
    MICROBATCHES,
    Block,
    Plain,
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
from tests.distributed.cases.checks import case, gather, raises
from tests.distributed.cases.meshes import mesh_of

# --------------- Tensor parallelism inside stages: a mesh of pipelines by two, and modules that torch has parallelized


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
        model,
        example=(ids,),
        targets=wanted,
        loss=entropy,
        schedule=how,
        **grouped({"group": grid(size)["pp"], **options}),
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


def require_close(grads, want):
    """Require what one process computes on the whole model, up to rounding."""
    for name, grad in grads.items():
        torch.testing.assert_close(whole(grad), whole(want[name]), rtol=0, atol=1e-6)


@case(day=[])
def columns_and_rows(rank, size):
    """Attention and linears split over two processes; weights of split linears wait for the weight half."""
    model, hows = column_and_row(GPT(), grid(size)["tp"]), schedules(size)
    want = eager(model)
    for name in ("1F1B", "ZB-V") if NIGHTLY else ("ZB-V",):
        pipe, grads = require_exact(model, hows[name], size, want)
    require_close(grads, eager(GPT()).grads)
    kept = str(pipe)
    assert "undeferred" in kept
    assert "EnterBackward" not in kept, "the gradients of split linears are left to the weight half"


@case(day=[])
def sequences_in_parts(rank, size):
    """Sequence parallelism; gradients of norms are still to be summed over processes, as in the eager module."""
    model = by_sequence(GPT(), grid(size)["tp"])
    want = eager(model)
    for name, how in schedules(size).items():
        if NIGHTLY or name == "ZB-V":
            _, grads = require_exact(model, how, size, want)
    require_close(grads, eager(GPT()).grads)
    placements = {name: grad.placements for name, grad in grads.items()}
    assert any(one == (Partial(),) for name, one in placements.items() if "norm" in name)


@case(day=[4])
def a_dtensor_crosses_a_cut(rank, size):
    """A cut between a norm and the attention that reads it: the local tensor is sent, and placed again."""
    cuts = ["blocks.1.attention"] if size == 4 else []
    options = {"cuts": cuts} if cuts else {}
    require_exact(by_sequence(GPT(), grid(size)["tp"]), zb_h1(size // 2, MICROBATCHES), size, **options)


@case(day=[])
def recorded_stages_of_split_modules(rank, size):
    """A graph has the local operators and the collectives between them."""
    for split in (column_and_row, by_sequence) if NIGHTLY else (by_sequence,):
        pipe, _ = require_exact(split(GPT(), grid(size)["tp"]), zb_v(size // 2, MICROBATCHES), size, backward="graph")
        assert "by autograd" not in str(pipe)


@case(day=[])
def a_split_llama(rank, size):
    """A Llama of transformers, with fewer keys than heads."""
    torch.manual_seed(0)
    model = split_llama(llama(), grid(size)["tp"])
    ids, _ = words()
    batch = {"input_ids": ids, "labels": ids}
    want = plain_loop(model, batch, None, lambda out: out.loss)
    for how in (one_f_one_b(size // 2, MICROBATCHES), zb_v(size // 2, MICROBATCHES)):
        pipe = fpipe.pipeline(
            model, example=batch, loss=lambda out: out.loss, schedule=how, place=fpipe.Place(group=grid(size)["pp"])
        )
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


@case(day=[])
def split_blocks_that_run_again(rank, size):
    for block in (Checkpointed, Reentrant):
        require_exact(by_sequence(GPT(block), grid(size)["tp"]), one_f_one_b(size // 2, MICROBATCHES), size)


@case(day=[])
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
            require_close(grads, want)


@case(day=[])
def split_models_are_verified(rank, size):
    """Pipeline, reference and eager module agree, over several steps, and from other values."""
    model = by_sequence(GPT(), grid(size)["tp"])
    pipe, ids, wanted = build(model, one_f_one_b(size // 2, MICROBATCHES), size), *words()
    found = fpipe.verify(pipe, model, (ids,), wanted, steps=2)
    assert found.eager == found.reference > 60 * 2 // size
    params, buffers = pipe.init(model)
    double = {name: (2 * p.detach()).requires_grad_() for name, p in params.items()}
    assert fpipe.verify(pipe, model, (ids,), wanted, params=double, buffers=buffers).eager == found.eager // 2


@case(day=[])
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


@case(day=[])
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
            place=fpipe.Place(group=grid(size)["pp"]),
        )


# -------- Modules that compute over dimensions of the mesh that fpipe has no name for: experts, and parts of sequences

PAIRS = {"1f1b": one_f_one_b, "zb_v": zb_v}
TIGHT, ROOMY = 2, experts.TOKENS


def require_loop(model, loss, inputs, y, mesh, family: str) -> tuple[fpipe.Pipeline, dict, Plain]:
    """Require the bits of the plain loop over the same modules and process groups; return what both have."""
    want = plain_loop(model, inputs, y, loss)
    how = PAIRS[family](ranks=2, microbatches=MICROBATCHES)
    pipe = fpipe.pipeline(model, example=inputs, targets=y, loss=loss, schedule=how, place=fpipe.Place(mesh=mesh))
    step, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, y)
    assert same_bits(step.loss, want.loss), (step.loss, want.loss)
    for name, grad in grads.items():
        assert same_bits(local(grad), local(want.grads[name])), name
    place = mesh.get_coordinate()[1:]
    mine = [name for at, names in gather((place, list(grads))) if at == place for name in names]
    assert set(mine) == set(want.grads)
    return pipe, grads, want


def own_tokens(mesh):
    """Return the tokens of this process's place among the experts."""
    x, y = experts.tokens(MICROBATCHES, seed=mesh.get_local_rank("ep"))
    return (x,), y


def all_tokens():
    """Return the tokens of all processes, by microbatch."""
    batches = [experts.tokens(MICROBATCHES, seed=k) for k in range(2)]
    x, y = (
        torch.cat([part for parts in zip(*[one.chunk(MICROBATCHES) for one in both], strict=True) for part in parts])
        for both in zip(*batches, strict=True)
    )
    return (x,), y


def experts_take_tokens_of_all(family: str, rank: int, size: int) -> None:
    mesh = mesh_of(pp=2, ep=2)
    require_loop(experts.Mixture(TIGHT, mesh["ep"]), experts.loss, *own_tokens(mesh), mesh, family)


def parts_of_sequences_see_all(family: str, rank: int, size: int) -> None:
    mesh = mesh_of(pp=2, cp=2)
    *inputs, y = contexts.words(MICROBATCHES)
    whole = plain_loop(contexts.Reader(), inputs, y, contexts.loss)
    *parts, own = (one.chunk(2, 1)[mesh.get_local_rank("cp")].contiguous() for one in (*inputs, y))
    model = contexts.Reader(mesh["cp"])
    _, _, want = require_loop(model, contexts.loss, tuple(parts), own, mesh, family)
    for name, grad in want.grads.items():
        dist.all_reduce(grad, group=mesh.get_group("cp"))
        torch.testing.assert_close(grad / 2, whole.grads[name], rtol=0, atol=1e-6)


for _family in PAIRS:
    _day = [4] if _family == "zb_v" else []
    case(partial(experts_take_tokens_of_all, _family), sizes=[4], day=_day, name=f"experts_{_family}_on_2_pp_2_ep")
    _name = f"parts_of_sequences_{_family}_on_2_pp_2_cp"
    case(partial(parts_of_sequences_see_all, _family), sizes=[4], day=[], name=_name)


@case(sizes=[4], day=[])
def norms_count_experts_of_all_processes_on_a_mesh(rank, size):
    """Experts are DTensors, in shards; the router's gradients are still to be added. One process computes the same."""
    mesh = mesh_of(pp=2, ep=2)
    model = experts.Mixture(ROOMY, mesh["ep"], experts.PlacedLayer)
    pipe, grads, _ = require_loop(model, experts.loss, *own_tokens(mesh), mesh, "zb_v")
    want = plain_loop(experts.Mixture(2 * ROOMY), *all_tokens(), experts.loss)
    for name, grad in grads.items():
        torch.testing.assert_close(whole(grad) / 2, want.grads[name], rtol=0, atol=1e-6)
    total = torch.nn.utils.get_total_norm(want.grads.values())
    torch.testing.assert_close(fpipe.norm(pipe, grads) / 2, total)
    clipped, before = fpipe.clip(pipe, grads, 0.1)
    torch.testing.assert_close((before / 2, fpipe.norm(pipe, clipped)), (total, torch.tensor(0.1)))


@case(sizes=[4], day=[])
def norms_of_plain_experts_are_refused_on_a_mesh(rank, size):
    """Each process has experts of its own as plain tensors, of which one would count for all."""
    mesh = mesh_of(pp=2, ep=2)
    inputs, y = own_tokens(mesh)
    how = one_f_one_b(ranks=2, microbatches=MICROBATCHES)
    model = experts.Mixture(ROOMY, mesh["ep"])
    pipe = fpipe.pipeline(
        model, example=inputs, targets=y, loss=experts.loss, schedule=how, place=fpipe.Place(mesh=mesh)
    )
    _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, y)
    with raises(fpipe.InputError, "got plain tensors of norms", "make them DTensors"):
        fpipe.norm(pipe, grads)


# ----------------------------------- What models exchange: with processes that run the same stage, or with others


@case(sizes=[4])
def exchanges_inside_a_stage_on_a_mesh_that_is_sliced_there(rank, size):
    """In a loss, a forward, a backward, and hooks of all kinds."""
    mesh = mesh_of(pp=2, tp=2)
    ways = [*collectives.EXCHANGES.values()]
    places = {where: ways[k % len(ways)] for k, where in enumerate(collectives.PLACES)}
    model, loss = collectives.exchanging(places, lambda: mesh["tp"])
    torch.manual_seed(mesh.get_local_rank("tp"))
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    how = one_f_one_b(2, MICROBATCHES)
    pipe = fpipe.pipeline(
        model, example=(x,), targets=y, loss=loss, schedule=how, place=fpipe.Place(mesh=mesh), cuts=["4"]
    )
    step, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), y)
    want = plain_loop(model, (x,), y, loss)
    assert same_bits(step.loss, want.loss)
    require_same_gradients(grads, want.grads)


@case(sizes=[2], day=[])
def exchanges_with_other_stages_are_refused(rank, size):
    """When the pipeline is built, before the first step would hang, on all processes alike."""
    mesh, x, how = mesh_of(world=size), torch.ones(4, 4), one_f_one_b(size, 2)
    pairs = product(collectives.PLACES, collectives.REFUSED)
    chosen = [*pairs] if NIGHTLY else covering_array(collectives.PLACES, [*collectives.REFUSED])
    for where, exchange in chosen:
        model, loss = collectives.exchanging({where: collectives.REFUSED[exchange]}, lambda: mesh)
        words = {"loss": "loss", "forward": "module 1", "forward hook": "module 1", "hook of a parameter": "1.weight"}
        with raises(fpipe.CaptureError, words.get(where, "stage 0 (modules 0 to 1), its backward"), "collectives.py"):
            fpipe.pipeline(model, example=(x,), targets=x, loss=loss, schedule=how, cuts=["2"])


# --- Faults that fuzzing found in combinations of parallelism elsewhere (NVIDIA/Megatron-LM issue 7452), by its numbers


def smoothed(logits, wanted):
    return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), label_smoothing=0.1)


def smoothed_whole(logits, wanted):
    return smoothed(logits.full_tensor(), wanted)


@case(sizes=[4], day=[])
def smoothed_losses_of_a_split_head_on_a_mesh(rank, size):
    """Findings 1, 2 and 11: the vocabulary is split; logits are gathered by the head, or by the loss."""
    mesh, (ids, wanted) = mesh_of(pp=2, tp=2), words()
    alone = plain_loop(GPT(), {"ids": ids}, wanted, smoothed)
    total = torch.nn.utils.get_total_norm(alone.grads.values())
    for logits, loss in ((Replicate(), smoothed), (Shard(-1), smoothed_whole)):
        model = column_and_row(GPT(), mesh["tp"])
        plan = {"head": ColwiseParallel(output_layouts=logits, use_local_output=logits == Replicate())}
        model = parallelize_module(model, mesh["tp"], plan)
        want = plain_loop(model, {"ids": ids}, wanted, loss)
        how = zb_v(2, MICROBATCHES)
        pipe = fpipe.pipeline(
            model, example=(ids,), targets=wanted, loss=loss, schedule=how, place=fpipe.Place(mesh=mesh)
        )
        step, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (ids,), wanted)
        assert same_bits(step.loss, want.loss)
        require_same_gradients(grads, want.grads)
        torch.testing.assert_close(step.loss, alone.loss)
        require_close(grads, alone.grads)
        torch.testing.assert_close(fpipe.norm(pipe, grads), total)


@case(sizes=[4], day=[])
def recomputation_in_replicas_of_split_models_on_a_mesh(rank, size):
    """Finding 4: what a replica computes again, it computes with its own group of processes."""
    mesh, (ids, wanted) = mesh_of(pp=1, dp=2, tp=2), words()
    model = by_sequence(GPT(), mesh["tp"])
    found = []
    for how in (one_f_one_b(1, 2), recompute(one_f_one_b(1, 2))):
        pipe = fpipe.pipeline(
            model, example=(ids,), targets=wanted, loss=entropy, schedule=how, place=fpipe.Place(mesh=mesh, dp="dp")
        )
        step, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (ids,), wanted)
        found.append((step.loss, grads))
    (loss, grads), (same, again) = found
    assert same_bits(loss, same)
    assert all(same_bits(local(again[name]), local(grad)) for name, grad in grads.items())
    alone = plain_loop(GPT(), {"ids": ids}, wanted, entropy)  # four microbatches, as two of two replicas
    require_close(grads, alone.grads)


@case(sizes=[4], day=[])
def gradients_of_one_replica_only_on_a_mesh(rank, size):
    """Rows of one process make a layer run; all replicas, or all shards, get its gradient; without any, none does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Rare(), nn.Tanh(), nn.Linear(4, 1)).bfloat16()
    for dim in ("dp", "fsdp"):
        mesh = mesh_of(pp=2, **{dim: 2})
        mine = mesh.get_local_rank(dim)
        options = {"dp": dim} if dim == "dp" else {"shard": dim}
        x, y = torch.zeros(4, 4).bfloat16(), torch.ones(4, 1).bfloat16()
        pipe = fpipe.pipeline(
            model,
            example=(x,),
            targets=y,
            loss=mse,
            schedule=one_f_one_b(2, 2),
            cuts=["3"],
            **grouped({"mesh": mesh, "rows": "own", "unsplittable": [Rare], **options}),
        )
        for large in ([], [0], [1], [0, 1]):
            batches = [x + 40 * (k in large) * torch.eye(4).bfloat16() for k in range(2)]
            _, grads = fpipe.value_and_grad(pipe, sums=torch.float32)(*pipe.init(model), (batches[mine],), y)
            terms = [term for one in batches for term in one_by_one(model, one, y)]
            require_close(grads, {name: sum(one[name].float() for one in terms if name in one) for name in grads})
            names = {name for found in gather(list(grads)) for name in found}
            assert names == {name for one in terms for name in one}, (large, names)


def one_by_one(model, x, y):
    """Yield the gradients of each microbatch, in the model's dtype."""
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        model.zero_grad()
        (mse(model(a), b) / 4).backward()
        yield {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@case(sizes=[4])
def a_branch_of_one_replica_is_refused_on_a_mesh(rank, size):
    """The rows of one replica answer the model's question otherwise: all processes raise; alike, all go on."""
    torch.manual_seed(0)
    mesh, model = mesh_of(pp=2, dp=2), Marked()
    x, y, marks = torch.randn(4, 4), torch.randn(4, 1), torch.zeros(4, 1, dtype=torch.bool)
    pipe = fpipe.pipeline(
        model,
        example=(x, marks),
        targets=y,
        loss=mse,
        schedule=one_f_one_b(2, 2),
        place=fpipe.Place(mesh=mesh, dp="dp", rows="own"),
        cuts=["last"],
    )
    step, state = fpipe.value_and_grad(pipe), pipe.init(model)
    with raises(fpipe.PipelineError):
        step(*state, (x, ~marks if mesh.get_local_rank("dp") else marks), y)
    _, grads = step(*state, (x, ~marks), y)
    assert ("rare.weight" in grads) == ("first.weight" in grads)
