# SPDX-License-Identifier: Apache-2.0
"""Front end: a sequence or a graph of modules and functions. Each part is called as is, and never cut.

`[a, b, c]` means what `nn.Sequential(a, b, c)` means: each part is called with what the previous one returned, the
first with the inputs, the loss with what the last returned. Whatever pytree a part returns is flattened into tensors;
non-tensors must be the same for every microbatch. A tensor that a part returns unchanged stays the same value, so it is
sent directly to the stage that uses it next.

Models are recorded as by `fpipe.record.trace.front_end`, with the parts sealed.

Runs when a pipeline is built, and when a new kind of batch first comes; an uncut `Chain` is called in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from fpipe.errors import CaptureError, InputError
from fpipe.record.captured import Captured
from fpipe.record.model.parts import ModuleGraph, as_part
from fpipe.record.objective import Objective
from fpipe.record.trace.front_end import trace_model


class Chain(nn.Module):
    """A sequence of parts as one module: the model that a list of parts represents."""

    def __init__(self, parts: Sequence[Callable[..., Any]] | nn.Sequential) -> None:
        super().__init__()
        # not named_children(), which lists a module that is used twice only once
        named = parts._modules.items() if isinstance(parts, nn.Sequential) else enumerate(parts)
        for name, part in named:
            self.add_module(str(name), as_part(part))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the parts in order, each with what the previous one returned."""
        first, *rest = self._modules.values()
        assert first is not None, "there is a part"
        value = first(*args, **kwargs)
        for part in rest:
            assert part is not None, "parts are modules"
            value = part(value)
        return value


def as_module(model: nn.Module | Sequence[Callable[..., Any]]) -> nn.Module:
    """Return a model as a module: a list of parts becomes a `Chain`, with the names nn.Sequential would give.

    Raise `InputError` for anything else.
    """
    if isinstance(model, nn.Module):
        return model
    if not isinstance(model, list | tuple) or not model or not all(callable(part) for part in model):
        raise InputError(
            f"model: got {type(model).__name__}{' without parts' if model in ([], ()) else ''}, expected a module, or "
            "a list of modules and functions. Put a single function into a list."
        )
    return Chain(model)


def modules(model: nn.Module, objective: Objective, leaves: Sequence[Tensor]) -> Captured:
    """Capture a `Chain` or `ModuleGraph` of parts for one microbatch; see `CaptureFunction`."""
    if isinstance(model, nn.Sequential):
        model = Chain(model)
    if not isinstance(model, Chain | ModuleGraph):
        raise CaptureError(
            f"model: got {type(model).__name__}, expected a list of modules or functions, an nn.Sequential, or a "
            'ModuleGraph. Hand the parts in as one of these, or use capture="trace".'
        )
    return trace_model(model, objective, leaves, parts=tuple(model._modules))
