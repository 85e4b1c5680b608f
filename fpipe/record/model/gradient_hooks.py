# SPDX-License-Identifier: Apache-2.0
"""Collect the gradient hooks of parameters, registered by `p.register_hook(f)`.

On one device, autograd calls such a hook in the backward of every microbatch, with the microbatch's gradient summed
over all uses of the parameter, before the gradient is accumulated. The stage that owns the parameter does the same: it
registers the hooks on its own leaf tensor.

Post-accumulation hooks are refused: they see the sum of gradients so far, which differs between schedules. So are hooks
that hold tensors or modules of the model: a step runs on other tensors, those passed to it.

Runs when a pipeline is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from fpipe.errors import CaptureError
from fpipe.record.captured import Hooks
from fpipe.record.model.walk import code_names, visible
from fpipe.tensors.placed import is_placed


def collect_gradient_hooks(model: nn.Module) -> Hooks:
    """Return the gradient hooks by parameter name; raise `CaptureError` for one that a stage cannot call."""
    own = {id(one) for one in (*model.modules(), *model.parameters(), *model.buffers())}
    found = {name: tuple((p._backward_hooks or {}).values()) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"parameter {name}: got a gradient hook that runs after accumulation, expected none: sums of gradients "
                "that are not finished differ between schedules. Remove it, and apply what it does to the gradients "
                "that the step returns; or use register_hook, which sees the gradient of every microbatch."
            )
        if found[name] and is_placed(parameter):
            raise CaptureError(
                f"parameter {name}: got a gradient hook on a DTensor, expected none: a stage has local tensors only, "
                "and would call it with one of these. Apply what it does to the gradients that the step returns."
            )
        for hook in found[name]:
            if any(id(one) in own for one in _parts(hook)):
                raise CaptureError(
                    f"parameter {name}: got the gradient hook {getattr(hook, '__qualname__', hook)!r}, which holds a "
                    "parameter, buffer or module of the model, expected one of the gradient alone: it would see what "
                    "the model held when the pipeline was built. Apply what it does to the gradients that the step "
                    "returns."
                )
    return {name: hooks for name, hooks in found.items() if hooks}


def require_exact_hooks(hooks: Hooks, summed: frozenset[str]) -> None:
    """Raise `CaptureError` if a hook is on a parameter in `summed`: no stage has its full gradient of a microbatch."""
    for name in hooks:
        if name in summed:
            raise CaptureError(
                f"parameter {name}: got a gradient hook and tied={{{name!r}: 'sum'}}, expected one or the other: no "
                "stage has the gradient of a microbatch that the hook is called with. Drop 'sum', or the hook."
            )


def _parts(hook: Any) -> Iterator[Any]:
    """Yield what a hook visibly holds, its object, and the modules and tensors in the globals that it names."""
    for one in visible(hook):
        yield one
        if isinstance(one, FunctionType):
            named = [one.__globals__.get(name) for name in code_names(one)]
            yield from [part for part in named if isinstance(part, nn.Module | Tensor)]
