# SPDX-License-Identifier: Apache-2.0
"""Modules that branch on data: what may flow through them, whichever branch is taken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import handle_torch_function, has_torch_function_unary

from fpipe.torch_private import active_fake_mode


def reading(tensor: Tensor) -> None:
    """Note, for torch function modes, that what happens from here on depends on the values of `tensor`."""
    if has_torch_function_unary(tensor):
        handle_torch_function(reading, (tensor,), tensor)


class Attached(torch.autograd.Function):
    """Connects a fake output of a module that branches on data to everything it may depend on.

    Nodes of this class mark where gradients may or may not flow; see `surely_reached`.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        """Return a tensor with the same layout in memory of its own, so that it may be changed in place."""
        ctx.save_for_backward(*others)
        return tensor.new_empty_strided(tensor.shape, tensor.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the output's gradient, and expanded zeros for the others, so as not to fix their gradients' layout."""
        return *grads, *[tensor.new_zeros(()).expand_as(tensor) for tensor in ctx.saved_tensors]


def attached(made: tuple[Tensor, ...], others: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return the outputs of a module that branches on data, connected to all of `others` that require a gradient.

    Connect them only while shapes are inferred: in a step the branch taken decides, as on one device.
    """
    if active_fake_mode() is None or not torch.is_grad_enabled():
        return made
    wanting = [tensor for tensor in others if tensor.requires_grad]
    apply: Any = Attached.apply
    return tuple([apply(t, *wanting) if wanting and (t.is_floating_point() or t.is_complex()) else t for t in made])


def surely_reached(roots: Iterable[Tensor]) -> frozenset[int]:
    """Return the ids of the leaves that gradients reach from `roots`, whichever way modules branch."""
    queue = [get_gradient_edge(root).node for root in roots]
    seen = dict.fromkeys(queue)
    for node in queue:
        if node.name() != f"{Attached.__name__}Backward":
            after = [one for one, _ in node.next_functions if one is not None and one not in seen]
            seen.update(dict.fromkeys(after))
            queue += dict.fromkeys(after)
    return frozenset(id(node.variable) for node in seen if hasattr(node, "variable"))
