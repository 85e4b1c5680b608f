# SPDX-License-Identifier: Apache-2.0
"""Plain loops over microbatches on one device: the references of the tests, which use nothing of fpipe."""

from __future__ import annotations

import copy
import functools
import operator
from typing import Any

import optree
import torch
from torch import Tensor, nn

from schedules import Schedule
from tests.common.comparison import Result


def loop(model, loss, inputs, targets, microbatches, order=None, dims=(0, 0), weight=None, joined=0) -> Result:
    """One device: slices of the batch, loss / M, `.backward()`, `.grad`. Backwards run in `order`, or as they come.

    `dims` are a pair of prefixes: how inputs and targets are cut. With a weight, the loss is multiplied by its share.
    """
    model, inputs, targets = copy.deepcopy((model, inputs, targets))
    values, outputs = [], []
    parts = [
        [piece(tree, i, microbatches, how) for tree, how in zip((inputs, targets), dims, strict=True)]
        for i in range(microbatches)
    ]
    counts = None if weight is None else [float(weight(*part)) for part in parts]
    for i, (part, wanted) in enumerate(parts):
        out = model(**part) if isinstance(part, dict) else model(*part)
        value = loss(out) if targets is None else loss(out, wanted)
        values.append(value / microbatches if counts is None else value * (counts[i] / sum(counts)))
        out = dict(out) if isinstance(out, dict) else out  # transformers' outputs are dicts of their own kind
        outputs.append(optree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, out))
        if order is None and values[-1].requires_grad:
            values[-1].backward()
    for i in order or ():
        if values[i].requires_grad:
            values[i].backward()
    total = values[0].detach()
    for value in values[1:]:
        total = total + value.detach()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Result(total, join(outputs, joined), grads, dict(model.named_buffers()))


def loop_as_stated(pipe, model, loss, inputs, targets) -> Result:
    """One device, for a model without state: gradients are added as the schedule of `pipe` states it.

    Each replica of a parameter's first stage adds those of its microbatches in its order, and then the sums are added.
    """
    how = pipe.schedule
    alone = [gradients_of(i, model, loss, inputs, targets, how.microbatches) for i in range(how.microbatches)]
    grads = {}
    for stage in pipe.stages:
        ranks = how.placement.replicas(stage.index)
        for name in stage.grads:
            terms = [one[name] for one in alone]
            grads[name] = functools.reduce(operator.add, [added(how, rank, stage.index, terms) for rank in ranks])
    return loop(model, loss, inputs, targets, how.microbatches)._replace(grads=grads)


def loop_untied(pipe, model, loss, inputs, targets, uses: dict[int, tuple[str, ...]]) -> Result:
    """One device, for a model without state: a copy of one tied parameter per stage, whose gradients are added.

    `uses` are the names under which each stage uses the parameter; the first of all is its own.
    """
    how, model = pipe.schedule, copy.deepcopy(model)
    own, *_ = [name for names in uses.values() for name in names]
    for names in uses.values():
        new = nn.Parameter(model.get_parameter(names[0]).detach().clone())
        for path, _, attribute in (name.rpartition(".") for name in names):
            setattr(model.get_submodule(path), attribute, new)
    alone = [gradients_of(i, model, loss, inputs, targets, how.microbatches) for i in range(how.microbatches)]
    totals: dict[str, list[Tensor]] = {}
    for stage in pipe.stages:
        for name in stage.grads:
            terms = [one[uses[stage.index][0] if name == own else name] for one in alone]
            ranks = how.placement.replicas(stage.index)
            total = functools.reduce(operator.add, [added(how, rank, stage.index, terms) for rank in ranks])
            totals.setdefault(name, []).append(total)
    grads = {name: functools.reduce(operator.add, by_stage) for name, by_stage in totals.items()}
    return loop(model, loss, inputs, targets, how.microbatches)._replace(grads=grads)


def added(how: Schedule, rank: int, s: int, terms: list[Tensor]) -> Tensor:
    """The terms of a rank's microbatches, in the order of its weight gradients on stage `s`."""
    order = [action.microbatch for action in how.actions(rank) if action.stage == s and action.kind in ("B", "W")]
    return functools.reduce(operator.add, [terms[i] for i in order])


def gradients_of(i: int, model, loss, inputs, targets, microbatches: int) -> dict[str, Tensor]:
    """Those of one microbatch, by `.backward()`."""
    model, inputs, targets = copy.deepcopy((model, inputs, targets))
    part, wanted = piece(inputs, i, microbatches), piece(targets, i, microbatches)
    out = model(**part) if isinstance(part, dict) else model(*part)
    value = (loss(out) if targets is None else loss(out, wanted)) / microbatches
    if value.requires_grad:
        value.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def eval_loop(model, loss, inputs, targets, microbatches, **changes) -> Result:
    """One device, eval mode, no gradients; `loss` may be `None`."""
    with torch.no_grad():
        computed = loss or (lambda *_: torch.zeros(()))
        found = loop(copy.deepcopy(model).eval(), computed, inputs, targets, microbatches, **changes)
    return found._replace(loss=None if loss is None else found.loss, grads={})


def piece(tree: Any, i: int, microbatches: int, dims: Any = 0) -> Any:
    if isinstance(dims, tuple | list):
        return type(tree)(piece(part, i, microbatches, dim) for part, dim in zip(tree, dims, strict=True))
    if isinstance(dims, dict):
        return {name: piece(tree[name], i, microbatches, dim) for name, dim in dims.items()}

    def cut(leaf):
        if not isinstance(leaf, Tensor):
            return leaf
        if callable(dims):
            return dims(leaf, microbatches)[i]
        return leaf.clone() if dims is None else leaf.chunk(microbatches, dims)[i]

    return optree.tree_map(cut, tree)


def join(trees: list[Any], dim: int = 0) -> Any:
    def joined(*leaves):
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        return torch.cat(leaves, dim) if leaves[0].dim() else torch.stack(leaves)

    return optree.tree_map(joined, *trees)
