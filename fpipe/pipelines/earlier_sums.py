# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients that a step begins with: those of the steps before it.

Problem. Addition is not associative. The sum of two steps' gradients differs in its last bits from what a plain loop
over all their microbatches adds up.

Idea. A step takes the earlier sums, and its own begin with them. Each goes to one place, where the first addition to it
happens: the first replica of the first stage that computes a gradient of the parameter.

A stage adds to all of its sums or to none. A sum that is missing becomes -0: adding to it changes nothing, not even the
sign of a zero. So do all sums if gradients are added in a dtype of their own.

If copies of the pipeline reduce gradients, the earlier sums, which are reduced already, are added after that.

Invariant: the sums belong to the step. It writes to their memory and returns it.

Runs in every step that is passed earlier sums or has a dtype for sums.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from fpipe.errors import InputError
from fpipe.pipelines.memory import find_overlap
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.variant import Variant
from fpipe.stages.accumulation import Grads
from fpipe.stages.stage import ModelStage
from fpipe.tensors.spec import Spec
from fpipe.weights.state import require_leaf

EarlierSums: TypeAlias = Mapping[str, Tensor]


def require_sums(
    onto: EarlierSums, params: EarlierSums, plan: StepPlan, variant: Variant, specs: Mapping[str, Spec]
) -> None:
    """Raise `InputError`, naming the leaf, unless a step can add to `onto` in place; `specs` are the parameters'."""
    if not isinstance(onto, Mapping):
        raise InputError(
            f"onto: got {type(onto).__name__}, expected a dict by name. Pass the gradients that the last step has "
            "returned."
        )
    if not onto:
        return
    trainable = [name for name in plan.params if name in plan.assembly.captured.trainable]
    unknown = [name for name in onto if name not in trainable]
    if unknown:
        raise InputError(
            f"onto: got gradients of {unknown}, expected only trainable parameters of this process: {trainable}. Pass "
            "the gradients that a step of this pipeline has returned."
        )
    for name, leaf in onto.items():
        spec = specs[name]
        _require_writable(name, leaf, replace(spec, dtype=variant.sum_dtype(spec.dtype)))
    pair = find_overlap({**{f"onto[{n!r}]": t for n, t in onto.items()}, **{f"params[{n!r}]": params[n] for n in onto}})
    if pair is not None:
        raise InputError(
            f"{pair[0]}: got memory that it shares with {pair[1]}, expected separate memory: the step adds to it in "
            "place. Pass a clone."
        )


def _require_writable(name: str, leaf: Tensor, spec: Spec) -> None:
    require_leaf("onto", name, leaf, spec)
    if leaf.device != spec.device or leaf.requires_grad:
        got = f"on {leaf.device}" if leaf.device != spec.device else "that requires a gradient"
        raise InputError(
            f"onto[{name!r}]: got {spec} {got}, expected one on {spec.device} that requires none: the step adds to it "
            "in place. Pass the gradients that the last step has returned."
        )


def assign_sums(
    onto: EarlierSums, plan: StepPlan, variant: Variant, skips: Collection[int] = ()
) -> dict[tuple[int, int], Grads]:
    """Return the sums that ranks of this process begin with, per rank and stage.

    If gradients are added in a dtype of their own, all sums begin with something, which gives them their dtype. So do
    those of a rank to which no microbatch adds anything, since `skips` has all units of its microbatches.
    """
    found: dict[tuple[int, int], Grads] = {}
    for stage, names in _first_uses(plan) if onto or skips or variant.sums is not None else ():
        first, *_ = plan.placement.replicas(stage.index)
        for rank in set(plan.ranks).intersection(plan.placement.replicas(stage.index)):
            earlier = {name: onto[name] for name in names if name in onto} if rank == first else {}
            own = {i * plan.slices for i in range(plan.microbatches) if plan.placement.home(stage.index, i) == rank}
            if stage.grads and (earlier or variant.sums is not None or own <= {*skips}):
                found[rank, stage.index] = _begin(stage, earlier)
    return found


def _begin(stage: ModelStage, earlier: EarlierSums) -> Grads:
    """Return a stage's sums: the earlier ones, and -0 for each that is missing."""
    pairs = zip(stage.grads, stage.totals, strict=True)
    return tuple([earlier[name] if name in earlier else negative_zeros(spec) for name, spec in pairs])


def find_optional(plan: StepPlan, begun: bool) -> frozenset[str]:
    """Return the parameters whose sum may be the -0 it began with; none unless sums have `begun` with something.

    A gradient may itself be -0 everywhere, so sums that began with the first gradient are not examined.
    """
    return plan.optional if begun else frozenset()


def negative_zeros(spec: Spec) -> Tensor:
    """Return a tensor of -0, to which adding anything gives the same as without it."""
    return spec.allocate().fill_(-0.0)


def _first_uses(plan: StepPlan) -> Iterator[tuple[ModelStage, Collection[str]]]:
    """Yield each stage with the parameters of which no earlier stage computes a gradient."""
    earlier = set[str]()
    for stage in plan.assembly.stages:
        yield stage, set(stage.grads) - earlier
        earlier.update(stage.grads)


def join_sums(onto: EarlierSums, grads: EarlierSums, optional: Collection[str]) -> dict[str, Tensor]:
    """Return the step's sums, and the earlier ones of parameters to which it added nothing.

    The sums of the `optional` parameters may have begun with -0, and data may have decided that nothing was added: such
    a sum is dropped.
    """
    dropped = {n for n in optional if n in grads and n not in onto and is_untouched(grads[n])}
    return {**onto, **(grads if not dropped else {name: grads[name] for name in grads if name not in dropped})}


def add_reduced(onto: EarlierSums, grads: EarlierSums) -> dict[str, Tensor]:
    """Return the earlier sums with gradients added that all copies of the pipeline have reduced, in place."""
    for name, grad in grads.items():
        if name in onto:
            onto[name].add_(grad)
    return {**grads, **onto}


def is_untouched(total: Tensor) -> bool:
    """Return whether all elements are -0; false if there are none, as in an empty shard, which does not tell."""
    if total.layout is not torch.strided or not total.numel():
        return False
    return bool((total == 0).all()) and bool(torch.signbit(total).all())
