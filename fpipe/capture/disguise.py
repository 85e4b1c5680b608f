# SPDX-License-Identifier: Apache-2.0
"""Make a run on fake tensors look like an eager run to code that asks.

Problem. Libraries skip work while they are traced: they keep a mask that an eager run would drop, or leave out a check.
A stage then computes something else than one device does.

Idea. Nothing here is traced: modules run as themselves later. So `isinstance(x, FakeTensor)` is answered with no
wherever the question does not come from torch. The other questions, `torch.compiler.is_compiling()` and
`torch.jit.is_tracing()` among them, already have the answer of an eager run, since no compiler is at work.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.overrides import handle_torch_function, has_torch_function_unary

OURS = ("torch", "fpipe")
"""The packages that must be able to tell fake tensors apart."""


class _Disguise(type(FakeTensor)):  # type: ignore[misc]
    """The class of `StandIn`: its instances are fake tensors, but only if torch asks."""

    def __instancecheck__(cls, instance: object) -> bool:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return _is_ours(caller) and isinstance(instance, FakeTensor)

    def __call__(cls, *args: Any, **kwargs: Any) -> FakeTensor:
        return FakeTensor(*args, **kwargs)


class StandIn(FakeTensor, metaclass=_Disguise):
    """Stands in the place of `FakeTensor` for whoever looks it up while a model runs on fake tensors."""


@contextmanager
def disguised() -> Iterator[None]:
    """Hide, inside, from all code but torch's that tensors are fake."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch._subclasses, "FakeTensor", StandIn))
        stack.enter_context(patch.object(FakeTensor, "tolist", tolist))
        for module in _importers():
            stack.enter_context(patch.object(module, "FakeTensor", StandIn))
        yield


def tolist(tensor: Tensor) -> Any:
    """Read all values in one call; a fake tensor's own method would ask for each."""
    if has_torch_function_unary(tensor):
        return handle_torch_function(tolist, (tensor,), tensor)
    if isinstance(tensor, FakeTensor):
        raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)
    return tensor.tolist()


def _importers() -> list[Any]:
    """Return the modules of other packages that have imported the name."""
    found = [(name, module) for name, module in sys.modules.items() if _names_it(module)]
    return [module for name, module in found if not _is_ours(name)]


def _names_it(module: Any) -> bool:
    return getattr(module, "__dict__", {}).get("FakeTensor") is FakeTensor


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in OURS
