# SPDX-License-Identifier: Apache-2.0
"""Build a pipeline from checked arguments: a skeleton of the model, its first capture and plan, agreed on by all ranks.

Runs when a pipeline is built or rebuilt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from fpipe.cutting.partition import Cuts, Evenly
from fpipe.meshes.arguments import MeshPlace, Place, find_place, require_collectives
from fpipe.meshes.copies import ALONE, PipelineCopies
from fpipe.network.agreement import Field
from fpipe.network.job import JobProcesses, resolve_group
from fpipe.network.ranks import Ranks
from fpipe.pipelines.argument_checks import require_buildable, require_trained
from fpipe.pipelines.batch import Batching, SplitBatch
from fpipe.pipelines.captures import Captures
from fpipe.pipelines.handshake import agree_on_plan, agree_to_build, prepare_steps
from fpipe.pipelines.loss_weights import Weight
from fpipe.pipelines.memo import Memo
from fpipe.pipelines.modes import suspend_autocast
from fpipe.pipelines.options import Gradients, Microbatching, Recording
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.planner import Planner
from fpipe.pipelines.resolver import Resolver
from fpipe.pipelines.slices import find_slicing
from fpipe.record.captured import Captured, Unit, Value
from fpipe.record.exchanges import require_joined_hooks
from fpipe.record.fakes.eager_types import hide_fakes
from fpipe.record.front_ends.parts import as_module
from fpipe.record.front_ends.registry import find_capture
from fpipe.record.model.skeleton import skeleton
from fpipe.record.model.state import collect_gradient_hooks, require_exact_hooks, require_own_buffers
from fpipe.record.objective import Loss
from fpipe.record.reads.namespaces import ModelState
from fpipe.record.reads.watch import Watcher
from fpipe.record.slicing import Slicing
from fpipe.record.variant import TRAINING
from fpipe.stages.backends import backend_of
from fpipe.stages.ties import parameters_to_sum
from fpipe.tensors.fake import fake, fake_mode
from schedules import Schedule

_LOG = logging.getLogger(__name__)
OBSERVERS_SHOWN = 4
"""The number of modules that a warning names."""
Model: TypeAlias = nn.Module | Sequence[Callable[..., Any]]
"""A module, or a sequence of modules and functions, each called with what the previous one returned."""


def make_batchings(
    example: Any,
    targets: Any,
    how: Microbatching,
    microbatches: int,
    divisor: int,
    least: int | None = None,
    home: torch.device | None = None,
) -> dict[bool, Batching]:
    """Return how batches like an example are split, with the loss and without; raise `InputError` if they can't be."""
    dims = how.batch_dims
    of_inputs = (dims[0], None) if isinstance(dims, tuple) else dims
    return {
        True: Batching.of(example, targets, dims, microbatches, how.weight, divisor, least, home),
        False: Batching.of(example, None, of_inputs, microbatches, least=least, home=home, may_lack=True),
    }


def agree_on_place(job: JobProcesses, options: Place, schedule: Schedule, home: torch.device) -> MeshPlace:
    """Return the place of this process in the mesh, or in the group, once all processes of the job have agreed."""
    same = {"ranks": [str(schedule.ranks)], "mesh": options.describe()}
    job.agree(lambda: [Field.of(name, lines) for name, lines in same.items()])
    job.require_device(home, resolve_group(options.group))
    place = find_place(options, schedule.ranks, home, job.create)
    require_collectives(schedule, place.copies)
    return place


@dataclass(frozen=True)
class Builder:
    """A builder of pipelines, for one model and its later versions, from the same arguments of `fpipe.pipeline`.

    - `batchings`: how batches are split, with the loss and without.
    - `microbatching`: how slices are cut, and outputs merged. `returned`: as in `Pipeline`, for all of them.
    """

    loss: Loss | None
    schedule: Schedule
    batchings: dict[bool, Batching]
    cuts: Cuts
    recording: Recording
    gradients: Gradients
    microbatching: Microbatching
    ranks: Ranks
    copies: PipelineCopies = ALONE
    returned: WeakValueDictionary[int, Tensor] = field(default_factory=WeakValueDictionary)

    def build(self, module: nn.Module, example: SplitBatch) -> Pipeline:
        """Return the pipeline of a module for batches like the example; every rank must call this."""
        with torch.inference_mode(False), suspend_autocast(TRAINING), self.ranks.enter_call("pipeline"), hide_fakes():
            agree_to_build(self.ranks, self.schedule, self.batchings[True], self.recording.plans, self.copies)
            pipe = self._bind(module, example)
            require_trained(pipe.training.assembly, self.schedule)
            return pipe

    def _rebuild(self, model: Model, weight: Weight | None = None, *, example: SplitBatch) -> Pipeline:
        if weight is not None:
            other = replace(self, batchings={**self.batchings, True: replace(self.batchings[True], weight=weight)})
            return other._rebuild(model, example=replace(example, batching=other.batchings[True]))
        with (
            torch.inference_mode(False),
            suspend_autocast(TRAINING),
            self.ranks.enter_call("pipe.rebuilt"),
            hide_fakes(),
        ):
            module = as_module(model)
            require_buildable(module, (), self.loss, self.schedule)
            return self._bind(module, example)

    def _bind(self, module: nn.Module, example: SplitBatch) -> Pipeline:
        captures = self._captures(module)
        example = replace(example, batching=captures.batchings[True])
        answers = Resolver(captures, TRAINING, example, self.ranks.exchange_text, example=True)
        captures = captures.with_example(answers.resolve())
        kept = example if captures.batchings[True].example.answers else example.without_values()
        sums, backend = parameters_to_sum(self.gradients.tied, module), backend_of(self.gradients.backward)
        merge = self.microbatching.output_dims
        planner = Planner(self.schedule, captures, merge, self.ranks.ranks, sums, backend, self.copies)
        pipe = Pipeline(planner, self.ranks, partial(self._rebuild, example=kept), prepare_steps, self.returned)
        require_exact_hooks(captures.hooks, sums)
        pipe.holdings.require_rows()
        if pipe.training.placed:
            pipe.holdings.require_apart(self.ranks.processes)
        agree_on_plan(pipe, TRAINING)
        require_joined_hooks(pipe.training.assembly.captured)
        require_own_buffers(module, pipe.training.assembly.captured)
        _warn_of_observers(pipe.training.assembly.captured.observers)
        if isinstance(self.cuts.where, Evenly) and not self.cuts.where.among:
            _warn_of_idle_ranks(pipe)
        if example.batching.weight is None and example.signature.divisor > 1:
            _warn_of_sum(pipe.training.assembly.captured)
        return pipe

    def _captures(self, module: nn.Module) -> Captures:
        loss, trains = self.loss, self.schedule.backward
        slicing = find_slicing(module, self.batchings[True], self.schedule, self.microbatching, self.recording)
        captures = make_captures(module, loss, self.batchings, self.cuts, self.recording, trains, slicing)
        return replace(captures, ranks_of=self.ranks.ranks_of)


def make_captures(
    module: nn.Module,
    loss: Loss | None,
    batchings: dict[bool, Batching],
    cuts: Cuts,
    recording: Recording,
    trains: bool,
    slicing: Slicing | None,
) -> Captures:
    """Return an empty cache for a model's captures; it holds none of the user's tensors."""
    see, mode, home = find_capture(recording.front_end, *cuts.names(module, loss)), fake_mode(), batchings[True].home
    model = skeleton(module, lambda tensor: fake(mode, tensor, home))
    batchings = {has_loss: replace(one, slicing=slicing) for has_loss, one in batchings.items()}
    watching = Watcher(ModelState.of(module), loss)
    hooks, memo = collect_gradient_hooks(module), Memo(recording.plans)
    return Captures(model, loss, batchings, see, cuts, trains, hooks, watching, memo=memo)


def _warn_of_idle_ranks(pipe: Pipeline) -> None:
    """Log which ranks hold no parameters, though others do: they will wait for the others nearly all of the time."""
    placement = pipe.schedule.placement
    held = {rank: [pipe.stages[s] for s in placement.stages_on(rank)] for rank in range(pipe.schedule.ranks)}
    idle = [rank for rank, stages in held.items() if not any((*one.parameters, *one.unused) for one in stages)]
    if idle and len(idle) < len(held):
        _LOG.warning(
            "stages: got no parameters on ranks %s, expected some on each: there are too few places where a stage can "
            "begin. print(pipe) shows the stages. Use a schedule with fewer ranks, or split a module.",
            idle,
        )


def _warn_of_sum(captured: Captured) -> None:
    """Log that a loss that is a sum will be averaged over microbatches."""
    makers = {value: unit for unit in captured.units for value in unit.makes}
    share = makers.get(captured.loss) if captured.loss is not None else None
    if share is None or not share.does.startswith("div["):
        return
    if _list_addends(makers, share.reads[0]) in ({"sum"}, {"sum", "scaled sum"}):
        _LOG.warning(
            "loss: got one that ends in a sum, and reduce='mean': the loss of a step is the mean over microbatches, "
            "1/%s of the sum over the batch, and so are its gradients. Pass "
            "microbatching=fpipe.Microbatching(reduce='sum') for that sum, or let the loss return a mean.",
            share.does[4:-1],
        )


def _list_addends(makers: Mapping[Value, Unit], value: Value) -> set[str]:
    """Return of which kinds the addends of a loss are: `sum`, `scaled sum`, or `mean` for anything else."""
    unit = makers.get(value)
    if unit is None:
        return {"mean"}
    name, _, constants = unit.does.partition("[")
    if name in ("add", "sub", "neg"):
        return {kind for read in unit.reads for kind in _list_addends(makers, read)}
    if name == "mul" and len(unit.reads) == 1:
        return {kind if kind == "mean" else "scaled sum" for kind in _list_addends(makers, unit.reads[0])}
    return {"sum" if name == "sum" or "'sum'" in constants else "mean"}


def _warn_of_observers(observers: Sequence[str]) -> None:
    """Log what code of the model does besides computing, since steps will not do it."""
    shown, more = "; ".join(observers[:OBSERVERS_SHOWN]), len(observers) - OBSERVERS_SHOWN
    if observers:
        _LOG.warning(
            "%s: this happens when the model is recorded, and not in steps, which run the recorded torch calls. Name "
            'modules in fpipe.Recording(whole=...), and the loss "loss", to call them as Python in every step.',
            f"{shown}; and {more} more" if more > 0 else shown,
        )
