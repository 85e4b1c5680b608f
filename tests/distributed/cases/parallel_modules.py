# SPDX-License-Identifier: Apache-2.0
"""Modules that compute over dimensions of the mesh that fpipe has no name for: experts, and parts of sequences."""

from __future__ import annotations

import torch
import torch.distributed as dist

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b, zb_v
from tests.common import contexts, experts
from tests.common.tensor_parallel import Plain, local, whole
from tests.distributed.cases.checks import gather, raises
from tests.distributed.cases.meshes import mesh_of
from tests.distributed.cases.registry import case

MICROBATCHES = 4
FAMILIES = {"1f1b": one_f_one_b, "zb_v": zb_v}
TIGHT, ROOMY = 2, experts.TOKENS


def loop(model, loss, inputs, y, microbatches: int = MICROBATCHES) -> Plain:
    """Return what a plain loop computes; nothing is copied, since process groups can't be."""
    total = torch.zeros(())
    for *part, wanted in zip(*[one.chunk(microbatches) for one in (*inputs, y)], strict=True):
        value = loss(model(*part), wanted) / microbatches
        value.backward()
        total = total + value.detach()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Plain(total, grads)


def require_loop(model, loss, inputs, y, mesh, family: str) -> tuple[fpipe.Pipeline, dict, Plain]:
    """Require the bits of the plain loop over the same modules and process groups; return what both have."""
    want = loop(model, loss, inputs, y)
    how = FAMILIES[family](ranks=2, microbatches=MICROBATCHES)
    pipe = fpipe.pipeline(model, example=inputs, targets=y, loss=loss, schedule=how, mesh=mesh)
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


def _make_experts_case(family: str) -> None:
    def run(rank: int, size: int) -> None:
        mesh = mesh_of(pp=2, ep=2)
        require_loop(experts.Mixture(TIGHT, mesh["ep"]), experts.loss, *own_tokens(mesh), mesh, family)

    run.__name__ = f"experts_{family}_on_2_pp_2_ep"
    case(run)


def _make_contexts_case(family: str) -> None:
    def run(rank: int, size: int) -> None:
        mesh = mesh_of(pp=2, cp=2)
        *inputs, y = contexts.words(MICROBATCHES)
        whole = loop(contexts.Reader(), contexts.loss, inputs, y)
        *parts, own = (one.chunk(2, 1)[mesh.get_local_rank("cp")].contiguous() for one in (*inputs, y))
        model = contexts.Reader(mesh["cp"])
        _, _, want = require_loop(model, contexts.loss, tuple(parts), own, mesh, family)
        for name, grad in want.grads.items():
            dist.all_reduce(grad, group=mesh.get_group("cp"))
            torch.testing.assert_close(grad / 2, whole.grads[name], rtol=0, atol=1e-6)

    run.__name__ = f"parts_of_sequences_{family}_on_2_pp_2_cp"
    case(run)


for _family in FAMILIES:
    _make_experts_case(_family)
    _make_contexts_case(_family)


@case
def norms_count_experts_of_all_processes_on_a_mesh(rank, size):
    """Experts are DTensors, in shards; the router's gradients are still to be added. One process computes the same."""
    mesh = mesh_of(pp=2, ep=2)
    model = experts.Mixture(ROOMY, mesh["ep"], experts.PlacedLayer)
    pipe, grads, _ = require_loop(model, experts.loss, *own_tokens(mesh), mesh, "zb_v")
    want = loop(experts.Mixture(2 * ROOMY), experts.loss, *all_tokens())
    for name, grad in grads.items():
        torch.testing.assert_close(whole(grad) / 2, want.grads[name], rtol=0, atol=1e-6)
    total = torch.nn.utils.get_total_norm(want.grads.values())
    torch.testing.assert_close(fpipe.norm(pipe, grads) / 2, total)
    clipped, before = fpipe.clip(pipe, grads, 0.1)
    torch.testing.assert_close((before / 2, fpipe.norm(pipe, clipped)), (total, torch.tensor(0.1)))


@case
def norms_of_plain_experts_are_refused_on_a_mesh(rank, size):
    """Each process has experts of its own as plain tensors, of which one would count for all."""
    mesh = mesh_of(pp=2, ep=2)
    inputs, y = own_tokens(mesh)
    how = one_f_one_b(ranks=2, microbatches=MICROBATCHES)
    model = experts.Mixture(ROOMY, mesh["ep"])
    pipe = fpipe.pipeline(model, example=inputs, targets=y, loss=experts.loss, schedule=how, mesh=mesh)
    _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, y)
    with raises(fpipe.InputError, "got plain tensors of norms", "make them DTensors"):
        fpipe.norm(pipe, grads)
