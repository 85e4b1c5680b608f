# SPDX-License-Identifier: Apache-2.0
"""Make a run on fake tensors look like an eager run to code that asks.

Problem. Libraries skip work while they are traced: they keep a mask that an eager run would drop, or leave out a check.
A stage then computes something other than one device does.

Idea. Nothing is traced here: modules later run as is. So unless torch asks, `isinstance(x, FakeTensor)` is answered
with no, and `type(x)` with `Tensor`: in the modules of users and their libraries, the name `type` refers to `Type` for
the duration. Other questions, `torch.compiler.is_compiling()` and `torch.jit.is_tracing()` among them, already get the
answer of an eager run, because no compiler is active.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from fpipe.capture.places import current_line
from fpipe.errors import CaptureError
from fpipe.patching import ByThread, replace, replace_value, share
from fpipe.torch_private import FAKE_TENSOR, DataDependentOutputException, FakeTensor

OURS = ("torch", "fpipe")
"""Packages that must be able to recognize fake tensors."""
UNCONCERNED = sys.stdlib_module_names - {"__main__"} | {*OURS, "optree", "numpy", "schedules"}
"""Packages in which no model asks for a type."""


HIDING: Final = ByThread()
"""Whether fake tensors are hidden, by thread: all threads find the stand-ins in modules."""


class _StandInMeta(type(FakeTensor)):  # type: ignore[misc]
    """The class of `StandIn`: fake tensors are its instances, but only if torch asks."""

    def __instancecheck__(cls, instance: object) -> bool:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return (_is_ours(caller) or not HIDING.newest(False)) and isinstance(instance, FakeTensor)

    def __call__(cls, *args: Any, **kwargs: Any) -> FakeTensor:
        return FakeTensor(*args, **kwargs)


class StandIn(FakeTensor, metaclass=_StandInMeta):
    """Replaces `FakeTensor` for code that looks it up while a model runs on fake tensors."""


class _TypeMeta(type):
    """The class of `Type`, which behaves like `type` in calls and instance checks."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or not isinstance(args[0], FakeTensor) or not HIDING.newest(False):
            return type(*args, **kwargs)
        if isinstance(args[0], nn.Parameter):
            raise CaptureError(
                f"a parameter{current_line()}: got a forward that asks for its type, expected one that does not: in a "
                "step it is a tensor. Ask isinstance(x, torch.nn.Parameter)."
            )
        return Tensor

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, type)


class Type(type, metaclass=_TypeMeta):
    """Replaces `type`: the type of fake tensors is `Tensor`."""


STAND_INS = (StandIn, Type)
"""Replacements found in modules while a model runs on fake tensors."""


@contextmanager
def hide_fakes() -> Iterator[None]:
    """Hide from all code but torch's, inside, that tensors are fake.

    Entering takes about 10 ms; nested entry is free. Enter it once around all work on fake tensors.
    """
    if FAKE_TENSOR.value is StandIn:
        yield
        return
    modules = list(sys.modules.items())
    thread = HIDING.push(True)
    try:
        with (
            share([vars(module) for name, module in modules if _is_foreign(name, module)], "type", Type),
            share([vars(module) for name, module in modules if _is_importer(name, module)], "FakeTensor", StandIn),
            replace_value(*FAKE_TENSOR, StandIn),
            replace(FakeTensor, "tolist", tolist),
        ):
            yield
    finally:
        HIDING.pop(thread)


@contextmanager
def show_fakes() -> Iterator[None]:
    """Let dynamo, inside, find the class of fake tensors where it looks it up: it compares types."""
    with replace_value(*FAKE_TENSOR, FakeTensor):
        yield


def tolist(tensor: Tensor) -> Any:
    """Read all values in one call; a fake tensor's own method would read each separately."""
    if has_torch_function_unary(tensor):
        return handle_torch_function(tolist, (tensor,), tensor)
    if isinstance(tensor, FakeTensor):
        raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)
    return tensor.tolist()


def _is_foreign(name: str, module: Any) -> bool:
    """Return whether a module belongs to a user or a library of models, and defines no `type` itself."""
    package = name.partition(".")[0]
    return package not in UNCONCERNED and getattr(module, "__dict__", {"type": None}).get("type", Type) is Type


def _is_importer(name: str, module: Any) -> bool:
    """Return whether a module outside of `OURS` has imported `FakeTensor`."""
    found = getattr(module, "__dict__", {}).get("FakeTensor")
    return (found is FakeTensor or found is StandIn) and not _is_ours(name)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in OURS
