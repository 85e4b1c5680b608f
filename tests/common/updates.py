# SPDX-License-Identifier: Apache-2.0
"""Two ways to train: a step, a clip and an update one after the other, and all in one step that updates early."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fpipe
from tests.common.comparison import require_part
from tests.common.loops import loop
from tests.common.running import SEED, build
from tests.common.sizes import NIGHTLY

STEPS = 20 if NIGHTLY else 8
ADAM = {"lr": 0.05, "weight_decay": 0.01}


class Trained(NamedTuple):
    """What is left of some steps on one process: losses and norms of all of them, and the last tensors."""

    losses: list[Tensor]
    norms: list[Tensor | None]
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    state: dict[str, dict[str, Any]]


def decay(i: int) -> float:
    """The learning rate of step `i`."""
    return 0.05 / (1 + i)


def train_early(pipe, model, inputs, targets, limit, cls=torch.optim.AdamW, options=ADAM, steps=STEPS) -> Trained:
    """Steps that update each stage within."""
    optimizer = fpipe.optimizer(cls, **options)
    params, buffers = pipe.init(model)
    step, state = fpipe.train_step(pipe, optimizer, limit), optimizer.init(params)
    losses, norms = [], []
    for i in range(steps):
        out, params, state, norm = step(params, buffers, state, inputs, targets, seed=SEED + i, lr=decay(i))
        buffers = out.buffers
        losses.append(out.loss)
        norms.append(norm)
    return Trained(losses, norms, params, buffers, state)


def train_after(pipe, model, inputs, targets, limit, cls=torch.optim.AdamW, options=ADAM, steps=STEPS) -> Trained:
    """Steps, each followed by a clip and an update."""
    init, update = fpipe.optimizer(cls, **options)
    params, buffers = pipe.init(model)
    step, state = fpipe.value_and_grad(pipe), init(params)
    losses, norms = [], []
    for i in range(steps):
        out, grads = step(params, buffers, inputs, targets, seed=SEED + i)
        buffers, norm = out.buffers, None
        if limit is not None:
            grads, norm = fpipe.clip(pipe, grads, limit)
        params, state = update(grads, state, params, lr=decay(i))
        losses.append(out.loss)
        norms.append(norm)
    return Trained(losses, norms, params, buffers, state)


def require_same_updates(case, how, limit=None, cuts=None, steps=STEPS, capture="trace", **options) -> Trained:
    """Raise unless both ways give the same bits; return what they give.

    With `limit="median"`, gradients are clipped to the median norm of the steps without a limit, so in some steps they
    are clipped, and in others they are not.
    """
    rows = 2 * how.microbatches
    setting = build(case, how, rows, cuts=cuts, capture=capture, **options)
    if limit == "median":
        norms = train_after(*setting, float("inf"), steps=steps).norms
        limit = float(torch.stack(norms).median())
    early, after = train_early(*setting, limit, steps=steps), train_after(*setting, limit, steps=steps)
    require_equal(early, after)
    return early


def require_equal(one: Trained, other: Trained) -> None:
    """Raise unless both are the same, bit for bit, with names in the same order."""
    require_part(tuple(one), tuple(other))
    for mine, theirs in zip(one[2:4], other[2:4], strict=True):
        assert [(n, leaf.requires_grad) for n, leaf in mine.items()] == [
            (n, p.requires_grad) for n, p in theirs.items()
        ]
    assert [(n, [*slots]) for n, slots in one.state.items()] == [(n, [*slots]) for n, slots in other.state.items()]


def train_plainly(model, loss, inputs, targets, microbatches, limit) -> tuple[list[Tensor], list[Tensor], nn.Module]:
    """Torch alone, on one device: the gradients of every microbatch, a clip, a step of the optimizer."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses, norms = [], []
    for i in range(STEPS):
        found = loop(model, loss, inputs, targets, microbatches)
        losses.append(found.loss)
        for name, p in model.named_parameters():
            p.grad = found.grads.get(name)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit))
        optimizer.param_groups[0]["lr"] = decay(i)
        optimizer.step()
    return losses, norms, model


def require_training_of_a_plain_loop(case, how) -> None:
    """Raise unless steps that update early train as torch alone does, with clipping in some steps but not in all."""
    setting = _, model, inputs, targets = build(case, how, 2 * how.microbatches, capture="trace")
    _, norms, _ = train_plainly(model, case.loss, inputs, targets, how.microbatches, float("inf"))
    limit = float(torch.stack(norms).median())
    losses, norms, model = train_plainly(model, case.loss, inputs, targets, how.microbatches, limit)
    assert len({bool(norm > limit) for norm in norms}) == 2, "in some steps the norm exceeds the limit, in others not"
    early = train_early(*setting, limit)
    require_part([early.losses, early.norms, early.params], [losses, norms, dict(model.named_parameters())])
