# SPDX-License-Identifier: Apache-2.0
"""Four processes train as one device does, in two pipelines of two and in one of four."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import dualpipe, one_f_one_b, zb_h1, zb_v
from tests.common.running import build, run, run_reference
from tests.common.sizes import NIGHTLY
from tests.common.training import (
    MICROBATCHES,
    MODELS,
    History,
    require_same_history,
    train,
    train_alone,
    train_low,
    train_low_alone,
    train_scaled,
    train_scaled_alone,
)
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import case, gather

RANKS, FACTORIES = 4, (one_f_one_b, zb_h1, zb_v)
BY_DAY = (("gpt", zb_v, 2), ("mlp", zb_h1, 4))
BY_NIGHT = tuple((name, factory, size) for name in MODELS for factory in FACTORIES for size in (2, 4))
RUNS = BY_NIGHT if NIGHTLY else BY_DAY


def neighbours(size: int) -> Any:
    """Return the group of this process, of all groups of `size` neighbours."""
    ranks = range(dist.get_world_size())
    groups = [dist.new_group([*ranks[first : first + size]]) for first in ranks[::size]]
    return groups[dist.get_rank() // size]


def plain_loops() -> dict[str, History]:
    """What plain loops compute; each process runs those of some models."""
    folder = Path(os.environ["REPORT"])
    names = sorted({name for name, *_ in RUNS})
    for name in names[dist.get_rank() :: RANKS]:
        torch.save(train_alone(name), folder / name)
    dist.barrier()
    return {name: torch.load(folder / name, weights_only=False) for name in names}


@case(sizes=[4], day=[])
def training_is_that_of_a_plain_loop(rank, size):
    """Losses, norms, parameters, buffers and optimizer state have the bits of plain loops."""
    wanted, pair = plain_loops(), neighbours(2)
    for name, factory, ranks in RUNS:
        got = train(name, factory(ranks, MICROBATCHES), group=pair if ranks == 2 else None)
        require_same_history(got, wanted[name])
        shares = gather((list(got.params), list(got.buffers)))
        assert {key for keys, _ in shares for key in keys} == wanted[name].params.keys()
        assert {key for _, keys in shares for key in keys} == wanted[name].buffers.keys()


@case(sizes=[4], day=[])
def training_in_low_precision(rank, size):
    """Every rank skips the same updates, and tied copies stay equal."""
    require_same_history(train_scaled(one_f_one_b(2, MICROBATCHES), neighbours(2)), train_scaled_alone())
    if NIGHTLY:
        require_same_history(train_low(zb_h1(RANKS, MICROBATCHES)), train_low_alone())


@case(sizes=[4], day=[])
def norms_are_those_of_one_device(rank, size):
    """Of several dtypes, tied and replicated, complex, and absent gradients."""
    for name, factory in (("mixed_precision", one_f_one_b), ("chained", dualpipe), ("unused", zb_h1)):
        pipe, model, inputs, targets = build(ZOO[name], factory(RANKS, MICROBATCHES), 8, capture="trace")
        grads, whole = run(pipe, model, inputs, targets).grads, run_reference(pipe, model, inputs, targets).grads
        for key, p in model.named_parameters():
            p.grad = whole.get(key)
        for order in (2.0, math.inf):
            total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], order)
            assert same_bits(fpipe.norm(pipe, grads, order), total)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        clipped, mine = fpipe.clip(pipe, grads, 1e-2)
        assert same_bits(norm, mine)
        assert all(same_bits(clipped[key], model.get_parameter(key).grad) for key in clipped)


@case(sizes=[2])
def trees_of_a_share(rank, size):
    """A tree has `None` where another rank holds the leaf; steps, norms and updates are those on names."""
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(2, MICROBATCHES), 8, capture="trace")
    whole = {"0": {}}
    for name, p in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        whole.setdefault(path, {})[leaf] = p
    params, buffers = pipe.init(model)
    tree = fpipe.as_tree(params, like=whole)
    assert any(leaf is None for inner in tree.values() for leaf in inner.values())
    adam, step = fpipe.optimizer(torch.optim.Adam, lr=0.1), fpipe.value_and_grad(pipe)
    (_, grads), (_, named) = step(tree, buffers, inputs, targets), step(params, buffers, inputs, targets)
    (grads, total), (named, norm) = fpipe.clip(pipe, grads, 0.1), fpipe.clip(pipe, named, 0.1)
    assert same_bits(total, norm)
    new, theirs = adam.update(grads, adam.init(tree), tree)[0], adam.update(named, adam.init(params), params)[0]
    assert new.keys() == whole.keys()
    assert all(same_bits(one, theirs[name]) for name, one in fpipe.by_name(new).items())


@case(sizes=[4])
def gradients_that_are_not_finite_on_one_rank(rank, size):
    """All ranks hear of them; and norms count names that are absent, or left out, alike."""
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(RANKS, MICROBATCHES), 8, capture="trace")
    grads = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets)[1]
    spoiled = {name: torch.full_like(grad, math.nan) if rank == 3 else grad for name, grad in grads.items()}
    assert fpipe.all_finite(pipe, grads)
    assert not fpipe.all_finite(pipe, spoiled)
    absent = {name: grad for name, grad in grads.items() if not name.endswith(".bias")}
    assert same_bits(fpipe.norm(pipe, absent), fpipe.norm(pipe, grads, names="*.weight"))
