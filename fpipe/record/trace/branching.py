# SPDX-License-Identifier: Apache-2.0
"""Track the gradients that may flow through modules that branch on data, whichever branch they take.

While shapes are inferred, at build time, an output of such a module is attached to everything that it may depend on. In
a step, the branch taken decides, as on one device.

Runs when a pipeline is built; `attach` is also called in every step, where it changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import handle_torch_function, has_torch_function_unary

from fpipe.tensors.torch_private import active_fake_mode


def report_read(tensor: Tensor) -> None:
    """Notify torch function modes that from here on, the run depends on the values of `tensor`."""
    if has_torch_function_unary(tensor):
        handle_torch_function(report_read, (tensor,), tensor)


class Attach(torch.autograd.Function):
    """An autograd function that connects a fake output of a branching module to everything it may depend on.

    Nodes of this class mark where gradients may or may not flow; see `certain_leaves`.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        """Return a new tensor with the same layout, which may be modified in place."""
        ctx.save_for_backward(*others)
        return tensor.new_empty_strided(tensor.shape, tensor.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the output's gradient, and expanded zeros for the others, which leave their gradients' layout open."""
        return *grads, *[tensor.new_zeros(()).expand_as(tensor) for tensor in ctx.saved_tensors]


def attach(outputs: tuple[Tensor, ...], others: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return the outputs of a module that branches on data, attached to all of `others` that require a gradient.

    Outside of a fake mode, and under `no_grad`, return the outputs unchanged.
    """
    if active_fake_mode() is None or not torch.is_grad_enabled():
        return outputs
    wanting = [tensor for tensor in others if tensor.requires_grad]
    apply: Any = Attach.apply
    return tuple([apply(t, *wanting) if wanting and (t.is_floating_point() or t.is_complex()) else t for t in outputs])


def certain_leaves(roots: Iterable[Tensor]) -> frozenset[int]:
    """Return the ids of the leaves that gradients from `roots` reach whichever branches modules take."""
    queue = [get_gradient_edge(root).node for root in roots]
    seen = dict.fromkeys(queue)
    for node in queue:
        if node.name() != f"{Attach.__name__}Backward":
            after = [one for one, _ in node.next_functions if one is not None and one not in seen]
            seen.update(dict.fromkeys(after))
            queue += dict.fromkeys(after)
    return frozenset(id(node.variable) for node in seen if hasattr(node, "variable"))
