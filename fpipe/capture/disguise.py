# SPDX-License-Identifier: Apache-2.0
"""Make a run on fake tensors look like an eager run to code that asks.

Problem. Libraries skip work while they are traced: they keep a mask that an eager run would drop, or leave out a check.
A stage then computes something else than one device does.

Idea. Nothing here is traced: modules run as themselves later. So `isinstance(x, FakeTensor)` is answered with no
wherever the question does not come from torch, and `type(x)` with `Tensor`: the name `type` stands for `Type` in the
modules of users and their libraries meanwhile. The other questions, `torch.compiler.is_compiling()` and
`torch.jit.is_tracing()` among them, already have the answer of an eager run, since no compiler is at work.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from fpipe.capture.guards import asking_line
from fpipe.errors import CaptureError

OURS = ("torch", "fpipe")
"""The packages that must be able to tell fake tensors apart."""
UNCONCERNED = sys.stdlib_module_names - {"__main__"} | {*OURS, "optree", "numpy", "schedules"}
"""Packages in which no model asks for a type."""


class _Disguise(type(FakeTensor)):  # type: ignore[misc]
    """The class of `StandIn`: its instances are fake tensors, but only if torch asks."""

    def __instancecheck__(cls, instance: object) -> bool:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return _is_ours(caller) and isinstance(instance, FakeTensor)

    def __call__(cls, *args: Any, **kwargs: Any) -> FakeTensor:
        return FakeTensor(*args, **kwargs)


class StandIn(FakeTensor, metaclass=_Disguise):
    """Stands in the place of `FakeTensor` for whoever looks it up while a model runs on fake tensors."""


class _Asked(type):
    """The class of `Type`, which is called, and asked for instances, as `type` is."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or not isinstance(args[0], FakeTensor):
            return type(*args, **kwargs)
        if isinstance(args[0], nn.Parameter):
            raise CaptureError(
                f"a parameter{asking_line()}: got a forward that asks for its type, expected one that does not: in a "
                "step it is a tensor. Ask isinstance(x, torch.nn.Parameter)."
            )
        return Tensor

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, type)


class Type(type, metaclass=_Asked):
    """Stands in the place of `type`: fake tensors are tensors."""


STAND_INS = (StandIn, Type)
"""What stands for other things in modules while a model runs on fake tensors."""


@contextmanager
def disguised() -> Iterator[None]:
    """Hide, inside, from all code but torch's that tensors are fake.

    It takes some 10 ms to enter, but nothing inside another one: enter it around all that is done on fake tensors.
    """
    if torch._subclasses.FakeTensor is StandIn:
        yield
        return
    spaces = [vars(module) for name, module in list(sys.modules.items()) if _is_foreign(name, module)]
    with ExitStack() as stack:
        stack.callback(_remove, spaces)
        for space in spaces:
            space["type"] = Type
        stack.enter_context(patch.object(torch._subclasses, "FakeTensor", StandIn))
        stack.enter_context(patch.object(FakeTensor, "tolist", tolist))
        for module in _importers():
            stack.enter_context(patch.object(module, "FakeTensor", StandIn))
        yield


@contextmanager
def undisguised() -> Iterator[None]:
    """Let dynamo, inside, find the class of fake tensors where it looks it up: it compares types."""
    with patch.object(torch._subclasses, "FakeTensor", FakeTensor):
        yield


def tolist(tensor: Tensor) -> Any:
    """Read all values in one call; a fake tensor's own method would ask for each."""
    if has_torch_function_unary(tensor):
        return handle_torch_function(tolist, (tensor,), tensor)
    if isinstance(tensor, FakeTensor):
        raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)
    return tensor.tolist()


def _is_foreign(name: str, module: Any) -> bool:
    """Whether a module is a user's, or of a library that runs models, and means the builtin by `type`."""
    package = name.partition(".")[0]
    return package not in UNCONCERNED and "type" not in getattr(module, "__dict__", {"type": None})


def _remove(spaces: Iterable[dict[str, Any]]) -> None:
    for space in spaces:
        space.pop("type", None)


def _importers() -> list[Any]:
    """Return the modules of other packages that have imported the name."""
    found = [(name, module) for name, module in sys.modules.items() if _names_it(module)]
    return [module for name, module in found if not _is_ours(name)]


def _names_it(module: Any) -> bool:
    return getattr(module, "__dict__", {}).get("FakeTensor") is FakeTensor


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in OURS
