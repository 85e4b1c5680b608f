# SPDX-License-Identifier: Apache-2.0
"""One step: from the user's arguments to each rank's inputs, and from each rank's outcome to the user's results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from fpipe.batching.batch import Batch
from fpipe.batching.memory import require_apart
from fpipe.errors import InputError
from fpipe.ir.captured import Tensors
from fpipe.pipelines.plan import Plan
from fpipe.runtime.executor import Inputs, Outcome
from fpipe.runtime.ranks import Ranks
from fpipe.tensors import random
from fpipe.weights.state import require_names

State: TypeAlias = dict[str, Tensor]


class Step(NamedTuple):
    """The result of one step.

    - `loss`: the sum over microbatches of loss / M, or of loss times its share of the weight, on every rank; `None` if
      no loss was asked for.
    - `outputs`: what the model returned, joined in microbatch order, on the ranks of the last stage and if asked for;
      `None` elsewhere.
    - `buffers`: this process's buffers after the step.
    """

    loss: Tensor | None
    outputs: Any
    buffers: State


def scatter(plan: Plan, params: State, buffers: State, batch: Batch, seed: int | None) -> Inputs:
    """Return the executor's inputs for this process's stages; raise `InputError` if anything is missing or wrong."""
    require_apart(batch.memories, plan.written)
    held, microbatches = plan.held, len(plan.assemblies)
    require_names([name for stage in held for name in (*stage.parameters, *stage.buffers)], params, buffers)
    here = {cut: [cut.stages[stage.index] for stage in held] for cut in plan.cuts}
    leaves = batch.take({leaf for stages in here.values() for stage in stages for leaf in stage.batch})
    taken = {cut: {s.index: s.leaves(params) for s in stages} for cut, stages in here.items()}
    read = {cut: {s.index: _rows(s.batch, leaves, microbatches) for s in stages} for cut, stages in here.items()}
    rows = [read[cut] for cut in plan.assemblies]
    return Inputs(
        params=[taken[cut] for cut in plan.assemblies],
        buffers={stage.index: tuple([buffers[name] for name in stage.buffers]) for stage in held},
        batch=lambda stage, i: rows[i][stage][i],
        keys=keys(plan, seed),
    )


def _rows(read: Sequence[int], leaves: Mapping[int, Sequence[Tensor]], microbatches: int) -> Sequence[Tensors]:
    """Return each microbatch's part of the leaves that are read."""
    return list(zip(*[leaves[leaf] for leaf in read], strict=True)) if read else [()] * microbatches


def keys(plan: Plan, seed: int | None) -> list[int]:
    """Return one key per microbatch; raise `InputError` if the model draws random numbers and there is no seed.

    Keys are slow to make, so none are made if nothing is drawn. If it depends on data whether anything is, drawing
    without a seed is refused when it happens.
    """
    if seed is None and plan.devices:
        raise InputError(
            "seed: got none, expected an integer: the model draws random numbers. Pass seed=step, a new one each step."
        )
    count = len(plan.assemblies)
    if seed is None or not plan.generators:
        return [random.Unseeded()] * count
    return [random.key(seed, i) for i in range(count)]


def gather(plan: Plan, ranks: Ranks, outcomes: Mapping[int, Outcome], buffers: State) -> Step:
    """Return the `Step` that the ranks computed; its loss is shared with all of them."""
    stages, new = plan.assembly.stages, dict(buffers)
    for outcome in outcomes.values():
        for s, state in outcome.buffers.items():
            new.update(zip(stages[s].buffers, state, strict=True))
    results = {i: payload for outcome in outcomes.values() for i, payload in outcome.results.items()}
    last = plan.placement.replicas(len(stages) - 1)
    if len(last) > 1:
        results = _exchanged(plan, ranks, results)
    loss, outputs = joined(plan, results) if results else (None, None)
    if len(last) == 1 and plan.assembly.captured.loss is not None:
        loss = ranks.share(loss, stages[-1].results[0], last[0])
    return Step(loss, outputs if outcomes.keys() & last else None, new)


def _exchanged(plan: Plan, ranks: Ranks, results: Mapping[int, Tensors]) -> dict[int, Tensors]:
    """Return the results of every microbatch; each replica of the last stage has only some of them."""
    lasts = [cut.stages[-1] for cut in plan.assemblies]
    return {
        i: tuple(
            ranks.share(results[i][k] if i in results else None, spec, plan.placement.home(last.index, i))
            for k, spec in enumerate(last.results)
        )
        for i, last in enumerate(lasts)
    }


def gradients(plan: Plan, outcomes: Mapping[int, Outcome]) -> State:
    """Return the gradients, by name, of the parameters that any microbatch used; summed over stages in stage order."""
    stages = plan.assembly.stages
    terms = defaultdict[str, dict[int, Tensor]](dict)
    for outcome in outcomes.values():
        found = [(s, stages[s].grads, stages[s].finished(total)) for s, total in outcome.grads.items() if total]
        found += [(s, stages[s].shared_names[t], total) for (s, t), total in outcome.shared.items()]
        for s, names, total in found:
            for name, grad in zip(names, total, strict=True):
                if grad is not None:
                    terms[name][s] = grad
    return {name: reduce(add, [by_stage[s] for s in sorted(by_stage)]) for name, by_stage in terms.items()}


def joined(plan: Plan, results: Mapping[int, Tensors]) -> tuple[Tensor | None, Any]:
    """Return the sum of the losses, and the outputs' tree with microbatches joined; both in microbatch order."""
    columns = list(zip(*[results[i] for i in sorted(results)], strict=True))
    loss = None
    if plan.assembly.captured.loss is not None:
        first, *rest = columns.pop(0)
        loss = first.clone()
        for one in rest:
            loss.add_(one)
    if plan.joining is None:
        return loss, None
    return loss, plan.joining.join(columns)
