# SPDX-License-Identifier: Apache-2.0
"""Parameters in low precision, updated through copies in a higher one.

Problem. An update is often smaller than the distance between two numbers of bfloat16, so parameters in bfloat16 would
stay where they are.

Idea. A function around an optimizer: its state holds a master copy of each parameter in float32, the optimizer updates
that, and the parameter is the master rounded (Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section
3.1). The master is one more slot of the state, so it is saved and loaded like the others.

Invariant: a parameter is its master rounded, on every rank that holds it.

Runs in every step, after the backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fpipe.errors import InputError
from fpipe.pipelines.inputs import State
from fpipe.tensors.arguments import require_arguments
from fpipe.training.groups import Options
from fpipe.training.optimizers import Optimizer, OptimizerState

MASTER = "master"
"""The slot of the state that holds the master copy."""


def masters(optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> Optimizer:
    """Return an optimizer that updates parameters of lower precision through master copies of `dtype`.

    The state of such a parameter has the slot `master`, from `init` on. Gradients are converted to `dtype`; they may
    have it already. Parameters of `dtype`, and of more, are updated as they are. Bit for bit what a plain loop computes
    that keeps `master = p.float()`, steps the optimizer on the masters, and copies them back.

    What is donated is as for `optimizer`: if it updates in place, so does this.

    Raise `InputError` for a `dtype` that isn't of floating-point numbers, and for state without masters.

    >>> import torch, fpipe
    >>> init, update = fpipe.masters(fpipe.optimizer(torch.optim.SGD, lr=2.0**-10))
    >>> params = {"weight": torch.ones(1, dtype=torch.bfloat16)}
    >>> state = init(params)
    >>> for _ in range(4):  # a single update is too small for bfloat16
    ...     params, state = update({"weight": torch.ones(1, dtype=torch.bfloat16)}, state, params)
    >>> params["weight"], state["weight"]["master"]
    (tensor([0.9961], dtype=torch.bfloat16), tensor([0.9961]))
    """
    require_arguments(masters, locals())
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InputError(f"dtype: got {dtype!r}, expected one of floating-point numbers. Pass torch.float32.")

    def init(params: State) -> OptimizerState:
        """Return the state before the first update: a master for each parameter of lower precision."""
        state = optimizer.init(params)
        for name, p in params.items():
            if needs_master(p, dtype):
                state[name] = {MASTER: p.detach().to(dtype), **state[name]}
        return state

    def update(
        grads: State,
        state: OptimizerState,
        params: State,
        *,
        groups: Mapping[str, Options] | None = None,
        **options: Any,
    ) -> tuple[State, OptimizerState]:
        """Return the parameters and the state after one update."""
        held = {name: _take_master(name, state, p) for name, p in params.items() if needs_master(p, dtype)}
        high = {name: grad.to(dtype) if name in held else grad for name, grad in grads.items()}
        inner = {name: {slot: slots[slot] for slot in slots if slot != MASTER} for name, slots in state.items()}
        new, kept = optimizer.update(high, inner, {**params, **held}, groups=groups, **options)
        for name, before in held.items():
            after = new[name]
            kept[name] = {MASTER: after, **kept[name]}
            new[name] = _round(after, params[name], name in grads, after is before)
        return new, kept

    return Optimizer(init, update)


def needs_master(p: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a parameter has fewer bits than `dtype`.

    >>> [needs_master(torch.ones(1, dtype=kind), torch.float32) for kind in (torch.float16, torch.float32, torch.int8)]
    [True, False, False]
    """
    return p.is_floating_point() and torch.finfo(p.dtype).bits < torch.finfo(dtype).bits


def _take_master(name: str, state: OptimizerState, p: Tensor) -> Tensor:
    master = state.get(name, {}).get(MASTER) if isinstance(state, Mapping) else None
    if isinstance(master, Tensor) and master.shape == p.shape:
        return master
    got = "none" if master is None else f"one of shape {list(getattr(master, 'shape', []))}"
    raise InputError(
        f"state[{name!r}]['{MASTER}']: got {got}, expected a tensor of shape {list(p.shape)}: the parameter has "
        f"{p.dtype}. Pass what init(params) of this optimizer, or its last update, returned."
    )


def _round(master: Tensor, p: Tensor, updated: bool, donated: bool) -> Tensor:
    """Return a parameter after its master was updated; the same tensor, if the master is the same."""
    if not updated:
        return p
    if donated:
        p.detach().copy_(master)
        return p
    return master.to(p.dtype).requires_grad_(p.requires_grad)
