# SPDX-License-Identifier: Apache-2.0
"""The plain microbatch loop on one device, which a pipeline must equal bit for bit.

The loop runs the captured model uncut. It adds gradients in the order that the schedule states, ascending for most, so
that equality doesn't depend on the order of a sum. If a stage has replicas, each sums the gradients of its
microbatches, and those sums are added in route order. If several stages compute a gradient of the same parameter
(`fpipe.stages.ties`), so does the loop, and it adds these last, in stage order. If the pipeline has copies on a mesh,
each sums the gradients of its microbatches, and these sums are added as the copies reduce them.

A stream of batches is late by as many updates as the pipeline: what `train_stream` must equal.

Runs in every step of the function that `reference` returns, and when `verify` or `reference_stream` is called.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from functools import reduce
from operator import add
from types import MappingProxyType
from typing import Any, TypeAlias

from torch import Tensor

from fpipe.errors import InputError
from fpipe.network.ranks import wait_for_turn
from fpipe.pipelines.batch import SplitBatch
from fpipe.pipelines.earlier_sums import add_reduced, find_optional, join_sums, negative_zeros
from fpipe.pipelines.inputs import State, find_skips, make_keys, start_backward
from fpipe.pipelines.memory import require_apart
from fpipe.pipelines.merge import NO_AUX, Aux
from fpipe.pipelines.modes import require_gradients, suspend_autocast
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.results import Step, merge_results
from fpipe.pipelines.step import ValueAndGrad, place_buffers, restore_step, scale_variant, training_variant
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.captured import Tensors
from fpipe.record.variant import Variant
from fpipe.stages.assembly import Assembly
from fpipe.stages.kinds import require_alike_uncut
from fpipe.streams.corrections import LookAhead
from fpipe.streams.train_stream import Stream, StreamResult, require_streamable
from fpipe.streams.updates import OptionsOf, clip_updates
from fpipe.streams.versions import list_parameter_versions
from fpipe.tensors import random
from fpipe.tensors.arguments import require_arguments, require_seed, require_tensors
from fpipe.tensors.names import accept_trees
from fpipe.tensors.placed import unwrap_state, wrap_state
from fpipe.training.optimizers import Optimizer, OptimizerState
from fpipe.weights.state import Form, Forms, require_recordable
from schedules import KINDS, Schedule
from schedules.endless import lengthen

Orders: TypeAlias = Sequence[Sequence[int]]


def run_on_one_device(
    plan: StepPlan,
    params: Sequence[Mapping[str, Tensor]],
    buffers: Mapping[str, Tensor],
    batch: Mapping[int, Sequence[Tensor]],
    keys: Sequence[int],
    skips: Collection[int] = (),
    onto: Mapping[str, Tensor] = MappingProxyType({}),
    first: Mapping[str, Tensor] = MappingProxyType({}),
    start: Tensors = (),
    orders: Mapping[str, list[Orders]] | None = None,
) -> tuple[dict[int, Tensors], State, dict[str, Tensor]]:
    """Run all microbatches in sequence; return the results of each, the final buffers, and gradients by name.

    `params` has the parameters of each microbatch: the same, but for schedules that update weights in flight. `batch`
    has the microbatches of each leaf; `skips` has those without a backward. `onto` has the sums of gradients to go on
    from, `start` the cotangent of the loss, if it is not 1, `orders` the order of each sum, if it is not the plan's.
    Other sums begin with `first`, which gives them their dtype, if it has something.
    """
    whole = plan.assembly.whole
    state, last = tuple(buffers[name] for name in whole.buffers), params[0]
    leaves = whole.leaves(last)
    alone, slices = plan.copies.count == 1, plan.slices
    earlier = dict(onto) if alone else {}
    sums = {
        name: [CopySum(plan, order, earlier.pop(name, None), first.get(name)) for order in by_stage]
        for name, by_stage in (orders or find_orders(plan)).items()
    }
    places = _places_of_terms(whole.grads, sums)
    results = {}
    for i, cut in enumerate(plan.lasts):
        if params[i] is not last:
            last, leaves = params[i], whole.leaves(params[i])
        inputs = tuple(batch[leaf][i] for leaf in cut.whole.batch)
        results[i], state, residuals = cut.whole.forward(leaves, state, inputs, keys[i])
        nothing = (None,) * len(whole.grads)
        grads = nothing if i in skips else cut.whole.backward(residuals, start)[1]
        for (terms, k), grad in zip(places, grads, strict=True):
            terms.add(i * slices + k, grad)
    totals = {
        name: [total for one in by_stage if (total := one.total()) is not None] for name, by_stage in sums.items()
    }
    found = {name: reduce(add, totals[name]) for name in dict.fromkeys(whole.grads) if totals[name]}
    return results, {**buffers, **dict(zip(whole.buffers, state, strict=True))}, found


def _places_of_terms(names: Sequence[str], sums: Mapping[str, Sequence[CopySum]]) -> list[tuple[CopySum, int]]:
    """Return the sum that each gradient of the uncut model is a term of, and the slice that it is of.

    A name comes once for each sum of its gradients over stages, and then again for each later slice.
    """
    found, seen = list[tuple[CopySum, int]](), Counter[str]()
    for name in names:
        k, number = divmod(seen[name], len(sums[name]))
        found.append((sums[name][number], k))
        seen[name] += 1
    return found


class CopySum:
    """A sum over the copies of a pipeline: over the replicas of each copy, the shards of each group, then groups."""

    def __init__(self, plan: StepPlan, orders: Orders, onto: Tensor | None = None, first: Tensor | None = None) -> None:
        self.count, self.shards = plan.microbatches * plan.slices, plan.copies.shards
        starts = [first if onto is None else onto, *[first] * (len(orders) - 1)]
        self.parts = [list(map(OrderedSum, orders, starts)) for _ in range(plan.copies.count)]

    def add(self, i: int, term: Tensor | None) -> None:
        """Add the term of microbatch `i` of the whole batch, or slice of one, or `None` for no term."""
        copy, own = divmod(i, self.count)
        next(part for part in self.parts[copy] if own in part.order).add(own, term)

    def total(self) -> Tensor | None:
        """Return the sum of all terms, if there are any; dense if there are several copies."""
        totals = [reduce(_add, [part.total() for part in replicas]) for replicas in self.parts]
        if len(totals) > 1:
            totals = [one.to_dense() if one is not None and one.is_sparse else one for one in totals]
        groups = [totals[k : k + self.shards] for k in range(0, len(totals), self.shards)]
        return reduce(_add, [reduce(_add, shards) for shards in groups])


class OrderedSum:
    """A sum whose terms are added in a given order, whatever the order in which they arrive.

    >>> terms = OrderedSum([1, 0])
    >>> terms.add(0, "a"); terms.add(1, "b")
    >>> terms.total()
    'ba'
    """

    def __init__(self, order: Sequence[int], onto: Tensor | None = None) -> None:
        self.order, self.next = tuple(order), 0
        self.early: dict[int, Tensor | None] = {}
        self.sum = onto

    def add(self, i: int, term: Tensor | None) -> None:
        """Add term number `i`, or `None` for no term, once all terms before it in the order have been added."""
        self.early[i] = term
        while self.next < len(self.order) and self.order[self.next] in self.early:
            self.sum = _add(self.sum, self.early.pop(self.order[self.next]))
            self.next += 1

    def total(self) -> Tensor | None:
        """Return the sum of all terms."""
        assert not self.early, "every term of the order was added"
        if len(self.order) > 1 or self.sum is None:
            return self.sum
        return self.sum.clone()


def _add(total: Tensor | None, term: Tensor | None) -> Tensor | None:
    return total + term if total is not None and term is not None else term if total is None else total


def find_orders(plan: StepPlan, schedule: Schedule | None = None, batch: int = 0) -> dict[str, list[Orders]]:
    """Return the order in which microbatches, or slices of them, are added to each gradient.

    Per parameter, for each stage that computes a gradient of it, and each replica of that stage: the units of a copy in
    order. If the plan is for one `batch` of many, `schedule` is that of all.
    """
    schedule = schedule or plan.program.schedule
    slices = plan.slices
    first, count = batch * plan.microbatches, plan.microbatches
    rows = [list(schedule.actions(rank)) for rank in range(schedule.ranks)]
    found = defaultdict[str, list[Orders]](list)
    for stage in plan.assembly.stages:
        order = [
            [
                (a.microbatch - first) * slices + (a.slice or 0)
                for a in rows[rank]
                if a.stage == stage.index and KINDS[a.kind].after == "done" and 0 <= a.microbatch - first < count
            ]
            for rank in schedule.placement.replicas(stage.index)
        ]
        for name in stage.grads:
            found[name].append(order)
    return dict(found)


def make_reference_step(pipe: Pipeline, variant: Variant, aux: Aux = NO_AUX) -> ValueAndGrad:
    """Return the function that runs a step of the captured, uncut model in a plain microbatch loop."""
    known = pipe.plan(variant).assembly
    require_whole_batches(pipe)
    forms = _forms(known)

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
        params, buffers = forms.params.unwrap(params), forms.buffers.unwrap(buffers)
        require_gradients()
        require_seed(seed)
        require_tensors("onto", {} if onto is None else onto)
        sums = {} if onto is None else unwrap_state("onto", onto, known.placed_gradients)
        with suspend_autocast(variant) as cast:
            what = scale_variant(cast, scale)
            batch = pipe.batch(what, inputs, targets, total=total)
            require_recordable(batch.named_leaves())
            for name, leaves in (("params", params), ("buffers", buffers), ("onto", sums)):
                require_recordable(leaves, name)
            plan, parts = _take(pipe, what, batch)
            whole = plan.assembly.whole
            skips = find_skips(batch)
            begins = what.sums is not None or len(skips) == len(plan.lasts)
            first = dict(zip(whole.grads, map(negative_zeros, whole.totals), strict=True)) if begins else {}
            keys, start = make_keys(plan, seed)[:: plan.slices], start_backward([[whole]], scale).get((0, 0), ())
            with wait_for_turn(), random.preserve_generators(plan.generators):
                whole_params = [params] * len(plan.lasts)
                results, new, made = run_on_one_device(
                    plan, whole_params, buffers, parts, keys, skips, sums, first, start
                )
        optional, alone = find_optional(plan, begins or bool(sums)), plan.copies.count == 1
        grads = join_sums(sums, made, optional) if alone else add_reduced(sums, join_sums({}, made, optional))
        out = place_buffers(merge_results(plan, results).with_buffers(new), plan)
        out = out._replace(aux=aux.finish(out.aux))
        return out, wrap_state({name: grads[name] for name in params if name in grads}, known.placed_gradients)

    return step


def require_whole_batches(pipe: Pipeline) -> None:
    """Raise `InputError` for a pipeline whose processes are passed the rows of their own copy only."""
    if pipe.copies.own_rows and pipe.copies.count > 1:
        raise InputError(
            "pipe: got rows='own', expected rows='whole': one device runs the whole batch, but no process gets it. "
            "Build it with fpipe.Place(rows='whole') to compare."
        )


def _forms(known: Assembly) -> Forms:
    return Forms(Form("params", known.parameters, known.placed), Form("buffers", known.buffers, known.placed))


def _take(pipe: Pipeline, variant: Variant, batch: SplitBatch) -> tuple[StepPlan, Mapping[int, Sequence[Tensor]]]:
    """Return the plan for a batch, and its leaves; of the plans on which ranks have not agreed, keep the last ones."""
    with wait_for_turn():
        plan = pipe.plan(variant, batch.signature)
        require_alike_uncut(plan.assemblies)
        pipe.memo.keep_last(alone=pipe.memo.most)
    plan.watch.require_unchanged()
    require_apart(batch.memories, plan.modified_leaves)
    return plan, batch.take({leaf for cut in plan.assemblies for leaf in cut.whole.batch})


def reference_stream(
    pipe: Pipeline, optimizer: Optimizer, look_ahead: LookAhead | None = None, max_norm: float | None = None
) -> Callable[..., Stream]:
    """Return what `train_stream` returns, on one device: a plain loop over the captured, uncut model, with the same
    delays.

    On any rank, the function takes all parameters and buffers of the model and the whole batches, which it reads before
    it begins. Raise `InputError` for other arguments.

    >>> import torch, fpipe
    >>> from schedules import pipedream
    >>> model, x = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)), torch.ones(4, 2)
    >>> pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=pipedream(ranks=2, microbatches=1))
    >>> params, buffers = pipe.init(model)
    >>> sgd, batches = fpipe.optimizer(torch.optim.SGD, lr=0.1), [((x,), None)] * 5
    >>> stream = fpipe.train_stream(pipe, sgd)(params, buffers, sgd.init(params), batches)
    >>> same = fpipe.reference_stream(pipe, sgd)(params, buffers, sgd.init(params), batches)
    >>> list(stream) == list(same)
    True
    >>> all(torch.equal(p, same.end.params[name]) for name, p in stream.end.params.items())
    True
    """
    require_arguments(reference_stream, locals())
    require_streamable(pipe)
    require_whole_batches(pipe)
    optimizer = clip_updates(pipe, optimizer, max_norm)

    def run(
        params: State,
        buffers: State,
        state: OptimizerState,
        batches: Iterable[tuple[Any, Any]],
        *,
        seed: int | None = None,
        options: OptionsOf | None = None,
    ) -> Stream:
        require_seed(seed)
        require_gradients()
        given = options or (lambda number: {})
        losses = _run_late(pipe, optimizer, look_ahead, given, seed, (params, buffers, state), list(batches))
        return Stream(losses, lambda: None)

    return run


def _run_late(
    pipe: Pipeline,
    optimizer: Optimizer,
    look_ahead: LookAhead | None,
    options: OptionsOf,
    seed: int | None,
    start: tuple[State, State, OptimizerState],
    batches: Sequence[tuple[Any, Any]],
) -> Generator[Tensor, None, StreamResult]:
    """Yield the loss of every batch; return the parameters, buffers and state after the last.

    `past` has every version of each parameter, as forwards use it. Each microbatch uses the version that its stage's
    forward uses in the pipeline, as the checker counts (`schedules.list_versions`). Gradients go to the newest.
    """
    if not batches:
        raise InputError("batches: got none, expected at least one. Pass batches, the same number on every rank.")
    (params, buffers, newest), known = start, pipe.training.assembly
    forms = _forms(known)
    held, own = forms.params.unwrap(params), forms.buffers.unwrap(buffers)
    past = {name: [tensor] for name, tensor in held.items()}
    schedule = lengthen(pipe.schedule, len(batches))
    versions = list_parameter_versions(known, schedule)
    for t, (inputs, targets) in enumerate(batches):
        with suspend_autocast(training_variant(False, None)) as variant:
            plan, parts = _take(pipe, variant, pipe.batch(variant, inputs, targets))
            units = [t * plan.microbatches + i % plan.microbatches for i in range(len(plan.lasts))]
            rows = [{name: past[name][versions[name][k] if name in versions else -1] for name in past} for k in units]
            keys, orders = make_keys(plan, None if seed is None else seed + t), find_orders(plan, schedule, t)
            with wait_for_turn(), random.preserve_generators(plan.generators):
                results, own, made = run_on_one_device(plan, rows, own, parts, keys, orders=orders)
            grads = join_sums({}, made, find_optional(plan, begun=False))
            new, newest = optimizer.update(grads, newest, held, **options(t))
        ahead = {**new} if look_ahead is None else {**new, **look_ahead(new, held)}
        held = new
        for name, every in past.items():
            every.append(ahead[name])
        loss = merge_results(plan.without_outputs, results).loss
        assert loss is not None, "a training step has a loss"
        yield loss
    return StreamResult({name: held[name] for name in params}, own, newest)
