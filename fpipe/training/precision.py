# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: the scale of a loss whose gradients are in float16, and masters of parameters in low precision.

Loss scale. Small gradients underflow in float16, so the loss is multiplied by a scale before the backward, and
gradients are divided by it afterwards. If one of them overflowed, the update is skipped and the scale reduced; after
many good steps it grows. A `torch.amp.GradScaler` on each rank looks at that rank's gradients only: one rank skips an
update that another one makes, and from then on their scales differ. Here, the scale is a value, and whether gradients
are finite is one answer for all ranks, `fpipe.all_finite`. The next scale is a function of both.

Masters. An update is often smaller than the distance between two numbers of bfloat16, so parameters in bfloat16 would
stay where they are. So the state of a function around an optimizer holds a master copy of each parameter in float32,
the optimizer updates that, and the parameter is the master rounded (Micikevicius et al., Mixed Precision Training,
arXiv 1710.03740, section 3.1). The master is one more slot of the state, so it is saved and loaded like the others.

Invariants. Scales are numbers of float32, computed with the roundings of `torch.amp.GradScaler`. A parameter is its
master rounded, on every rank that holds it.

Runs in every step, after the backward.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fpipe.errors import InputError
from fpipe.pipelines.inputs import State
from fpipe.tensors.arguments import describe_argument, require_arguments, require_tensors
from fpipe.tensors.names import accept_trees, restore_like
from fpipe.training.groups import Options
from fpipe.training.optimizers import Optimizer, OptimizerState


@dataclass(frozen=True)
class LossScale:
    """The scale of a loss, and how it changes.

    - `scale`: the factor of the loss. Pass it to the step.
    - `growth`: the factor after `interval` good steps in a row; `backoff`: the factor after a step that was not good.
    - `good`: the number of good steps in a row so far.

    Bit for bit as `torch.amp.GradScaler` does on one device:

    >>> import torch, fpipe
    >>> loss_scale = fpipe.LossScale(1024.0, interval=2)
    >>> loss_scale.unscale({"weight": torch.tensor([512.0])})
    {'weight': tensor([0.5000])}
    >>> loss_scale = loss_scale.next(True).next(True)
    >>> loss_scale.scale, loss_scale.next(torch.tensor(False)).scale
    (2048.0, 1024.0)

    Raise `InputError` for numbers with which the scale could not stay positive, grow and shrink.
    """

    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    good: int = 0

    def __post_init__(self) -> None:
        require_arguments(LossScale.__init__, vars(self))
        for name, holds, expected in (
            ("scale", 0 < self.scale < math.inf, "a positive number"),
            ("growth", 1 < self.growth < math.inf, "a number above 1, and finite"),
            ("backoff", 0 < self.backoff < 1, "a number between 0 and 1"),
            ("interval", self.interval >= 1, "a positive integer"),
            ("good", 0 <= self.good < self.interval, "an integer from 0 to interval - 1"),
        ):
            if not holds:
                raise InputError(f"{name}: got {getattr(self, name)!r}, expected {expected}. Change it.")
        object.__setattr__(self, "scale", _as_float32(self.scale))

    @accept_trees("grads", restore=restore_like("grads"))
    def unscale(self, grads: State, donate: bool = False) -> State:
        """Return the gradients divided by the scale; in place, if `donate`.

        Call `fpipe.all_finite` first: a gradient that overflowed stays infinite.
        """
        require_arguments(LossScale.unscale, locals())
        require_tensors("grads", grads)
        factor = _as_float32(1 / self.scale)
        return {name: grad.mul_(factor) if donate else grad * factor for name, grad in grads.items()}

    def next(self, finite: bool | Tensor) -> LossScale:
        """Return the scale for the next step, given whether all gradients of this one were finite, on all ranks."""
        require_arguments(LossScale.next, locals())
        if isinstance(finite, Tensor) and finite.numel() != 1:
            raise InputError(
                f"finite: got {describe_argument(finite)}, expected one value. Pass what fpipe.all_finite returned."
            )
        if not finite:
            return replace(self, scale=_as_float32(self.scale * self.backoff), good=0)
        if self.good + 1 < self.interval:
            return replace(self, good=self.good + 1)
        larger = _as_float32(self.scale * self.growth)
        return replace(self, scale=larger if math.isfinite(larger) else self.scale, good=0)


def _as_float32(number: float) -> float:
    return ctypes.c_float(number).value


MASTER = "master"
"""The slot of the state that holds the master copy."""


def masters(optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> Optimizer:
    """Return an optimizer that updates parameters of lower precision through master copies of `dtype`.

    The state of such a parameter has the slot `master`, from `init` on. Gradients are converted to `dtype` if
    necessary. Parameters of `dtype` or of higher precision are updated directly. The bits are those of a plain loop
    that keeps `master = p.float()`, steps the optimizer on the masters, and copies them back.

    If `optimizer` updates in place, so does the result.

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

    @accept_trees("params")
    def init(params: State) -> OptimizerState:
        """Return the state before the first update: a master for each parameter of lower precision."""
        state = optimizer.init(params)
        for name, p in params.items():
            if needs_master(p, dtype):
                state[name] = {MASTER: p.detach().to(dtype), **state[name]}
        return state

    @accept_trees("grads", "params", restore=restore_like("params"))
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
