# SPDX-License-Identifier: Apache-2.0
"""Make a run on fake tensors look like an eager run to code that checks.

Problem. Libraries behave differently while they are traced: they keep a mask that an eager run would drop, or skip a
check. A stage would then compute something other than the model on one device.

Idea. What is recorded here is what an eager run would do. So for all code but torch's and fpipe's,
`isinstance(x, FakeTensor)` is false and `type(x)` is `Tensor`: during the run, the name `type` refers to `Type` in the
modules of users and their libraries. Other checks, such as `torch.compiler.is_compiling()` and
`torch.jit.is_tracing()`, already answer as in an eager run, because no compiler is active.

A device mesh is a constant, and slicing one computes with tensors of numbers of processes. That is done for real.

Runs when a pipeline is built, and when a new kind of batch first comes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import handle_torch_function, has_torch_function_unary

from fpipe.record.numbers import Number
from fpipe.tensors.patching import ByThread, current, replace, replace_value, share
from fpipe.tensors.torch_private import (
    FAKE_TENSOR,
    DataDependentOutputException,
    DisableTorchFunction,
    FakeTensor,
    import_tracer,
    without_modes,
)

OURS = ("torch", "fpipe")
"""Packages that must be able to recognize fake tensors."""
UNCONCERNED = sys.stdlib_module_names - {"__main__"} | {*OURS, "optree", "numpy", "schedules"}
"""Packages whose modules keep the built-in `type`: they contain no code of models."""
MESH: Final = ("__init__", "__getitem__", "mesh")
"""The methods and properties of device meshes that compute with tensors."""


HIDING: Final = ByThread()
"""Per thread, true while fake tensors are hidden: the stand-ins in modules are visible to all threads."""


class _StandInMeta(type(FakeTensor)):  # type: ignore[misc]
    """The metaclass of `StandIn`: while fake tensors are hidden, they are its instances only for torch and fpipe."""

    def __instancecheck__(cls, instance: object) -> bool:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return (_origin(caller)[0] or not HIDING.newest(False)) and isinstance(instance, FakeTensor)

    def __call__(cls, *args: Any, **kwargs: Any) -> FakeTensor:
        return FakeTensor(*args, **kwargs)


class StandIn(FakeTensor, metaclass=_StandInMeta):
    """The stand-in for `FakeTensor` in modules that look it up while a model runs on fake tensors."""


class _Type:
    """The stand-in for `type`, with which the type of a fake tensor is `Tensor`, for threads that hide them.

    It is not a class, so that a class made meanwhile, in whichever thread, has `type` itself among its bases. Whatever
    it returns for `type` is itself, so that `type(int) is type`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], FakeTensor) and HIDING.newest(False):
            return nn.Parameter if isinstance(args[0], nn.Parameter) else Tensor
        found = type(*args, **kwargs)
        if len(args) == 1 and issubclass(found, Number):
            return args[0].__class__
        return self if found is type else found

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, type)

    def __mro_entries__(self, bases: object) -> tuple[type]:
        return (type,)

    def __getattribute__(self, name: str) -> Any:
        if name == "__mro_entries__":
            return object.__getattribute__(self, name)
        return getattr(type, name)  # `__new__` and `__class__` among them, which every object has

    def __getitem__(self, item: Any) -> Any:
        return type[item]

    def __or__(self, other: Any) -> Any:
        return type | other

    def __ror__(self, other: Any) -> Any:
        return other | type

    def __eq__(self, other: object) -> bool:
        return other is self or other is type

    def __hash__(self) -> int:
        return hash(type)

    def __repr__(self) -> str:
        return repr(type)


Type: Final = _Type()


STAND_INS = (StandIn, Type)
"""The objects that replace `FakeTensor` and `type` in modules while a model runs on fake tensors."""


@contextmanager
def hide_fakes() -> Iterator[None]:
    """Hide from all code but torch's and fpipe's, inside this context, that tensors are fake.

    Entering takes some milliseconds; nested entry is free. Enter it once around all work on fake tensors.
    """
    import_tracer()
    if FAKE_TENSOR.value is StandIn:
        yield
        return
    foreign, importers = _namespaces()
    thread = HIDING.push(True)
    try:
        with (
            share(foreign, "type", Type),
            share(importers, "FakeTensor", StandIn),
            replace_value(*FAKE_TENSOR, StandIn),
            replace(FakeTensor, "tolist", tolist),
            ExitStack() as stack,
        ):
            for name in MESH:
                stack.enter_context(replace(DeviceMesh, name, partial(call_for_real, current(DeviceMesh, name))))
            yield
    finally:
        HIDING.pop(thread)


@contextmanager
def show_fakes() -> Iterator[None]:
    """Restore `FakeTensor` inside this context where dynamo looks it up, because it compares types."""
    with replace_value(*FAKE_TENSOR, FakeTensor):
        yield


def call_for_real(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function of constants on real tensors."""
    with without_modes(), DisableTorchFunction():
        return function(*args, **kwargs)


def tolist(tensor: Tensor) -> Any:
    """Return all values as nested lists, in one read; a fake tensor's own method would read each separately."""
    if has_torch_function_unary(tensor):
        return handle_torch_function(tolist, (tensor,), tensor)
    if isinstance(tensor, FakeTensor):
        raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)
    return tensor.tolist()


def _namespaces() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the namespaces of modules of users and libraries of models that do not define `type` themselves.

    And of those outside of `OURS` that have imported `FakeTensor`.
    """
    foreign, importers = [], []
    for name, module in list(sys.modules.items()):  # thousands
        is_ours, is_foreign = _origin(name)
        if is_ours or (space := getattr(module, "__dict__", None)) is None:
            continue
        if is_foreign and space.get("type", Type) is Type:
            foreign.append(space)
        if (found := space.get("FakeTensor")) is FakeTensor or found is StandIn:
            importers.append(space)
    return foreign, importers


@cache
def _origin(module: str) -> tuple[bool, bool]:
    """Return whether a module is of torch or fpipe, and whether it may contain code of models."""
    package = module.partition(".")[0]
    return package in OURS, package not in UNCONCERNED
