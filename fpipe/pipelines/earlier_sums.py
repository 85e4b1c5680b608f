# SPDX-License-Identifier: Apache-2.0
"""EarlierSums of gradients that a step goes on from: those of the steps before it.

Problem. Addition is not associative. The sum of two steps' gradients differs in its last bits from what a plain loop
over all their microbatches adds up.

Idea. A step takes the earlier sums, and its own begin with them. Each goes to one place, where the first addition to it
happens: the first replica of the first stage that computes a gradient of the parameter.

A stage adds to all of its sums or to none. A sum that is missing becomes -0: adding to it changes nothing, not even the
sign of a zero.

Invariant: the sums belong to the step. It writes to their memory and returns it.

Runs in every step that is passed earlier sums.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from fpipe.autodiff.accumulation import Gradients
from fpipe.batching.memory import find_overlap
from fpipe.errors import InputError
from fpipe.pipelines.plan import Plan
from fpipe.stages.stage import Stage
from fpipe.tensors.spec import Spec
from fpipe.weights.state import require_leaf

EarlierSums: TypeAlias = Mapping[str, Tensor]


def require_sums(onto: EarlierSums, params: EarlierSums, plan: Plan) -> None:
    """Raise `InputError`, naming the leaf, unless a step can add to `onto` in place."""
    if not isinstance(onto, Mapping):
        raise InputError(
            f"onto: got {type(onto).__name__}, expected a dict by name. Pass the gradients that the last step has "
            "returned."
        )
    trainable = [name for name in plan.params if name in plan.assembly.captured.trainable]
    unknown = [name for name in onto if name not in trainable]
    if unknown:
        raise InputError(
            f"onto: got gradients of {unknown}, expected only trainable parameters of this process: {trainable}. Pass "
            "the gradients that a step of this pipeline has returned."
        )
    for name, leaf in onto.items():
        _require_writable(name, leaf, plan.params[name])
    pair = find_overlap({**{f"onto[{n!r}]": t for n, t in onto.items()}, **{f"params[{n!r}]": params[n] for n in onto}})
    if pair is not None:
        raise InputError(
            f"{pair[0]}: got memory that it shares with {pair[1]}, expected memory of its own: the step adds to it in "
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


def assign_sums(onto: EarlierSums, plan: Plan) -> dict[tuple[int, int], Gradients]:
    """Return the sums that ranks of this process begin with, per rank and stage."""
    found: dict[tuple[int, int], Gradients] = {}
    for stage, names in _first_uses(plan):
        rank = plan.placement.replicas(stage.index)[0]
        if rank in plan.ranks and not onto.keys().isdisjoint(names):
            found[rank, stage.index] = tuple(
                [
                    onto[name] if name in onto and name in names else torch.full_like(spec.allocate(), -0.0)
                    for name, spec in zip(stage.grads, stage.totals, strict=True)
                ]
            )
    return found


def _first_uses(plan: Plan) -> Iterator[tuple[Stage, Collection[str]]]:
    """Yield each stage with the parameters of which no earlier stage computes a gradient."""
    earlier = set[str]()
    for stage in plan.assembly.stages:
        yield stage, set(stage.grads) - earlier
        earlier.update(stage.grads)


def join_sums(onto: EarlierSums, grads: EarlierSums) -> dict[str, Tensor]:
    """Return the step's sums, and the earlier ones of parameters to which it added nothing.

    A sum that was missing, and to which nothing was added, is dropped.
    """
    added = {name: grad for name, grad in grads.items() if name in onto or not _is_untouched(grad)}
    return {**onto, **added}


def _is_untouched(grad: Tensor) -> bool:
    """Return whether all elements are -0."""
    return grad.layout is torch.strided and bool((grad == 0).all()) and bool(torch.signbit(grad).all())
