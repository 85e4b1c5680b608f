# SPDX-License-Identifier: Apache-2.0
"""Process groups other than the pipeline's: data parallelism, and collectives in a model's forward."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b
from tests.common import collectives
from tests.common.loops import loop
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import gather, raises
from tests.distributed.cases.registry import case


@case
def wrapped_models(rank, size):
    """DDP and FSDP2 modules are refused, alone and inside a model."""
    from torch.distributed.fsdp import fully_shard

    sharded = nn.Linear(4, 4)
    fully_shard(sharded)
    parallel = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    x = torch.randn(4, 4)
    for model, name in (
        (parallel, "DistributedDataParallel"),
        (nn.Sequential(nn.Linear(4, 4), parallel), "DistributedDataParallel"),
        (sharded, "FSDP"),
        (nn.Sequential(nn.Linear(4, 4), sharded), "FSDP"),
    ):
        for capture in ("export", "modules"):
            with raises(fpipe.InputError, name, "expected a plain module", 'dp="dp" or shard='):
                fpipe.pipeline(
                    model,
                    example=(x,),
                    targets=x,
                    loss=nn.functional.mse_loss,
                    schedule=one_f_one_b(ranks=size, microbatches=2),
                    stages=size,
                    capture=capture,
                )


@case
def data_parallel_pipelines(rank, size):
    """Two pipelines of half of the ranks take half of the batch each; gradients are averaged after the step."""
    half = size // 2
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("dp", "pp"))
    replica, mine = divmod(rank, half)
    one = ZOO["tied_sequence"]
    model, inputs, targets = one.make(8)
    how = one_f_one_b(ranks=half, microbatches=2)
    ours = inputs[0].chunk(2)[replica], targets.chunk(2)[replica]
    pipe = fpipe.pipeline(
        model,
        example=(ours[0],),
        targets=ours[1],
        loss=one.loss,
        schedule=how,
        cuts=one.at(half),
        group=mesh["pp"],
    )
    with raises(fpipe.InputError, "the dimensions ['dp', 'pp']", 'group=mesh["pp"]'):
        fpipe.pipeline(model, example=inputs, targets=targets, loss=one.loss, schedule=how, group=mesh)
    step, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (ours[0],), ours[1])
    want = loop(model, one.loss, (ours[0],), ours[1], 2)
    assert same_bits(step.loss, want.loss)
    found = gather((replica, mine, grads))
    assert {name for r, _, part in found if r == replica for name in part} == set(want.grads)
    for name, grad in grads.items():
        assert same_bits(grad, want.grads[name])
        both = [part[name] for _, m, part in found if m == mine]
        whole = loop(model, one.loss, inputs, targets, 4).grads[name]
        assert torch.allclose(sum(both) / 2, whole, atol=1e-6)


@case
def collectives_in_a_module(rank, size):
    """Every process has its own pipeline, and the models call collectives over all processes."""
    groups = [dist.new_group([one]) for one in range(size)]
    for layer, cut, backward in (
        (collectives.Reduced, "cut inside", "autograd"),
        (collectives.Reduced, "whole", "graph"),
        (collectives.ReducedInput, "cut inside", "graph"),
        (collectives.Gathered, "cut inside", "autograd"),
        (collectives.Functional, "whole", "graph"),
        (collectives.Later, "whole", "graph"),
    ):
        collectives.require_same(layer, cut, backward, groups[rank], seed=rank)
