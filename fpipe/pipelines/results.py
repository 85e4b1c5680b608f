# SPDX-License-Identifier: Apache-2.0
"""Turn each rank's outcome into the user's results.

Runs in every step, once the program is done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fpipe.ir.captured import Tensors
from fpipe.meshes.copies import Copies
from fpipe.pipelines.inputs import State
from fpipe.pipelines.plan import Plan
from fpipe.runtime.executor import Outcome
from fpipe.runtime.ranks import Ranks

Terms: TypeAlias = tuple[Mapping[int, Any], Mapping[tuple[int, int], Tensors]]
"""The gradients that a rank's stages computed, and those that it received, as in `Outcome`."""


class Step(NamedTuple):
    """The result of one step.

    - `loss`: the sum over microbatches of loss / M, or of loss times its share of the weight, on every rank; `None` if
      no loss was requested. On a mesh, the sum over all copies of the pipeline.
    - `outputs`: the model's outputs, merged in microbatch order, if requested and on the ranks of the last stage;
      otherwise `None`. On a mesh, those of the rows that this process trained on.
    - `buffers`: this process's buffers after the step.
    """

    loss: Tensor | None
    outputs: Any
    buffers: State


def gather(plan: Plan, ranks: Ranks, copies: Mapping[int, Mapping[int, Outcome]], buffers: State) -> Step:
    """Return the `Step` that the ranks computed; broadcast its loss to all of them."""
    parts = {copy: _gather_one(plan.parts[copy], ranks, outcomes, buffers) for copy, outcomes in copies.items()}
    step, *others = parts.values()
    if plan.copies.count == 1:
        return step
    loss = None if step.loss is None else _sum_losses(plan.copies, ranks, [step.loss, *[one.loss for one in others]])
    if others and plan.merge is not None:
        results = [_list_results(copies[copy]) for copy in sorted(copies)]
        rows = dict(enumerate(row for found in results for _, row in sorted(found.items())))
        step = step._replace(outputs=merge_results(plan, rows)[1])
    return step._replace(loss=loss)


def _sum_losses(copies: Copies, ranks: Ranks, own: Sequence[Tensor | None]) -> Tensor:
    """Return the sum of the losses of all copies, in their order, given those of the copies here."""
    mine = torch.stack([loss for loss in own if loss is not None])
    rows = ranks.gather_vectors(mine)
    losses = rows.flatten() if copies.is_local else rows[list(copies.members), 0]
    return reduce(add, losses.unbind())


def _list_results(outcomes: Mapping[int, Outcome]) -> dict[int, Tensors]:
    return {i: payload for outcome in outcomes.values() for i, payload in outcome.results.items()}


def _gather_one(plan: Plan, ranks: Ranks, outcomes: Mapping[int, Outcome], buffers: State) -> Step:
    stages, new = plan.assembly.stages, dict(buffers)
    for outcome in outcomes.values():
        for s, state in outcome.buffers[0].items():  # all microbatches share them
            new.update(zip(stages[s].buffers, state, strict=True))
    results = _list_results(outcomes)
    last = plan.placement.replicas(len(stages) - 1)
    if len(last) > 1:
        results = broadcast_results(plan, ranks, results)
    loss, outputs = merge_results(plan, results) if results else (None, None)
    if len(last) == 1 and plan.assembly.captured.loss is not None:
        loss = ranks.broadcast(loss, stages[-1].results[0], last[0])
    return Step(loss, outputs if outcomes.keys() & last else None, new)


def broadcast_results(plan: Plan, ranks: Ranks, results: Mapping[int, Tensors]) -> dict[int, Tensors]:
    """Return the results of every microbatch on every rank; here are only those of this process's stages."""
    lasts = [cut.stages[-1] for cut in plan.assemblies]
    return {
        i: tuple(
            ranks.broadcast(results[i][k] if i in results else None, spec, plan.placement.home(last.index, i))
            for k, spec in enumerate(last.results)
        )
        for i, last in enumerate(lasts)
    }


def collect_gradients(plan: Plan, outcomes: Mapping[int, Outcome]) -> State:
    """Return the gradients, by name, of the parameters that any microbatch used; summed over stages in stage order."""
    return sum_terms(plan, [(outcome.grads, outcome.shared) for outcome in outcomes.values()], plan.params)


def sum_terms(plan: Plan, held: Iterable[Terms], wanted: Container[str]) -> State:
    """Return the gradients of the `wanted` parameters from what ranks of this process hold of them."""
    stages = plan.assembly.stages
    terms = defaultdict[str, dict[int, Tensor]](dict)
    for grads, shared in held:
        sums = [(s, stages[s].grads, stages[s].complete(total)) for s, total in grads.items() if total]
        sums += [(s, stages[s].names_for(t), total) for (s, t), total in shared.items()]
        for s, names, total in sums:
            for name, grad in zip(names, total, strict=True):
                if grad is not None and name in wanted:
                    terms[name][s] = grad
    return {name: reduce(add, [by_stage[s] for s in sorted(by_stage)]) for name, by_stage in terms.items()}


def merge_results(plan: Plan, results: Mapping[int, Tensors]) -> tuple[Tensor | None, Any]:
    """Return the sum of the losses, and the outputs' tree with microbatches merged; both in microbatch order."""
    columns = list(zip(*[results[i] for i in sorted(results)], strict=True))
    loss = None
    if plan.assembly.captured.loss is not None:
        first, *rest = columns.pop(0)
        loss = first.clone()
        for one in rest:
            loss.add_(one)
    if plan.merge is None:
        return loss, None
    return loss, plan.merge.apply(columns)
