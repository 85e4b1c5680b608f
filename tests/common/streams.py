# SPDX-License-Identifier: Apache-2.0
"""Streams of batches: by a pipeline, by the reference, and by a loop that knows the formulas of the papers only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

import fpipe
from tests.common.comparison import require_part
from tests.common.running import SEED

Version = Callable[[int, int], int]
"""Maps a stage and a microbatch of the stream to the number of updates before it."""


class Trained(NamedTuple):
    """What a stream leaves."""

    losses: list[Tensor]
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    state: dict[str, dict[str, Any]]


def decay(t: int) -> dict[str, float]:
    """The options of update `t`."""
    return {"lr": 0.05 / (1 + t)}


def train(make, pipe, model, batches, optimizer, look_ahead=None, seed=SEED, streams=1) -> Trained:
    """Streams by `fpipe.train_stream` or `fpipe.reference_stream`, each from the end of the last one."""
    params, buffers = pipe.init(model) if make is fpipe.train_stream else whole(model)
    begin, state, losses, each = make(pipe, optimizer, look_ahead), optimizer.init(params), [], len(batches) // streams
    for first in range(0, len(batches), each):
        stream = begin(params, buffers, state, batches[first : first + each], seed=seed, options=decay)
        losses += stream
        params, buffers, state = stream.end
    return Trained(losses, params, buffers, state)


def whole(model) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All parameters and buffers of a model, copied."""
    params = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in model.named_parameters()}
    return params, {n: b.clone() for n, b in model.named_buffers()}


def require_equal(got: Trained, want: Trained) -> None:
    """Raise unless what is here equals the part of `want` of the same names, bit for bit."""
    for what, mine, theirs in zip(Trained._fields, got, want, strict=True):
        require_part(mine, theirs, what)


def train_by_hand(model, loss, batches, stage_of: dict[str, int], version: Version, each: int, update) -> Trained:
    """A plain eager loop with delays; `update(t, name, p, grad)` returns the new parameter."""
    past = {name: [p.detach().clone()] for name, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    losses = []
    for t, ((x,), y) in enumerate(batches):
        sums: dict[str, Tensor] = {}
        total = None
        for i, (part, target) in enumerate(zip(x.tensor_split(each), y.tensor_split(each), strict=True)):
            used = {n: past[n][version(stage_of[n], t * each + i)].clone().requires_grad_() for n in past}
            one = loss(functional_call(model, {**used, **buffers}, (part,)), target) / each
            for name, grad in zip(used, torch.autograd.grad(one, list(used.values())), strict=True):
                sums[name] = sums[name] + grad if name in sums else grad
            total = one.detach() if total is None else total + one.detach()
        losses.append(total)
        for name, grad in sums.items():
            past[name].append(update(t, name, past[name][-1], grad))
    return Trained(losses, {n: versions[-1] for n, versions in past.items()}, buffers, {})
