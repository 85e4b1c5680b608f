# SPDX-License-Identifier: Apache-2.0
"""Capture without computing: the user's modules run on fake tensors only, and on a copy of themselves.

A `skeleton` is the user's model with a fake tensor in the place of every parameter and buffer. Capturing it touches
neither the user's tensors nor the modules' state, works for a model on the meta device, and lets the user throw the
model away. Shared tensors stay shared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fpipe.errors import CaptureError

Module = TypeVar("Module", bound=nn.Module)


def fake_mode() -> FakeTensorMode:
    """A mode in which operations compute metadata only. Constants of the model are taken in as they appear."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake(mode: FakeTensorMode, tensor: Tensor, device: torch.device) -> Tensor:
    """A fake of a plain tensor; one on meta becomes a fake on `device`."""
    with mode:
        home = device if tensor.device.type == "meta" else tensor.device
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=home)


def skeleton(model: Module, replace: Callable[[Tensor], Tensor]) -> Module:
    """A deep copy of `model` with `replace(tensor)` for every parameter and buffer, shared where they were shared."""
    memo: dict[int, object] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        new = replace(tensor.detach())
        memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__}: a copy without its tensors could not be made ({error}), expected a module that "
            "copy.deepcopy can copy. Give the attribute that cannot be copied a __deepcopy__, or set it after building "
            "the pipeline."
        ) from error


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """All submodules in eval mode inside; as they were outside."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
