# SPDX-License-Identifier: Apache-2.0
"""Faults that fuzzing found in combinations of parallelism elsewhere (NVIDIA/Megatron-LM issue 7452), by its numbers.

Those that one process can show are in `tests/fpipe/meshes/test_scales.py`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b, recompute, zb_v
from tests.common import tensor_parallel
from tests.common.cases import mse
from tests.common.gates import Marked
from tests.common.tensor_parallel import GPT, MICROBATCHES, local, plain_loop, require_same_gradients, whole, words
from tests.distributed.cases.checks import gather, raises
from tests.distributed.cases.meshes import mesh_of
from tests.distributed.cases.registry import case


def smoothed(logits, wanted):
    return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), label_smoothing=0.1)


def smoothed_whole(logits, wanted):
    return smoothed(logits.full_tensor(), wanted)


@case
def smoothed_losses_of_a_split_head_on_a_mesh(rank, size):
    """Findings 1, 2 and 11: the vocabulary is split; logits are gathered by the head, or by the loss."""
    mesh, (ids, wanted) = mesh_of(pp=2, tp=2), words()
    alone = plain_loop(GPT(), {"ids": ids}, wanted, smoothed)
    total = torch.nn.utils.get_total_norm(alone.grads.values())
    for logits, loss in ((Replicate(), smoothed), (Shard(-1), smoothed_whole)):
        model = tensor_parallel.column_and_row(GPT(), mesh["tp"])
        plan = {"head": ColwiseParallel(output_layouts=logits, use_local_output=logits == Replicate())}
        model = parallelize_module(model, mesh["tp"], plan)
        want = plain_loop(model, {"ids": ids}, wanted, loss)
        how = zb_v(2, MICROBATCHES)
        pipe = fpipe.pipeline(model, example=(ids,), targets=wanted, loss=loss, schedule=how, mesh=mesh)
        step, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (ids,), wanted)
        assert same_bits(step.loss, want.loss)
        require_same_gradients(grads, want.grads)
        torch.testing.assert_close(step.loss, alone.loss)
        for name, grad in grads.items():
            torch.testing.assert_close(whole(grad), alone.grads[name], rtol=0, atol=1e-6)
        torch.testing.assert_close(fpipe.norm(pipe, grads), total)


@case
def recomputation_in_replicas_of_split_models_on_a_mesh(rank, size):
    """Finding 4: what a replica computes again, it computes with its own group of processes."""
    mesh, (ids, wanted) = mesh_of(pp=1, dp=2, tp=2), words()
    model = tensor_parallel.by_sequence(GPT(), mesh["tp"])
    found = []
    for how in (one_f_one_b(1, 2), recompute(one_f_one_b(1, 2))):
        pipe = fpipe.pipeline(
            model, example=(ids,), targets=wanted, loss=tensor_parallel.entropy, schedule=how, mesh=mesh, dp="dp"
        )
        step, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (ids,), wanted)
        found.append((step.loss, grads))
    (loss, grads), (same, again) = found
    assert same_bits(loss, same)
    assert all(same_bits(local(again[name]), local(grad)) for name, grad in grads.items())
    alone = plain_loop(
        GPT(), {"ids": ids}, wanted, tensor_parallel.entropy
    )  # four microbatches, as two of two replicas
    for name, grad in grads.items():
        torch.testing.assert_close(whole(grad), alone.grads[name], rtol=0, atol=1e-6)


class Rare(nn.Module):
    """A layer that only large values go through."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x) if x.detach().max() > 0.9 else x


@case
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
            mesh=mesh,
            rows="own",
            unsplittable=[Rare],
            cuts=["3"],
            **options,
        )
        for large in ([], [0], [1], [0, 1]):
            batches = [x + 40 * (k in large) * torch.eye(4).bfloat16() for k in range(2)]
            _, grads = fpipe.value_and_grad(pipe, sums=torch.float32)(*pipe.init(model), (batches[mine],), y)
            terms = [term for one in batches for term in one_by_one(model, one, y)]
            for name, grad in grads.items():
                exact = sum(one[name].float() for one in terms if name in one)
                torch.testing.assert_close(whole(grad), exact, rtol=0, atol=1e-6)
            names = {name for found in gather(list(grads)) for name in found}
            assert names == {name for one in terms for name in one}, (large, names)


def one_by_one(model, x, y):
    """Yield the gradients of each microbatch, in the model's dtype."""
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        model.zero_grad()
        (mse(model(a), b) / 4).backward()
        yield {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@case
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
        mesh=mesh,
        dp="dp",
        rows="own",
        cuts=["last"],
    )
    step, state = fpipe.value_and_grad(pipe), pipe.init(model)
    with raises(fpipe.PipelineError):
        step(*state, (x, ~marks if mesh.get_local_rank("dp") else marks), y)
    _, grads = step(*state, (x, ~marks), y)
    assert ("rare.weight" in grads) == ("first.weight" in grads)
