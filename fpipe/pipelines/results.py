# SPDX-License-Identifier: Apache-2.0
"""Turn each rank's outcome into the user's results.

Runs in every step, once the program is done.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fpipe.meshes.copies import PipelineCopies
from fpipe.network.ranks import Ranks
from fpipe.pipelines.inputs import State
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.captured import NOTHING, Tensors
from fpipe.runtime.executor import Outcome
from fpipe.tensors.spec import Spec

Terms: TypeAlias = tuple[Mapping[int, Any], Mapping[tuple[int, int], Tensors]]
"""The gradients that a rank's stages computed, and those that it received, as in `Outcome`."""


class Step(NamedTuple):
    """The result of one step.

    - `loss`: the sum over microbatches of loss / M, or of loss times its share of the weight, on every rank; `None` if
      no loss was requested. On a mesh, the sum over all copies of the pipeline.
    - `outputs`: the model's outputs, merged in microbatch order, if requested and on the ranks of the last stage;
      otherwise `None`. On a mesh, those of the rows that this process trained on.
    - `buffers`: this process's buffers after the step.
    - `aux`: the `aux` of the loss, for the microbatches whose outputs this process would have; stacked, or merged by a
      function. `None` if the loss returns none, or this process did not ask for it.
    """

    loss: Tensor | None
    outputs: Any
    buffers: State
    aux: Any = None


class Merged(NamedTuple):
    """The results of all microbatches: the loss, the merged outputs, and a list of the aux of each, if there is any."""

    loss: Tensor | None = None
    outputs: Any = None
    aux: list[Any] | None = None

    def with_buffers(self, buffers: State) -> Step:
        """Return the `Step` with these buffers."""
        return Step(self.loss, self.outputs, buffers, self.aux)


def gather(
    plan: StepPlan,
    ranks: Ranks,
    copies: Mapping[int, Mapping[int, Outcome]],
    buffers: State,
    sends_aux: bool = False,
) -> Step:
    """Return the `Step` that the ranks computed; broadcast its loss to all of them, and on request the loss's aux.

    The aux is that of each microbatch, not merged.
    """
    parts = [_gather_one(plan.parts[copy], ranks, outcomes, buffers, sends_aux) for copy, outcomes in copies.items()]
    step, *others = parts
    if plan.copies.count == 1:
        return step
    if not others:
        return step if step.loss is None else step._replace(loss=_sum_losses(plan.copies, ranks, step.loss))
    found = [(copy, _list_results(outcomes)) for copy, outcomes in copies.items()]
    results = {copy * plan.microbatches + i: values for copy, own in found for i, values in own.items()}
    return merge_results(plan, results).with_buffers(step.buffers)


def _sum_losses(copies: PipelineCopies, ranks: Ranks, own: Tensor) -> Tensor:
    """Return the sum of the losses of all copies, in their order, given this process's."""
    rows = ranks.gather_vectors(own[None])
    return reduce(add, rows[list(copies.members), 0].unbind())


def _list_results(outcomes: Mapping[int, Outcome]) -> dict[int, Tensors]:
    return {i: payload for outcome in outcomes.values() for i, payload in outcome.results.items()}


def _gather_one(plan: StepPlan, ranks: Ranks, outcomes: Mapping[int, Outcome], buffers: State, sends_aux: bool) -> Step:
    stages, new = plan.assembly.stages, dict(buffers)
    for outcome in outcomes.values():
        for s, state in outcome.buffers[0].items():  # all microbatches share them
            new.update(zip(stages[s].buffers, state, strict=True))
    last = plan.placement.replicas(len(stages) - 1)
    results = broadcast_results(plan, ranks, outcomes) if len(last) > 1 else _list_results(outcomes)
    merged = merge_results(plan, results) if results else Merged()
    if len(last) == 1 and plan.assembly.captured.loss is not None:
        merged = merged._replace(loss=ranks.broadcast(merged.loss, plan.lasts[0].stages[-1].results[0], last[0]))
        if sends_aux and plan.assembly.captured.aux_structure != NOTHING and len(ranks.ranks) < plan.placement.ranks:
            merged = merged._replace(aux=_spread_aux(plan, ranks, results, last[0]))
    return merged._replace(outputs=merged.outputs if outcomes.keys() & last else None).with_buffers(new)


def _spread_aux(plan: StepPlan, ranks: Ranks, results: Mapping[int, Tensors], home: int) -> list[Any]:
    """Return the aux of every microbatch on all ranks, sent from the rank `home` in one message."""
    cuts = plan.lasts
    specs = [cut.stages[-1].results[1 : 1 + len(cut.captured.aux)] for cut in cuts]
    flat = [spec for row in specs for spec in row]
    sizes, device = [spec.buffer().numel() for spec in flat], cuts[0].stages[-1].results[0].device
    mine = None
    if results:
        tensors = [tensor for i, row in enumerate(specs) for tensor in results[i][1 : 1 + len(row)]]
        packed = [spec.pack(spec.like(tensor)).flatten().to(device) for spec, tensor in zip(flat, tensors, strict=True)]
        mine = torch.cat(packed) if packed else torch.empty(0, dtype=torch.uint8, device=device)
    data = ranks.broadcast(mine, Spec((sum(sizes),), (1,), torch.uint8, device), home) if flat else None
    pieces = [] if data is None else torch.split(data, sizes)
    unpacked = iter([spec.unpack(piece.clone()).to(spec.device) for spec, piece in zip(flat, pieces, strict=True)])
    return [cut.captured.aux_structure.unflatten([next(unpacked) for _ in cut.captured.aux]) for cut in cuts]


def broadcast_results(plan: StepPlan, ranks: Ranks, outcomes: Mapping[int, Outcome]) -> dict[int, Tensors]:
    """Return the results of every microbatch of a copy, on each of its ranks; maybe without outputs."""
    results = _list_results(outcomes)
    lasts = [cut.stages[-1] for cut in plan.lasts]
    most = None if plan.merge is not None else 1 + len(plan.assembly.captured.aux)
    return {
        i: tuple(
            ranks.broadcast(results[i][k] if i in results else None, spec, plan.placement.home(last.index, i))
            for k, spec in enumerate(last.results[:most])
        )
        for i, last in enumerate(lasts)
    }


def spread_results(plan: StepPlan, ranks: Ranks, found: Mapping[int, Mapping[int, Tensors]]) -> dict[int, Tensors]:
    """Return the results of every microbatch that this process was passed, of whichever copy, given its own copies'."""
    count, copies = plan.microbatches, plan.copies
    if copies.own_rows or copies.count == 1:
        (own,) = found.values()
        return dict(own)
    if copies.is_local:
        return {copy * count + i: values for copy, own in found.items() for i, values in own.items()}
    results = {}
    for i, cut in enumerate(plan.lasts):
        copy, k = divmod(i, count)
        mine, specs = found.get(copy), cut.stages[-1].results
        values: Sequence[Tensor | None] = [None] * len(specs) if mine is None else mine[k]
        pairs = zip(values, specs, strict=True)
        results[i] = tuple(ranks.spread(one, spec, copies.members[copy]) for one, spec in pairs)
    return results


def collect_gradients(plan: StepPlan, outcomes: Mapping[int, Outcome]) -> State:
    """Return the gradients, by name, of the parameters that any microbatch used; summed over stages in stage order."""
    return sum_terms(plan, [(outcome.grads, outcome.shared) for outcome in outcomes.values()], plan.params)


def sum_terms(plan: StepPlan, held: Iterable[Terms], wanted: Container[str]) -> State:
    """Return the gradients of the `wanted` parameters from what ranks of this process hold of them."""
    stages = plan.assembly.stages
    terms: dict[int, State] = {}
    for grads, shared in held:
        sums = [(s, stages[s].grads, stages[s].complete(total)) for s, total in grads.items() if total]
        sums += [(s, stages[s].names_for(t), total) for (s, t), total in shared.items()]
        for s, names, total in sums:
            pairs = zip(names, total, strict=True)
            # A stage on two ranks of this process has the same complete sum on both: it counts once.
            terms.setdefault(s, {}).update({name: grad for name, grad in pairs if grad is not None and name in wanted})
    found: State = {}
    for s in sorted(terms):  # one dict for each stage, none for each name: thousands of them wake the collector
        tied = found.keys() & terms[s].keys()
        found |= terms[s] | {name: add(found[name], terms[s][name]) for name in tied} if tied else terms[s]
    return found


def merge_results(plan: StepPlan, results: Mapping[int, Tensors]) -> Merged:
    """Return the sum of the losses, the outputs' tree with microbatches merged, and each aux; in microbatch order.

    If these are the results of several copies of the pipeline, the losses of each are added first.
    """
    columns = list(zip(*[results[i] for i in sorted(results)], strict=True))
    captured, loss, aux = plan.assembly.captured, None, None
    if captured.loss is not None:
        losses, count = columns.pop(0), plan.microbatches
        loss = reduce(add, [_add_up(losses[k : k + count]) for k in range(0, len(losses), count)])
        beside, columns = columns[: len(captured.aux)], columns[len(captured.aux) :]
        if captured.aux_structure != NOTHING:
            structures = [plan.lasts[i].captured.aux_structure for i in sorted(results)]
            aux = [one.unflatten([column[k] for column in beside]) for k, one in enumerate(structures)]
    return Merged(loss, None if plan.merge is None else plan.merge.apply(columns), aux)


def _add_up(terms: Sequence[Tensor]) -> Tensor:
    first, *rest = terms
    total = first.clone()
    for one in rest:
        total.add_(one)
    return total
