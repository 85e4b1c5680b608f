# SPDX-License-Identifier: Apache-2.0
"""Reentrant checkpoints in a backward that returns gradients instead of accumulating them.

Problem. `checkpoint(function, *args, use_reentrant=True)` reruns its function in the backward, and calls `backward()`
there: the parameters' gradients are accumulated into `.grad` and are not returned to the caller of the outer backward.

Idea. Use the same autograd node, but with the parameters among its inputs, so that it returns their gradients.
Everything else is as in torch: the first run records no graph, the arguments are detached for the second, and the
gradient of an argument or parameter is summed within the rerun before it is added to others. So the result is bit for
bit that of one device.

Calls for which this cannot work are refused at build time (`fpipe.record.trace.reentrant_checks`).

Runs in every step, and on fake tensors when a pipeline is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpipe.record.modes import Contexts
from fpipe.tensors import random


@dataclass(frozen=True)
class Reentrant:
    """The replacement for torch's reentrant checkpoint: called with a function and its arguments.

    - `modes`: the contexts of the first run, which the second run enters too.
    - `devices`: the devices on which the function draws random numbers.
    - `parameters`: returns the parameters that the function uses and that require a gradient when it is called.
    """

    modes: Contexts = ()
    devices: tuple[torch.device, ...] = ()
    parameters: Callable[[], Sequence[Tensor]] = tuple

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)`; as in torch, parameters get no gradient unless an argument requires one."""
        if not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            with torch.no_grad():
                return function(*args)
        apply: Any = CheckpointNode.apply
        return apply(self, function, len(args), *args, *self.parameters())

    def rerun_context(self, states: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Return the context of the second run: the modes and the random numbers of the first."""
        stack = ExitStack()
        stack.enter_context(random.repeat_draws(self.devices, states))
        stack.enter_context(torch.enable_grad())
        for context in self.modes:
            stack.enter_context(context())
        return stack


class CheckpointNode(torch.autograd.Function):
    """An autograd function that runs a function without recording it, and reruns it in the backward."""

    @staticmethod
    def forward(ctx: Any, how: Reentrant, function: Callable[..., Any], count: int, *given: Any) -> Any:
        """Return the function's result for the first `count` of `given`; the rest are parameters that it uses."""
        args = given[:count]
        ctx.how, ctx.function, ctx.count, ctx.total = how, function, count, len(given)
        ctx.states = random.states(how.devices)
        ctx.others = {k: arg for k, arg in enumerate(args) if not isinstance(arg, Tensor)}
        ctx.save_for_backward(*[arg for arg in args if isinstance(arg, Tensor)])
        return function(*args)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Return the gradients of the arguments and of the parameters."""
        saved = iter(ctx.saved_tensors)
        args = [ctx.others[k] if k in ctx.others else _detach(next(saved)) for k in range(ctx.count)]
        with ctx.how.rerun_context(ctx.states):
            out = ctx.function(*args)
        made = out if isinstance(out, tuple) else (out,)
        pairs = [(t, g) for t, g in zip(made, cotangents, strict=True) if isinstance(t, Tensor) and t.requires_grad]
        given = [*args, *ctx.how.parameters()]
        wanted = {k: one for k, one in enumerate(given) if isinstance(one, Tensor) and one.requires_grad}
        roots, grads = [root for root, _ in pairs], [grad for _, grad in pairs]
        found = torch.autograd.grad(roots, list(wanted.values()), grads, allow_unused=True) if pairs else ()
        by_place = dict(zip(wanted, found, strict=False))
        return None, None, None, *[by_place.get(k) for k in range(ctx.total)]


def _detach(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
