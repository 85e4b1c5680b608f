# SPDX-License-Identifier: Apache-2.0
"""Refuse what a traced graph would lose without a word.

A graph of operators keeps what was computed, and loses: the backward of a custom `autograd.Function`, activation
checkpointing and other saved-tensor hooks, hooks on modules, tensors and parameters, and state that the forward assigns
to its modules. While the model runs under capture these are watched, and refused with the name of the module.

Invariant: the watch is on only while the user's forward and loss run, so what the tracer itself does is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from fpipe.errors import CaptureError

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def refuse(what: str, where: str, why: str) -> NoReturn:
    """Raise the `CaptureError` for something that a graph cannot keep."""
    raise CaptureError(
        f"{where}: got {what}, expected a forward that a graph of operators describes fully; {why}. "
        'Remove it, or hand the modules in with capture="modules", where they run as they are.'
    )


def refuse_hooks(model: nn.Module) -> None:
    """Raise `CaptureError` for hooks on modules: forward hooks would run once, at capture, backward hooks never."""
    for name, module in model.named_modules():
        for table in _HOOKS:
            if getattr(module, table):
                hook = next(iter(getattr(module, table).values()))
                refuse(f"a hook {_name(hook)} in {table}", _where(name, module), "hooks are not part of the graph")


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Raise `CaptureError` for hooks on parameters: the stages' leaves are other tensors, so they would never run."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"parameter {name}: got a gradient hook, expected none: it would never run. Remove it, and apply what "
                "it does to the gradients that the step returns."
            )


@contextmanager
def watched(model: nn.Module) -> Iterator[None]:
    """Refuse, inside, what the graph would lose of what `model` does."""
    modules = _where_all(model)

    def custom_function(cls: Any, /, *args: object, **kwargs: object) -> NoReturn:
        refuse(f"the custom autograd function {cls.__name__}", here(modules), "its backward would be lost")

    def saved_tensor_hooks(hooks: object) -> NoReturn:
        what = "activation checkpointing" if "checkpoint" in type(hooks).__module__ else "saved-tensor hooks"
        refuse(what, here(modules), "it would be lost")

    def tensor_hook(tensor: Tensor, hook: object) -> NoReturn:
        refuse(f"the tensor hook {_name(hook)}", here(modules), "it would be lost")

    def assignment(module: nn.Module, name: str, where: str) -> NoReturn:
        kind = "buffer" if name in module._buffers else "attribute"
        refuse(f"an assignment to the {kind} {name!r}", where, "the new value would be lost")

    with (
        patch.object(torch.autograd.Function, "apply", classmethod(custom_function)),
        patch.object(torch.autograd.graph.saved_tensors_hooks, "__enter__", saved_tensor_hooks),
        patch.object(Tensor, "register_hook", tensor_hook),
        _assignments(modules, lambda old, new: not _harmless(old, new), assignment),
    ):
        yield


@contextmanager
def watched_parts(model: nn.Module, prefix: str) -> Iterator[None]:
    """Refuse, inside, what is lost even where parts run as they are.

    Tensors assigned to a module, since only in-place changes come out, and reentrant checkpoints, which cannot be
    differentiated with respect to chosen tensors.
    """
    modules = _where_all(model, prefix)

    def reentrant(cls: Any, /, *args: object) -> NoReturn:
        raise CaptureError(
            f"{here(modules)}: got a reentrant checkpoint, expected a non-reentrant one: it does not work with "
            "autograd.grad. Pass use_reentrant=False to checkpoint()."
        )

    def assignment(module: nn.Module, name: str, where: str) -> NoReturn:
        raise CaptureError(
            f"{where}: got an assignment of a tensor to {name!r}, expected buffers that are changed in place; the new "
            f"value would be lost. Register it as a buffer and write self.{name}.copy_(...) instead."
        )

    with (
        patch.object(CheckpointFunction, "apply", classmethod(reentrant)),
        _assignments(modules, lambda old, new: isinstance(new, Tensor) and new is not old, assignment),
    ):
        yield


@contextmanager
def _assignments(
    modules: Mapping[int, str],
    unwanted: Callable[[object, object], bool],
    refuse: Callable[[nn.Module, str, str], NoReturn],
) -> Iterator[None]:
    """Call `refuse(module, name, where)` for each assignment to one of `modules` of an unwanted (old, new) value."""
    assign: Callable[..., None] = nn.Module.__setattr__

    def watching(module: nn.Module, name: str, value: object) -> None:
        torchs = type(module).__module__.startswith("torch.nn.")  # torch's own modules assign nothing but caches
        if not torchs and id(module) in modules and unwanted(getattr(module, name, None), value):
            refuse(module, name, modules[id(module)])
        assign(module, name, value)

    with patch.object(nn.Module, "__setattr__", watching):
        yield


def here(modules: Mapping[int, str]) -> str:
    """The innermost of `modules` (by id) in whose method the caller runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = modules.get(id(frame.f_locals.get("self")))
        if found:
            return found
        frame = frame.f_back
    return "the loss"


def blame(traceback: TracebackType | None, model: nn.Module) -> str:
    """The innermost module of `model` in whose method an exception arose."""
    modules = _where_all(model)
    found = "the loss"
    while traceback is not None:
        found = modules.get(id(traceback.tb_frame.f_locals.get("self")), found)
        traceback = traceback.tb_next
    return found


def _harmless(old: object, new: object) -> bool:
    """Whether an assignment leaves the module as it was; in-place operators assign the same tensor again."""
    return old is new or (type(old) is type(new) and isinstance(old, bool | int | float | str) and old == new)


def _where_all(model: nn.Module, prefix: str = "") -> dict[int, str]:
    return {id(m): _where(".".join(filter(None, (prefix, name))), m) for name, m in model.named_modules()}


def _where(name: str, module: nn.Module) -> str:
    return f"module {name or '(root)'} ({type(module).__name__})"


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", repr(hook))
