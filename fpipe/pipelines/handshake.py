# SPDX-License-Identifier: Apache-2.0
"""Make ranks agree before they act together.

`fpipe.pipelines.fields` makes the fields that they compare, `fpipe.network.agreement` compares them.
Parameters and buffers that several ranks hold, because of ties or replicated stages, are compared by digest before a
pipeline's first step. Other values of the batch and of parameters are not compared, since each rank holds its own part.

Runs when a pipeline is built, at the first batch of a kind, and in every step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from fpipe.errors import TransportError
from fpipe.meshes.copies import PipelineCopies
from fpipe.network.agreement import Field
from fpipe.network.fingerprint import describe_value, digest, digest_tensor
from fpipe.network.ranks import Ranks
from fpipe.pipelines.batch import Batching, SplitBatch
from fpipe.pipelines.fields import (
    CommonArguments,
    argument_fields,
    batch_fields,
    call_fields,
    number_fields,
    plan_fields,
)
from fpipe.pipelines.inputs import State, scatter
from fpipe.pipelines.memo import Agreement
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.signature import Signature
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.variant import Variant
from fpipe.runtime.executor import Inputs
from fpipe.tensors.arguments import require_arguments, require_pipeline, require_seed
from schedules import Schedule

NO_ARGUMENTS: Final = CommonArguments()


@contextmanager
def call_together(function: Callable[..., Any], given: Mapping[str, Any]) -> Iterator[Pipeline]:
    """Return the context of a public function that all ranks of `given["pipe"]` call, with its arguments checked.

    An error in it is raised on all ranks, until they have agreed. Raise `InputError` for an argument that is not of the
    type that the function is annotated with.
    """
    name, pipe = function.__name__, given["pipe"]
    require_pipeline(name, pipe)
    with pipe.ranks.enter_call(name):
        require_arguments(function, given)
        yield pipe


def agree_on_arguments(pipe: Pipeline, **arguments: object) -> None:
    """Raise `TransportError` on all ranks unless they call the same function with the same values of these."""
    pipe.ranks.agree(lambda: [Field.of(name, describe_value(value)) for name, value in arguments.items()])


def require_same(pipe: Pipeline, /, **values: Any) -> None:
    """Raise `TransportError`, on every rank, unless all ranks pass the same values, by the same names.

    Steps compare what they are passed. What only your script knows of, an optimizer that updates outside of
    `fpipe.train_step` for one, can be compared here, once or as often as you like: it costs one small message. Every
    rank must call this.

    Numbers, strings, containers and tensors are compared by value, optimizers, functions and modules by their code and
    what they hold, other objects by their class.

    >>> import torch, fpipe
    >>> from schedules import gpipe
    >>> model = torch.nn.Linear(2, 1)
    >>> pipe = fpipe.pipeline(model, example=(torch.ones(2, 2),), loss=torch.mean, schedule=gpipe(1, 2))
    >>> adam = fpipe.optimizer(torch.optim.AdamW, lr=3e-4)
    >>> fpipe.require_same(pipe, optimizer=adam, first_seed=17)
    """
    with call_together(require_same, {"pipe": pipe}):
        agree_on_arguments(pipe, values=values)


def agree_to_build(ranks: Ranks, schedule: Schedule, batching: Batching, plans: int, copies: PipelineCopies) -> None:
    """Raise `TransportError` on all ranks unless all of them build a pipeline with these arguments."""
    ranks.agree(lambda: argument_fields(schedule, batching, plans, copies), "its arguments")


def agree_on_plan(
    pipe: Pipeline, variant: Variant, signature: Signature | None = None, call: CommonArguments = NO_ARGUMENTS
) -> StepPlan:
    """Return the plan for a kind of batch, once all ranks have agreed on it and connected its channels.

    Every rank must request the same plans in the same order. Raise `TransportError` on all of them if one doesn't.
    """
    kind = pipe.planner.kind(variant, signature)
    known = pipe.memo.batches.get(kind)
    if known is None or known.agreement is None:
        pipe.ranks.agree(lambda: [*batch_fields(pipe, kind), *call_fields(call)])
        plan, fields = pipe.plan(*kind), list[Field]()

        def record_fields() -> Sequence[Field]:
            fields.extend(plan_fields(pipe, plan, *kind))
            return fields

        pipe.ranks.agree(record_fields, "a new kind of batch")
        pipe.ranks.connect(plan.program.channels)
        summary = digest(f"{field.name} {field.digest}" for field in fields)
        user = weakref.proxy(pipe)  # what a pipeline caches must not keep it alive
        pipe.memo.agree(kind, Agreement(summary, batch_fields(user, kind, summary)))
        pipe.ranks.forget_layouts()
    return pipe.memo.batches[kind].plan


def agree_to_step(
    pipe: Pipeline, variant: Variant, params: State, buffers: State, batch: SplitBatch, call: CommonArguments
) -> tuple[StepPlan, dict[int, Inputs]]:
    """Return the plan for a batch and the inputs of each copy here, once all ranks have agreed on the step."""
    require_seed(call.seed)
    kind = variant, batch.signature
    plan = agree_on_plan(pipe, *kind, call)
    plan.watch.require_unchanged()
    if pipe.rechecks.is_due:
        pipe.rechecks.run(pipe.captures)
    links = pipe.copies.link() if pipe.copies.count > 1 else {}
    inputs = {
        copy: scatter(part, pipe.holdings.locals(params, copy), buffers, batch, call.seed, links.get(copy))
        for copy, part in plan.parts.items()
    }
    numbers = number_fields(batch.signature)
    pipe.ranks.agree(lambda: [*pipe.memo.agreements[kind].fields, *call_fields(call), *numbers])
    pipe.memo.use(kind)
    if not pipe.compared:
        _require_same_copies(pipe, plan, {**params, **buffers})
        pipe.compared.add(kind)
    return plan, inputs


def _require_same_copies(pipe: Pipeline, plan: StepPlan, held: Mapping[str, Tensor]) -> None:
    """Raise `TransportError` on all ranks if some hold different values of the same parameter or buffer.

    Replicas on a mesh hold the same of everything. Processes with other shards, or other parts of the model's own
    parallelism, are not compared.
    """
    homes, copies = _ranks_by_name(plan), pipe.copies
    alone = len(pipe.ranks.ranks) == plan.program.schedule.ranks and copies.is_local
    shared = [name for name, ranks in homes.items() if len(ranks) > 1 or copies.replicas > 1]
    if alone or not shared:
        return
    mine = [int(digest_tensor(held[name]), 16) >> 1 if name in held else 0 for name in shared]
    rows = torch.cat(pipe.ranks.gather_rows(torch.tensor([[copies.position, *mine]])))
    for k, name in enumerate(shared):
        for position in sorted(set(rows[:, 0].tolist())):
            holders = ((rows[:, 0] == position) & (rows[:, k + 1] != 0)).nonzero().flatten().tolist()
            _require_same_digests(name, {rank: int(rows[rank, k + 1]) for rank in holders})


def _require_same_digests(name: str, found: Mapping[int, int]) -> None:
    """Raise `TransportError` unless all ranks have the same digest."""
    if len(set(found.values())) > 1:
        first, other = next((a, b) for a in found for b in found if found[a] != found[b])
        raise TransportError(
            f"{name!r}, of which ranks {list(found)} hold copies: got different values on ranks {first} and "
            f"{other}, expected equal copies. Seed every process the same before it builds the model, or load the "
            "same checkpoint on all of them, and update every copy with the same gradient."
        )


def _ranks_by_name(plan: StepPlan) -> dict[str, set[int]]:
    """Return the ranks that hold each parameter and buffer."""
    found: dict[str, set[int]] = {}
    for stage in plan.assembly.stages:
        for name in (*stage.parameters, *stage.buffers, *stage.unused):
            found.setdefault(name, set()).update(plan.placement.replicas(stage.index))
    return found
