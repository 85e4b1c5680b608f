# SPDX-License-Identifier: Apache-2.0
"""Refuse Python code of the backward that would find something else than on one device.

Hooks and `backward` methods of custom autograd functions are code of the model, too. What they read outside of the
model is watched like what a forward reads. But an attribute that the forward of the same microbatch assigns is not
there: a step does not run the forward's Python, and a whole call puts its attributes back.

A checkpointed function is run again in the backward. If it closes over a variable that is another by then, as a lambda
in a loop does, one device computes the gradients of another function.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.errors import CaptureError
from fpipe.record.captured import Unit
from fpipe.record.model.walk import code_names
from fpipe.record.trace.tape import Frame, Invocation
from fpipe.tensors.closures import closure_variables


def require_own_attributes(model: nn.Module, frames: Sequence[Frame], calls: Mapping[Unit, Invocation]) -> None:
    """Raise `CaptureError` if code of the backward reads an attribute that the forward assigns."""
    assigned = {name: module for frame in frames for module, name in frame.touched}
    for where, function in (*_module_hooks(model), *_recorded(calls)) if assigned else ():
        for name in sorted(code_names(function) & assigned.keys()):
            raise CaptureError(
                f"{where}: got {function.__qualname__}, which runs in the backward and reads {name!r}, which "
                "a forward assigns, expected one that reads what a forward leaves alone: microbatches are under way "
                "together, so the attribute may be that of another. Save the tensor with save_for_backward() of a "
                "custom autograd function, or register the hook in the forward, on a tensor, as a function that closes "
                "over the value."
            )


def _module_hooks(model: nn.Module) -> Iterator[tuple[str, FunctionType]]:
    """Yield the backward hooks of modules, and where they are."""
    for path, module in model.named_modules():
        for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values()):
            yield from ((f"module {path or '(root)'}", one) for one in _functions(hook))


def _recorded(calls: Mapping[Unit, Invocation]) -> Iterator[tuple[str, FunctionType]]:
    """Yield the functions that recorded calls run in the backward, and where the calls are."""
    for unit, call in calls.items():
        where, cls = f"module {unit.path or '(root)'}", getattr(call.function, "__self__", None)
        if call.function is Tensor.register_hook:
            yield from ((where, one) for leaf in call.leaves for one in _functions(leaf))
        elif isinstance(cls, type) and issubclass(cls, torch.autograd.Function):
            yield from ((where, one) for one in _functions(cls.backward))


def _functions(hook: Any) -> Iterator[FunctionType]:
    """Yield the function written in Python that a hook is, if it is one."""
    function = hook.__func__ if isinstance(hook, MethodType) else hook
    if isinstance(function, FunctionType):
        yield function


def bound_variables(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the variables that a function closes over now, by name."""
    return closure_variables(function) if isinstance(function, FunctionType) else {}


def require_same_variables(frames: Iterable[Frame]) -> None:
    """Raise `CaptureError` if a checkpointed function closes over a variable that changed after its call."""
    for frame in frames:
        function, before = frame.checkpointed
        now = {} if function is None else bound_variables(function)
        for name in (name for name in before if now.get(name) is not before[name]):
            raise CaptureError(
                f"module {frame.path or '(root)'}: got a checkpointed function that closes over {name!r}, which "
                "changes after the call, expected one that does the same when the backward runs it again. Pass it as "
                "an argument of checkpoint(), or bind it, as in functools.partial."
            )
