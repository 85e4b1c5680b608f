# SPDX-License-Identifier: Apache-2.0
"""Checks of what an update is given: gradients, state and parameters by name, and options.

Invariant: everything is checked before anything is updated, so arguments that are refused stay as they were.

Runs in every update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor

from fpipe.errors import InputError
from fpipe.training.groups import Groups
from fpipe.training.trial import Traits

Named: TypeAlias = Mapping[str, object]


def require_options(cls: str, groups: Groups, traits: Traits) -> None:
    """Raise `InputError` for an option that the class doesn't have."""
    listed = {"options": groups.options} | {f"groups[{pattern!r}]": own for pattern, own in groups.own.items()}
    for where, options in listed.items():
        unknown = [key for key in options if key not in traits.options]
        if unknown:
            raise InputError(
                f"{where}: got {unknown}, expected options of {cls}: {sorted(traits.options)}. Correct the name."
            )


def require_fitting(grads: Named, state: Named, params: Named) -> None:
    """Raise `InputError`, naming the leaf, unless these are dicts by parameter name that fit together."""
    for what, one in (("grads", grads), ("state", state), ("params", params)):
        if not isinstance(one, Mapping):
            raise InputError(
                f"{what}: got {type(one).__name__}, expected a dict by parameter name. Call update(grads, state, "
                "params)."
            )
    missing = [name for name in params if name not in state]
    surplus = [name for name in state if name not in params]
    if missing or surplus:
        raise InputError(
            f"state: got one for {len(state)} parameters, expected {len(params)} (missing {missing}, unexpected "
            f"{surplus}). Pass what init(params) or the last update returned, or load it with fpipe.load."
        )
    for name in grads:
        if name not in params:
            raise InputError(
                f"grads[{name!r}]: got a gradient of none of the {len(params)} parameters, expected names of params. "
                "Pass the gradients and the parameters of the same step."
            )


def require_gradient(name: str, grad: object, p: Tensor) -> None:
    """Raise `InputError` unless a gradient has its parameter's shape and dtype."""
    if isinstance(grad, Tensor) and (grad.shape, grad.dtype, grad.device) == (p.shape, p.dtype, p.device):
        return
    got = f"{grad.dtype} of shape {list(grad.shape)}" if isinstance(grad, Tensor) else type(grad).__name__
    want = f"{p.dtype} of shape {list(p.shape)}"
    if got == want:
        got, want = (f"a gradient on {one.device}" for one in (grad, p) if isinstance(one, Tensor))
    raise InputError(
        f"grads[{name!r}]: got {got}, expected {want}, as the parameter. Pass the gradients that a step returned; for "
        "gradients in float32 of parameters in less, see fpipe.masters."
    )


def require_own_slots(cls: str, name: str, slots: Mapping[str, Any], p: Tensor, traits: Traits) -> None:
    """Raise `InputError`, naming the leaf, unless a parameter's state is of this optimizer, or empty."""
    where = f"state[{name!r}]"
    if not isinstance(slots, Mapping):
        raise InputError(f"{where}: got {type(slots).__name__}, expected a dict. Pass what the last update returned.")
    if slots and traits.slots and frozenset(slots) not in traits.slots:
        expected = " or ".join(str(sorted(one)) for one in sorted(traits.slots, key=sorted))
        raise InputError(
            f"{where}: got {sorted(slots)}, expected {expected}, as {cls} keeps with these options. Pass the state of "
            "this optimizer; to begin with none, call init(params)."
        )
    for slot, value in slots.items():
        if slot in traits.alike and isinstance(value, Tensor) and value.shape != p.shape:
            raise InputError(
                f"{where}[{slot!r}]: got shape {list(value.shape)}, expected {list(p.shape)}, as the parameter. Pass "
                "the state of this parameter."
            )
