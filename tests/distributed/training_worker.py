# SPDX-License-Identifier: Apache-2.0
"""One of four processes that train in two pipelines of two and in one of four, and refuse together.

What a plain loop computes is computed once, by one process per model. It prints `passed` at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import dualpipe, one_f_one_b, zb_h1, zb_v
from tests.common.running import build, run, run_reference
from tests.common.sizes import NIGHTLY
from tests.common.training import MICROBATCHES, MODELS, History, train_alone, train_low_alone, train_scaled_alone
from tests.common.training_runs import require_same_history, train, train_low, train_scaled
from tests.common.zoo import ZOO

RANKS, FACTORIES = 4, (one_f_one_b, zb_h1, zb_v)
BY_DAY = (("gpt", zb_v, 2), ("mlp", zb_h1, 4))
BY_NIGHT = tuple((name, factory, size) for name in MODELS for factory in FACTORIES for size in (2, 4))
RUNS = BY_NIGHT if NIGHTLY else BY_DAY


def split() -> Any:
    """The group of this process and its neighbour."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, RANKS, 2)]
    return pairs[dist.get_rank() // 2]


def plain_loops(folder: Path) -> dict[str, History]:
    """What plain loops compute; each process runs those of some models."""
    names = sorted({name for name, *_ in RUNS})
    for name in names[dist.get_rank() :: RANKS]:
        torch.save(train_alone(name), folder / name)
    dist.barrier()
    return {name: torch.load(folder / name, weights_only=False) for name in names}


def train_as_alone(folder: Path, pair: Any) -> None:
    """Losses, norms, parameters, buffers and optimizer state have the bits of plain loops."""
    wanted = plain_loops(folder)
    for name, factory, size in RUNS:
        got = train(name, factory(size, MICROBATCHES), group=pair if size == 2 else None)
        require_same_history(got, wanted[name])
        shares = [None] * RANKS
        dist.all_gather_object(shares, (list(got.params), list(got.buffers)))
        assert {key for keys, _ in shares for key in keys} == wanted[name].params.keys()
        assert {key for _, keys in shares for key in keys} == wanted[name].buffers.keys()


def train_in_low_precision(pair: Any) -> None:
    """Every rank skips the same updates, and tied copies stay equal."""
    require_same_history(train_scaled(one_f_one_b(2, MICROBATCHES), pair), train_scaled_alone())
    if NIGHTLY:
        require_same_history(train_low(zb_h1(RANKS, MICROBATCHES)), train_low_alone())


def norms_are_those_of_one_device() -> None:
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


def refuse_together() -> None:
    """What ranks do differently, or one of them does wrong, is an error on all of them; then they go on."""
    rank, last = dist.get_rank(), dist.get_rank() == RANKS - 1
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(RANKS, MICROBATCHES), 8, capture="trace")
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    grads = step(*state, inputs, targets)[1]
    spoiled = {name: torch.full_like(grad, math.nan) if last else grad for name, grad in grads.items()}
    assert fpipe.all_finite(pipe, grads)
    assert not fpipe.all_finite(pipe, spoiled)
    biases = [name for name in grads if name.endswith(".bias")]
    absent = {name: grad for name, grad in grads.items() if name not in biases}
    assert same_bits(fpipe.norm(pipe, absent), fpipe.norm(pipe, grads, names="*.weight"))

    foreign = {"nobody": torch.ones(1)}
    requires(lambda: fpipe.norm(pipe, grads, order=1.0 if last else 2.0), "order=1.0", "order=2.0")
    requires(lambda: fpipe.clip(pipe, grads, 1.0 if last else 2.0), "max_norm=1.0", "max_norm=2.0")
    requires(lambda: fpipe.norm(pipe, grads, names="*.bias" if last else "*.weight"), "*.bias", "*.weight")
    requires(lambda: fpipe.norm(pipe, grads, names="*.bias" if last else "*.bais"), "the pattern '*.bais'")
    requires(lambda: fpipe.norm(pipe, foreign if last else grads), "grads['nobody']")
    requires(lambda: fpipe.all_finite(pipe, foreign if last else grads), "grads['nobody']")
    requires(lambda: step(*state, inputs, targets) if last else fpipe.clip(pipe, grads, 1.0), "a step", "clip")
    for cls in (torch.optim.LBFGS, torch.optim.SGD):
        options = {} if cls is torch.optim.LBFGS else {"groups": {"*.bais": {}}, "names": pipe.names}
        try:
            fpipe.optimizer(cls, **options)
        except fpipe.InputError:
            continue
        raise AssertionError(f"rank {rank}: {cls} was not refused")
    step(*state, inputs, targets)


def requires(call: Callable[[], object], *words: str) -> None:
    """Require an error, on every rank, that says these words on one rank at least."""
    try:
        call()
    except fpipe.PipelineError as error:
        found = str(error)
    else:
        raise AssertionError(f"nothing raised, expected an error about {words}")
    texts = [None] * RANKS
    dist.all_gather_object(texts, found)
    assert any(all(word in text for word in words) for text in texts), texts


def main(rank: int, store: str, where: str) -> None:
    torch.set_num_threads(1)
    folder = Path(where)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(minutes=10)
    )
    pair = split()
    norms_are_those_of_one_device()
    refuse_together()
    train_as_alone(folder, pair)
    train_in_low_precision(pair)
    dist.barrier()
    dist.destroy_process_group()
    print("passed")
