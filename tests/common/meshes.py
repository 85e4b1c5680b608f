# SPDX-License-Identifier: Apache-2.0
"""Meshes that tests use, the plain loop over the copies of a pipeline, and gradients of several processes."""

from __future__ import annotations

from functools import reduce
from operator import add

import torch
from hypothesis import strategies as st

import fpipe
from fpipe.tensors.spec import OptionalSpec, Spec
from tests.common.generators import seeded

# --------------------------------------------- Meshes that tests use, and the plain loop over the copies of a pipeline

SHAPES = {"dp": (2, 1), "shard": (1, 2), "both": (2, 2), "three replicas": (3, 1), "three shards": (1, 3)}
"""The number of replicas, and of shards, of the meshes that are tried."""


def options(ranks: int, replicas: int, shards: int, gathered: int | None = 1) -> dict[str, object]:
    """The arguments of `fpipe.pipeline` for a mesh of these sizes."""
    mesh = {"pp": ranks} | ({"dp": replicas} if replicas > 1 else {}) | ({"fsdp": shards} if shards > 1 else {})
    sharded = {"shard": fpipe.Sharded("fsdp", gathered)} if shards > 1 else {}
    return {"mesh": mesh, **({"dp": "dp"} if replicas > 1 else {}), **sharded}


def loop_over_copies(model, loss, x, y, microbatches: int, replicas: int, shards: int, mean: bool = True):
    """The loss and gradients of a plain loop: each copy's microbatches in turn, then sums over shards and replicas."""
    count = replicas * shards
    losses, grads = [], []
    for a, b in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
        model.zero_grad()
        values = []
        for one, wanted in zip(a.tensor_split(microbatches), b.tensor_split(microbatches), strict=True):
            value = loss(model(one), wanted) / (microbatches * count if mean else 1)
            value.backward()
            values.append(value.detach())
        losses.append(reduce(add, values))
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    return reduce(add, losses), {name: nested([one[name] for one in grads], shards) for name in grads[0]}


def nested(terms: list[torch.Tensor], shards: int) -> torch.Tensor:
    return reduce(add, [reduce(add, terms[k : k + shards]) for k in range(0, len(terms), shards)])


# ------------------------------------------------------------------------------- Gradients of several processes, drawn


@st.composite
def stacks(draw):
    """Specs of tensors, some of them optional and some transposed, and copies of such tensors for some processes."""
    count = draw(st.integers(1, 4))
    shapes = draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4))
    kinds = [draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])) for _ in shapes]
    optional = [draw(st.booleans()) for _ in shapes]
    generator = seeded(draw(st.integers(0, 99)))
    layouts = [torch.empty(shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True)]
    layouts = [one.transpose(0, -1) if draw(st.booleans()) else one for one in layouts]
    specs = [(OptionalSpec if o else Spec).of(one) for o, one in zip(optional, layouts, strict=True)]
    copies = [
        tuple(
            None
            if isinstance(spec, OptionalSpec) and draw(st.booleans())
            else spec.empty().copy_(torch.randn(spec.shape, generator=generator))
            for spec in specs
        )
        for _ in range(count)
    ]
    return tuple(specs), copies
