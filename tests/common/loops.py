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

    `dims` are a pair of prefixes: how inputs and targets are cut. With a weight, the loss is multiplied by its share; a
    microbatch of weight 0 has no loss.
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
        share = 1 if counts is None else counts[i] / sum(counts)
        value = value / microbatches if counts is None else value * share
        values.append(value if share else torch.zeros_like(value.detach()))
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


def loop_as_stated(pipe, model, loss, inputs, targets, onto=(), total=None) -> Result:
    """One device, for a model without state: gradients are added in the order that the schedule of `pipe` states.

    Each replica of a parameter's first stage adds those of its microbatches in its order, the first one to the sums
    `onto`; then the sums are added. A parameter has no gradient if no microbatch uses it. Losses are divided by the
    `total`.
    """
    how, onto = pipe.schedule, dict(onto)
    alone = [gradients_of(i, model, loss, inputs, targets, how.microbatches, total) for i in range(how.microbatches)]
    totals = {
        name: add_replicas(how, stage.index, [one.get(name) for one in alone], onto.get(name))
        for stage in pipe.stages
        for name in stage.grads
    }
    grads = {name: total for name, total in totals.items() if total is not None}
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
    totals: dict[str, list[Tensor | None]] = {}
    for stage in pipe.stages:
        for name in stage.grads:
            terms = [one[uses[stage.index][0] if name == own else name] for one in alone]
            totals.setdefault(name, []).append(add_replicas(how, stage.index, terms))
    grads = {name: add(by_stage) for name, by_stage in totals.items()}
    return loop(model, loss, inputs, targets, how.microbatches)._replace(grads=grads)


def add_replicas(how: Schedule, s: int, terms: list[Tensor | None], onto: Tensor | None = None) -> Tensor | None:
    """Add the terms of all microbatches as the replicas of stage `s` do: each its own, then their sums."""
    sums = []
    for rank in how.placement.replicas(s):
        order = [action.microbatch for action in how.actions(rank) if action.stage == s and action.kind in ("B", "W")]
        sums.append(add([None if sums else onto, *[terms[i] for i in order]]))
    return add(sums)


def add(terms: list[Tensor | None]) -> Tensor | None:
    """Add terms in order; those that are `None` add nothing."""
    present = [term for term in terms if term is not None]
    return functools.reduce(operator.add, present) if present else None


def gradients_of(i: int, model, loss, inputs, targets, microbatches: int, total=None) -> dict[str, Tensor]:
    """The gradients of one microbatch, by `.backward()`; its loss is divided by `total`, or by their number."""
    model, inputs, targets = copy.deepcopy((model, inputs, targets))
    part, wanted = piece(inputs, i, microbatches), piece(targets, i, microbatches)
    out = model(**part) if isinstance(part, dict) else model(*part)
    value = (loss(out) if targets is None else loss(out, wanted)) / (total or microbatches)
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
    """Microbatch `i` of a tree that is cut along `dims`; tensors whose dimension is `None` are copied."""
    if isinstance(dims, tuple | list):
        return type(tree)(piece(part, i, microbatches, dim) for part, dim in zip(tree, dims, strict=True))
    if isinstance(dims, dict):
        return {name: piece(tree[name], i, microbatches, dim) for name, dim in dims.items()}

    def cut(leaf):
        if not isinstance(leaf, Tensor):
            return leaf
        if callable(dims):
            return dims(leaf, microbatches)[i]
        return leaf.clone() if dims is None else leaf.tensor_split(microbatches, dims)[i]

    return optree.tree_map(cut, tree)


def join(trees: list[Any], dim: int = 0) -> Any:
    """The outputs of all microbatches as one tree; scalars are stacked."""

    def joined(*leaves):
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        return torch.cat(leaves, dim) if leaves[0].dim() else torch.stack(leaves)

    return optree.tree_map(joined, *trees)
