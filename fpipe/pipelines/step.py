# SPDX-License-Identifier: Apache-2.0
"""The functions that a user calls in every step: check the arguments, agree with all ranks, run, and collect.

Runs in every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from sys import float_info
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fpipe.audits.audit import Audit
from fpipe.audits.auditor import Auditor
from fpipe.errors import InputError
from fpipe.network.recording import RecordSpan, run_recorded
from fpipe.pipelines.argument_checks import require_backward
from fpipe.pipelines.earlier_sums import add_reduced, assign_sums, find_optional, join_sums, require_sums
from fpipe.pipelines.handshake import CommonArguments, agree_on_aux, agree_on_plan, agree_to_step
from fpipe.pipelines.inputs import State, start_backward
from fpipe.pipelines.loss_weights import count_weight
from fpipe.pipelines.merge import NO_AUX, Aux, MergeTrees
from fpipe.pipelines.modes import require_gradients, suspend_autocast
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.results import Step, collect_gradients, gather
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.variant import EVALUATION, Variant
from fpipe.runtime.executor import Execution, Inputs, Outcome
from fpipe.runtime.transport import Transport
from fpipe.tensors import random
from fpipe.tensors.names import NamedShape, accept_trees
from fpipe.tensors.placed import unwrap_state, wrap_state
from fpipe.weights.state import require_recordable


class ValueAndGrad(Protocol):
    """The type of the functions that `value_and_grad` and `reference` return."""

    def __call__(
        self,
        params: State,
        buffers: State,
        inputs: Any,
        targets: Any = None,
        *,
        seed: int | None = None,
        onto: State | None = None,
        scale: float | None = None,
        total: float | None = None,
    ) -> tuple[Step, State]:
        """Run one step; return its loss, outputs and new buffers, and the gradients by parameter name."""


def training_variant(outputs: bool, sums: torch.dtype | None) -> Variant:
    """Return the variant of a training step; raise `InputError` unless gradients can be added in `sums`."""
    if sums is not None and not (isinstance(sums, torch.dtype) and sums.is_floating_point):
        raise InputError(f"sums: got {sums!r}, expected a dtype of floating-point numbers. Pass torch.float32.")
    return Variant(training=True, loss=True, outputs=outputs, sums=sums)


def make_auditor(pipe: Pipeline, audit: Audit | None, record: RecordSpan | None) -> Auditor | None:
    """Return what audits the steps of one function; raise `InputError` if they can't be audited."""
    if audit is None:
        return None
    if record is not None:
        raise InputError(
            "audit: got record, too, expected one of them: what runs while a rank waits would be recorded as waiting. "
            "Record some steps without an audit."
        )
    if pipe.device.type != "cpu":
        raise InputError(
            f"audit: got a pipeline on {pipe.device}, expected one on a CPU: where a device is idle is not known to "
            "the host that posts its work. Leave out audit."
        )
    return Auditor(audit, pipe.ranks)


def agree_to_train(
    pipe: Pipeline,
    outputs: bool,
    sums: torch.dtype | None,
    record: RecordSpan | None,
    aux: bool | MergeTrees,
    audit: Audit | None,
) -> ValueAndGrad:
    """Return the function that `fpipe.value_and_grad` returns, once all ranks have agreed on the example's plan."""
    require_backward(pipe.schedule)
    auditor = make_auditor(pipe, audit, record)
    variant = training_variant(outputs, sums)
    wanted = agree_on_aux(pipe, aux, outputs=outputs, sums=sums)
    with suspend_autocast(variant):
        agree_on_plan(pipe, variant)
    return make_training_step(pipe, variant, record, wanted, auditor)


def make_training_step(
    pipe: Pipeline,
    variant: Variant,
    record: RecordSpan | None = None,
    aux: Aux = NO_AUX,
    auditor: Auditor | None = None,
) -> ValueAndGrad:
    """Return the function that runs training steps of a variant."""

    @accept_trees("params", "buffers", "onto", restore=restore_step)
    def step(
        params: State,
        buffers: State,
        inputs: Any,
        targets: Any = None,
        *,
        seed: int | None = None,
        onto: State | None = None,
        scale: float | None = None,
        total: float | None = None,
    ) -> tuple[Step, State]:
        with suspend_autocast(variant) as cast, pipe.ranks.enter_call("a step"), pipe.rechecks.time_step():
            held = hold_for_backward(pipe, variant, params, buffers, onto)
            call = CommonArguments(seed, scale, total, onto is not None)
            plan, given = begin_step(pipe, cast, held, (inputs, targets), call)
            outcomes = run_copies(pipe, plan, given, record, auditor)
            out, grads = finish_step(pipe, plan, held, outcomes, optional_sums(plan, given), aux, auditor)
        return out._replace(aux=aux.finish(out.aux)), grads

    return step


class Held(NamedTuple):
    """The plain tensors of this process that a step begins with, once they are checked.

    `onto`: earlier sums of gradients, if any.
    """

    params: State
    buffers: State
    onto: State


def hold_plain(pipe: Pipeline, params: State, buffers: State) -> Held:
    """Return the plain tensors of parameters and buffers.

    Raise `InputError`, naming the leaf, unless these are the parameters and buffers that this process holds.
    """
    forms = pipe.forms
    return Held(forms.params.unwrap(params), forms.buffers.unwrap(buffers), {})


def hold_for_backward(
    pipe: Pipeline, variant: Variant, params: State, buffers: State, onto: State | None = None
) -> Held:
    """Return the plain tensors that a training step begins with; raise `InputError` if it can't use one of them."""
    require_gradients()
    params = pipe.forms.params.unwrap_for_backward(params, pipe.returned)
    buffers = pipe.forms.buffers.unwrap_for_backward(buffers, pipe.returned)
    if onto is None:
        return Held(params, buffers, {})
    sums = unwrap_state("onto", onto, pipe.holdings.placed_gradients)
    require_sums(sums, params, pipe.training, variant, pipe.holdings.specs)
    require_recordable(sums, "onto")
    return Held(params, buffers, sums)


def begin_step(
    pipe: Pipeline, cast: Variant, held: Held, batch: tuple[Any, Any], call: CommonArguments
) -> tuple[StepPlan, dict[int, Inputs]]:
    """Agree with all ranks on a step; return its plan, and the inputs of each copy here."""
    variant = scale_variant(cast, call.scale)
    total = find_weight_of_all(pipe, variant, *batch) if call.total is None else call.total
    split = pipe.batch(variant, *batch, pipe.ranks.exchange_text, total)
    if variant.training:
        split.require_no_gradients()
    require_recordable(split.named_leaves())
    plan, given = agree_to_step(pipe, variant, held.params, held.buffers, split, call)
    starts, onto = start_backward(plan.local_units, call.scale), held.onto if plan.copies.count == 1 else {}
    return plan, {
        # Copies add to sums of their own.
        copy: inputs._replace(starts=starts, onto=assign_sums(onto, plan, variant, inputs.skips))
        for copy, inputs in given.items()
    }


def find_weight_of_all(pipe: Pipeline, variant: Variant, inputs: Any, targets: Any) -> float | None:
    """Return the weight of the rows of all copies; `None` if this process is passed all of them, or without a weight.

    If every process is passed the rows of its own copy only, none knows the weight of the whole batch, by which each
    weighted loss is divided. So processes exchange the weights of their rows. Those that were not given what the weight
    reads have none, but some process of every copy has, since its loss is computed there.

    Every rank must call this. Raise `InputError` if a copy has no process that can weigh its rows.
    """
    batching, copies = pipe.captures.batchings[variant.loss], pipe.copies
    if not copies.own_rows or copies.count == 1 or batching.weight is None:
        return None
    (copy,) = copies.here
    try:
        own = count_weight(batching.weight, batching.split_batch(inputs, targets).trees(), batching.slices)
    except InputError:
        own = math.nan
    rows = torch.cat(pipe.ranks.gather_rows(torch.tensor([[copy, own]], dtype=torch.float64)))
    weights = [rows[(rows[:, 0] == k) & ~rows[:, 1].isnan(), 1].tolist() for k in range(copies.count)]
    if not all(weights):
        raise InputError(
            f"weight: got no process of copy {weights.index([])} that could compute it, expected one: rows='own' is "
            "given. Pass what the weight reads on the ranks that compute the loss, or pass total=."
        )
    return float(sum(found[0] for found in weights))


def run_plan(pipe: Pipeline, plan: StepPlan, inputs: Inputs, record: RecordSpan | None = None) -> dict[int, Outcome]:
    """Run the plan's program on this process's ranks; return their outcomes. `record` gets each measured span."""
    return run_copies(pipe, plan, {plan.copy: inputs}, record)[plan.copy]


def run_copies(
    pipe: Pipeline,
    plan: StepPlan,
    inputs: Mapping[int, Inputs],
    record: RecordSpan | None = None,
    auditor: Auditor | None = None,
) -> dict[int, dict[int, Outcome]]:
    """Run the plan's program for each copy of the pipeline that this process plays; return outcomes by copy."""

    def execution(copy: int, rank: int, transport: Transport) -> Execution:
        return Execution(rank, plan.parts[copy].programs[rank], transport, inputs[copy])

    with random.preserve_generators(plan.generators), plan.context():
        if auditor is not None:
            found = auditor.run(plan.parts, inputs)
        elif record is None:
            found = pipe.ranks.run([partial(execution, copy) for copy in inputs])
        else:
            timed = [(plan.parts[copy].timed_programs, given) for copy, given in inputs.items()]
            found = run_recorded(pipe.ranks, timed, pipe.device, record)
    if plan.slices > 1:
        found = [{rank: _by_microbatch(one, plan.slices) for rank, one in outcomes.items()} for outcomes in found]
    return dict(zip(inputs, found, strict=True))


def _by_microbatch(outcome: Outcome, slices: int) -> Outcome:
    """Return an outcome with the results by microbatch, which its last slice has returned."""
    return outcome._replace(results={unit // slices: values for unit, values in outcome.results.items()})


def optional_sums(plan: StepPlan, given: Mapping[int, Inputs]) -> frozenset[str]:
    """Return the parameters whose sum may be the -0 with which it began."""
    return find_optional(plan, any(one.onto or one.skips for one in given.values()))


def finish_step(
    pipe: Pipeline,
    plan: StepPlan,
    held: Held,
    outcomes: Mapping[int, Mapping[int, Outcome]],
    optional: Collection[str],
    aux: Aux,
    auditor: Auditor | None = None,
) -> tuple[Step, State]:
    """Return what all ranks computed, and the gradients of this process, in the order of its parameters.

    The aux is that of each microbatch. `optional`: see `optional_sums`. Then the auditor runs again what is left, since
    no other rank waits for this one any more.
    """
    grads = join_gradients(pipe, plan, held.onto, outcomes, optional)
    with nullcontext() if auditor is None else auditor.watch_results():
        step = gather(plan, pipe.ranks, outcomes, held.buffers, aux.is_sent)
    ordered = {name: grads[name] for name in held.params if name in grads}
    if auditor is not None:
        with random.preserve_generators(plan.generators), plan.context():
            auditor.finish()
    return place_buffers(step, plan), wrap_state(ordered, pipe.holdings.placed_gradients)


def place_buffers(step: Step, plan: StepPlan) -> Step:
    """Return the step with DTensors for those buffers that are DTensors in the model."""
    return step._replace(buffers=wrap_state(step.buffers, plan.placed))


def join_gradients(
    pipe: Pipeline,
    plan: StepPlan,
    onto: State,
    outcomes: Mapping[int, Mapping[int, Outcome]],
    optional: Collection[str],
) -> dict[str, Tensor]:
    """Return the plain gradients that this process holds, added to the earlier sums if copies reduced them."""
    if plan.copies.count == 1:
        (outcome,) = outcomes.values()
        return join_sums(onto, collect_gradients(plan, outcome), optional)
    made = {copy: collect_gradients(plan.parts[copy], one) for copy, one in outcomes.items()}
    return add_reduced(onto, pipe.holdings.join({copy: join_sums({}, one, optional) for copy, one in made.items()}))


def scale_variant(variant: Variant, scale: object) -> Variant:
    """Return the variant for losses scaled by `scale`, if not `None`; raise `InputError` unless it is a number."""
    if scale is None:
        return variant
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not 0 < scale <= float_info.max:
        raise InputError(
            f"scale: got {scale!r}, expected a finite number above 0, the same on every rank. Pass a float; for a "
            "tensor, its .item()."
        )
    return replace(variant, scaled=True)


def restore_step(result: Any, shapes: Mapping[str, NamedShape]) -> Any:
    """Return what a step returned, with trees in place of dicts by name where it was given trees.

    Its buffers are like those that it was given; what follows, gradients or new parameters, is like the parameters.
    """
    step, *others = result if type(result) is tuple else (result,)
    if "buffers" in shapes:
        step = step._replace(buffers=shapes["buffers"].fill(step.buffers))
    if "params" in shapes and others:
        others[0] = shapes["params"].fill(others[0])
    return (step, *others) if type(result) is tuple else step


def make_evaluation_step(pipe: Pipeline, record: RecordSpan | None, outputs: bool, aux: Aux) -> Callable[..., Step]:
    """Return the function that `fpipe.evaluate` returns."""

    @accept_trees("params", "buffers", restore=restore_step)
    def step(params: State, buffers: State, inputs: Any, targets: Any = None, *, seed: int | None = None) -> Step:
        with suspend_autocast(replace(EVALUATION, outputs=outputs)) as cast, pipe.ranks.enter_call("an evaluation"):
            held = hold_plain(pipe, params, buffers)
            plan, given = begin_evaluation(pipe, cast, held, (inputs, targets), seed)
            outcomes = run_copies(pipe, plan, given, record)
            out = place_buffers(gather(plan, pipe.ranks, outcomes, held.buffers, aux.is_sent), plan)
        return out._replace(aux=aux.finish(out.aux))

    return step


def begin_evaluation(
    pipe: Pipeline, cast: Variant, held: Held, batch: tuple[Any, Any], seed: int | None
) -> tuple[StepPlan, dict[int, Inputs]]:
    """Agree with all ranks on an evaluation; return its plan, and the inputs of each copy here.

    It has a loss if any rank passes targets, or if the model computes its own. Raise `InputError` if there is nothing
    to compute.
    """
    has_loss = pipe.captures.computes_loss or pipe.ranks.agree_if_any(batch[1] is not None)
    if not (has_loss or cast.outputs):
        raise InputError(
            "targets: got none on any rank, expected some for the loss, since outputs=False. Pass targets where the "
            "loss is computed, or leave outputs=True."
        )
    variant = replace(cast, loss=has_loss)
    total = find_weight_of_all(pipe, variant, *batch)
    split = pipe.batch(variant, *batch, pipe.ranks.exchange_text, total)
    return agree_to_step(pipe, variant, held.params, held.buffers, split, CommonArguments(seed))
