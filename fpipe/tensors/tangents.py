# SPDX-License-Identifier: Apache-2.0
"""Tensors that carry more than values: tangents of forward-mode differentiation, and levels of torch.func.

A step detaches its arguments, which would silently drop both.

Runs in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from fpipe.errors import InputError
from fpipe.tensors.torch_private import has_dual_level, is_transformed, transform_level


def is_differentiated() -> bool:
    """Return whether forward-mode differentiation or a transform of torch.func is active."""
    return has_dual_level() or transform_level() is not None


def require_primal(what: str, tensors: Mapping[str, Tensor] | Mapping[int, Tensor]) -> None:
    """Raise `InputError`, naming the leaf, for a dual tensor or one inside a transform of torch.func.

    No tensor is inspected unless one of the two is active.
    """
    if not is_differentiated():
        return
    unpack: Any = forward_ad.unpack_dual
    for name, tensor in tensors.items():
        where = f"{what}[{name!r}]"
        if is_transformed(tensor):
            raise InputError(
                f"{where}: got a tensor inside a transform of torch.func, expected a plain one: a step would lose it. "
                "Call the step outside of torch.func; it returns the gradients itself."
            )
        if unpack(tensor).tangent is not None:
            raise InputError(
                f"{where}: got a dual tensor of forward-mode differentiation, expected a plain one: its tangent would "
                "be lost. Pass forward_ad.unpack_dual(tensor).primal; a pipeline differentiates backward only."
            )
