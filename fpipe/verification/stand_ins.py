# SPDX-License-Identifier: Apache-2.0
"""A module and a batch without values, on which everything runs and nothing is computed.

Fake tensors carry their mode with them, so no mode is entered: what code makes itself, such as a seed, is real.

Runs when `prove` is called for a model on the meta device.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.tensors.fake import as_parameter, fake, fake_mode
from fpipe.tensors.torch_private import FakeTensorMode
from fpipe.tensors.tree import flatten

CPU_HOME = torch.device("cpu")


def has_no_values(module: nn.Module) -> bool:
    """Return whether a module is on the meta device, in part."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def make_stand_ins(module: nn.Module, batch: tuple[Any, Any]) -> tuple[FakeTensorMode, nn.Module, tuple[Any, Any]]:
    """Return a mode, and fakes of it for the tensors of a copy of a module, and of a batch."""
    mode = fake_mode()
    held: dict[int, Any] = {}
    for p in module.parameters():
        held[id(p)] = as_parameter(fake(mode, p, CPU_HOME), p.requires_grad)
    for buffer in module.buffers():
        held[id(buffer)] = fake(mode, buffer, CPU_HOME)
    tensors, structure = flatten(batch)
    leaves: list[Tensor] = [fake(mode, tensor, CPU_HOME) for tensor in tensors]
    inputs, targets = structure.unflatten(leaves)
    return mode, copy.deepcopy(module, held), (inputs, targets)
