# SPDX-License-Identifier: Apache-2.0
"""Verify steps of a pipeline: run each three ways, and compare the results bit for bit.

Runs when `verify` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, reduce
from math import inf, sqrt
from operator import add
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from fpipe.errors import InputError
from fpipe.pipelines.argument_checks import require_backward
from fpipe.pipelines.batch import SplitBatch
from fpipe.pipelines.handshake import agree_on_arguments
from fpipe.pipelines.inputs import State, find_skips
from fpipe.pipelines.merge import NO_AUX, Aux
from fpipe.pipelines.modes import suspend_autocast
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.results import Merged, merge_results
from fpipe.pipelines.step import hold_plain, make_training_step
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.captured import Tensors
from fpipe.record.model.snapshot import restore_model
from fpipe.record.objective import Computed, Objective
from fpipe.record.variant import Variant
from fpipe.tensors import random
from fpipe.tensors.arguments import require_integer
from fpipe.tensors.placed import Placed, local_part, whole_tensor, wrap_state
from fpipe.tensors.torch_private import FakeTensor, is_dtensor
from fpipe.tensors.tree import flatten
from fpipe.verification.comparison import (
    SPLIT,
    Results,
    Verification,
    require_equal,
    require_near,
    require_numbers,
    run_eagerly,
)
from fpipe.verification.reference import CopySum, find_orders, make_reference_step

CAUSAL: Final = (
    "Check that no token depends on a later one, and that the carry has all that a token needs of earlier ones; for "
    "computation in a dtype that neither parameters nor autocast show, pass tolerance."
)
PIPELINE, REFERENCE, EAGER = "the pipeline", "the reference", "the model run eagerly"
"""The sides of a comparison, by name."""
RATE: Final = 2**-10  # the learning rate between steps; scaling by a power of two is exact


class Trial(NamedTuple):
    """The pipeline and module under test, a whole batch (inputs and targets), and the tolerances of the comparisons.

    `unsplit`: that of the comparison with the batch in one piece; `None` for no such comparison. `compare`: returns how
    many leaves are equal, or raises. `near`: raises unless results are equal but for rounding; `None` where that has no
    meaning. `side`: returns the context in which each side computes, given its name. `total`:
    the number of microbatches over which losses are averaged, if it is not that of the batch.
    """

    pipe: Pipeline
    module: nn.Module
    batch: tuple[Any, Any]
    tolerance: float
    unsplit: float | None = None
    compare: Callable[[Results, Results, str, float], int] = require_equal
    near: Callable[..., None] | None = require_near
    side: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
    total: float | None = None

    def agree(self, steps: int, seed: int | None, has_params: bool, has_buffers: bool) -> None:
        """Raise `InputError` unless so many steps can be compared, and `TransportError` if ranks differ."""
        require_backward(self.pipe.schedule)
        require_integer("steps", steps, least=1)
        how = {"tolerance": self.tolerance, "unsplit": self.unsplit}
        for name, fraction in how.items():
            if fraction is not None and not 0 <= fraction < inf:
                raise InputError(
                    f"{name}: got {fraction}, expected a finite number of at least 0. Pass, for example, 1e-5."
                )
        given = {"params": has_params, "buffers": has_buffers}
        agree_on_arguments(self.pipe, **given, seed=seed, steps=steps, **how)

    @property
    def variant(self) -> Variant:
        """The variant to run: with outputs, if they are a tree that can be compared, and this process gets them all."""
        opaque = self.pipe.training.assembly.captured.structure.opaque
        return Variant(training=True, loss=True, outputs=self.pipe.copies.is_local and not opaque)

    def begin(self) -> tuple[Variant, SplitBatch, StepPlan]:
        """Return the variant under the autocast that is on, the batch as it splits it, and the plan."""
        with suspend_autocast(self.variant) as variant:
            batch = self.pipe.batch(variant, *self.batch, total=self.total)
            return variant, batch, self.pipe.plan(variant, batch.signature)


def verify_steps(
    trial: Trial, params: State | None, buffers: State | None, seed: int | None, steps: int
) -> Verification:
    """Verify `steps` steps of gradient descent from this process's share of the state, by default the module's own."""
    pipe, module = trial.pipe, trial.module
    own = pipe.init(module) if params is None or buffers is None else (params, buffers)
    share = own[0] if params is None else params, own[1] if buffers is None else buffers
    whole = gather_state(pipe, module, *share) if (params, buffers) != (None, None) else read_state(module)
    found = Verification(0, 0)
    with restore_model(module):
        for i in range(steps):
            with lend_state(module, *whole):
                compared, share, whole = _verify_step(trial, share, whole, None if seed is None else seed + i)
            found = Verification(found.reference + compared.reference, found.eager + compared.eager)
    return found


def _verify_step(
    trial: Trial, share: tuple[State, State], whole: tuple[State, State], seed: int | None
) -> tuple[Verification, tuple[State, State], tuple[State, State]]:
    """Verify one step; return how much was equal, and the state after it: this process's share, and the whole."""
    pipe, variant, params = trial.pipe, trial.variant, share[0]
    each = Aux.of(list, True) if pipe.copies.is_local else NO_AUX  # else this process has that of its own copy only
    with trial.side(PIPELINE):
        step, grads = make_training_step(pipe, variant, aux=each)(*share, *trial.batch, seed=seed, total=trial.total)
        got = Results(step.loss, step.outputs, gather_shards(pipe, grads), step.buffers, step.aux)
    with trial.side(REFERENCE):
        step, every = make_reference_step(pipe, variant, each)(*whole, *trial.batch, seed=seed, total=trial.total)
        wanted = Results(step.loss, step.outputs, every, step.buffers, step.aux).restrict(params)
    compared = trial.compare(got, wanted, REFERENCE, trial.tolerance)
    after = (descend(params, grads), dict(got.buffers)), (descend(whole[0], every), step.buffers)
    eager = _compare_with_eager(trial, params, got)
    if trial.unsplit is not None:
        _compare_with_whole_batch(trial, params, got, trial.unsplit)
    require_numbers(got)
    return Verification(compared, eager), *after


def _compare_with_eager(trial: Trial, params: State, got: Results) -> int:
    """Return the number of leaves that equal those of the module run eagerly; 0 if random numbers are drawn."""
    variant, batch, plan = trial.begin()
    if plan.devices:
        return 0
    orders = find_orders(plan)
    names = [name for name in params if len(orders.get(name, ())) < 2]
    sums = {name: CopySum(plan, by_stage[0]) for name, by_stage in orders.items() if name in names}
    objective = trial.pipe.captures.objective(variant, batch.batching.split(batch.signature)[0])
    if plan.slices > 1:
        return 0 if trial.near is None else _compare_with_whole_sequences(trial, trial.near, params, got, objective)
    with trial.side(EAGER), suspend_autocast(variant), random.preserve_generators(plan.generators):
        before = random.states(plan.generators)
        count, parts = len(plan.assemblies), batch.take()
        merge, skips = partial(merge_results, plan), find_skips(batch)
        eager = run_eagerly(trial.module, objective, count, parts, sums, merge, skips).restrict(names)
        if not all(map(torch.equal, before, random.states(plan.generators))):
            return 0
    return trial.compare(got.restrict(names), eager, EAGER, trial.tolerance)


def _compare_with_whole_sequences(
    trial: Trial, near: Callable[..., None], params: State, got: Results, sliced: Objective
) -> int:
    """Return the number of leaves that are near those of the module run eagerly on sequences that are not cut.

    They differ in rounding only, unless a token depends on later ones: half of the digits of the least precise dtype
    must be the same.
    """
    batch = trial.pipe.batch(trial.variant, *trial.batch, total=trial.total)
    parts, number = batch.take(), len(batch.known)
    if batch.batching.weight is not None:  # the weight of a whole sequence is that of its slices
        parts[number] = [scales.sum() for scales in parts[number]]

    def merge(results: Mapping[int, Tensors]) -> Merged:
        return Merged(reduce(add, [results[i][0] for i in sorted(results)]))

    with suspend_autocast(trial.variant):
        count, skips = batch.batching.microbatches, find_skips(batch)
        eager = run_eagerly(trial.module, sliced.unsliced, count, parts, {}, merge, skips)
    dtypes = [dtype for _, dtype in sliced.casts]
    dtypes += [p.dtype for p in params.values() if p.is_floating_point() or p.is_complex()]
    fraction = max([trial.tolerance, *(sqrt(torch.finfo(dtype).eps) for dtype in dtypes)])
    buffers = [(f"buffer {name}", one, eager.buffers.get(name)) for name, one in got.buffers.items()]
    near(got, eager.restrict(params), buffers, fraction, "the model run eagerly on whole sequences", CAUSAL)
    return 1 + len(got.grads) + len(buffers)


def _compare_with_whole_batch(trial: Trial, params: State, got: Results, fraction: float) -> None:
    """Raise `MismatchError` unless results are near those of the module on the whole batch in one piece.

    Outputs are compared where they are concatenated. Raise `InputError` if random numbers are drawn: microbatches draw
    others.
    """
    (tensors, structure), (variant, batch, plan) = flatten(trial.batch), trial.begin()
    first, *_ = batch.batching.split(batch.signature)
    objective = replace(trial.pipe.captures.objective(variant, first).unsliced, divisor=1)
    scale = None if batch.batching.weight is None else torch.ones((), dtype=torch.float64)

    def compute(model: Any, leaves: Sequence[Tensor]) -> Computed:
        return objective.of(model, (*structure.unflatten(list(leaves)), scale))

    def take(results: Mapping[int, Tensors]) -> Merged:
        loss, *others = results[0]
        return Merged(loss, others[len(plan.assembly.captured.aux) // plan.slices :])

    parts = {leaf: (tensor,) for leaf, tensor in enumerate(tensors)}
    with suspend_autocast(variant), random.preserve_generators(plan.generators):
        before = random.states(plan.generators)
        whole = run_eagerly(trial.module, compute, 1, parts, {}, take).restrict(params)
        if plan.devices or not all(map(torch.equal, before, random.states(plan.generators))):
            raise InputError(
                f"unsplit: got {fraction} for a model that draws random numbers, expected one that draws none: "
                "microbatches draw other numbers than the whole batch. Set its dropout to 0, build the pipeline again, "
                "and verify that one."
            )
    joined = []
    if got.outputs is not None and plan.merge is not None:
        leaves, outputs = flatten(got.outputs)
        rows = zip(outputs.names, leaves, whole.outputs, plan.merge.dims[: len(leaves)], strict=True)
        joined = [
            (f"outputs{path}", mine, theirs)
            for path, mine, theirs, dim in rows
            if isinstance(dim, int) and theirs.dim()  # scalars are stacked
        ]
    require_near(got, whole, joined, fraction, "the whole batch in one piece", SPLIT)


def read_state(module: nn.Module) -> tuple[State, State]:
    """Return the parameters and buffers of a module, by its own names."""
    return {name: p.detach() for name, p in module.named_parameters()}, dict(module.named_buffers())


def gather_shards(pipe: Pipeline, tensors: State) -> State:
    """Return the tensors without shards; the processes that hold the others must call this."""
    if pipe.copies.shards == 1 or pipe.copies.is_local:
        return tensors
    split = {**pipe.holdings.split_gradients, **pipe.holdings.split}
    return {name: _gather_one(tensor, split.get(name)) for name, tensor in tensors.items()}


def _gather_one(tensor: Tensor, split: Placed | None) -> Tensor:
    """Return a tensor without shards: plain, or as the model's modules split it."""
    whole = whole_tensor(tensor.detach())
    if split is None:
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, split.mesh, split.placements, src_data_rank=None)


def gather_state(
    pipe: Pipeline, module: nn.Module, params: State, buffers: State, call: str = "verify"
) -> tuple[State, State]:
    """Return the whole model's state, gathered from all processes; every rank must call this at the same time."""
    with pipe.ranks.enter_call(call):
        hold_plain(pipe, params, buffers)
        pipe.ranks.agree(about="the whole state")
        known, homes, placed = pipe.training.assembly, pipe.schedule.placement.homes, pipe.training.placed
        owners: dict[str, int] = {}
        for stage in pipe.stages:
            for name in (*stage.parameters, *stage.buffers, *stage.unused):
                owners.setdefault(name, homes[stage.index])
        every = {**known.parameters, **known.buffers}
        held = {name: local_part(one).detach() for name, one in {**gather_shards(pipe, params), **buffers}.items()}

        def gather(named: Iterable[tuple[str, Tensor]]) -> State:
            found = {}
            for name, _ in named:
                mine = held[name] if owners[name] in pipe.ranks.ranks else None
                found[name] = pipe.ranks.broadcast(mine, every[name], owners[name])
            return wrap_state(found, placed)

        return gather(module.named_parameters()), gather(module.named_buffers())


def descend(params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> State:
    """Return the parameters after one step of plain gradient descent."""
    with torch.no_grad():
        moved = {name: p - RATE * _placed_like(p, grads[name]) if name in grads else p for name, p in params.items()}
    return {name: p.detach().requires_grad_(params[name].requires_grad) for name, p in moved.items()}


def _placed_like(p: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient with the placements of its parameter."""
    return grad.redistribute(placements=p.placements) if is_dtensor(p) and is_dtensor(grad) else grad


@contextmanager
def lend_state(module: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Iterator[None]:
    """Put these values into the module; afterwards, restore its own."""
    values = {**params, **buffers}
    seats = [(name, local_part(one)) for name, one in (*module.named_parameters(), *module.named_buffers())]
    before = [(tensor, tensor.data) for _, tensor in seats]
    for name, tensor in seats:
        value = local_part(values[name])
        if not isinstance(value, FakeTensor) and tensor.data_ptr() != value.data_ptr():
            tensor.data = value.detach().clone()
    try:
        yield
    finally:
        for tensor, old in before:
            tensor.data = old
