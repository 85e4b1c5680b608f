# SPDX-License-Identifier: Apache-2.0
"""The tensors of a recorded run: the value (a number) of each, and the sources of those that no call made.

Tensors are looked up by `id`. All of them are kept alive, so that ids stay unique.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fpipe.errors import CaptureError
from fpipe.record.captured import Constant, Parameter, Source, Value
from fpipe.record.refusals import foreign_parameter_error
from fpipe.record.trace.tape import tensors_at
from fpipe.tensors.effects import memory
from fpipe.tensors.torch_private import DisableTorchFunction, FakeTensor


class KeptError(CaptureError):
    """Raised if a run uses a fake tensor that an earlier run left behind."""


class Values:
    """Numbers tensors as they appear.

    `sources` are the tensors known before the run; constants are added when the run uses them. `here` returns the
    running module, for errors.
    """

    def __init__(self, sources: Mapping[Value, tuple[Source, Tensor]], here: Callable[[], str]) -> None:
        self.here = here
        self.sources = {value: source for value, (source, _) in sources.items()}
        self.tensors = {value: tensor for value, (_, tensor) in sources.items()}
        self.known = {id(tensor): value for value, tensor in self.tensors.items()}
        self.storage = {value: memory(tensor) for value, tensor in self.tensors.items()}
        self.memories = set(self.storage.values())
        self.earlier: list[Tensor] = []

    def add(self, tensor: Tensor) -> Value:
        """Return the value for a new tensor."""
        value = Value(len(self.tensors))
        with DisableTorchFunction():  # not a call of the model
            self.tensors[value], self.storage[value] = tensor, memory(tensor)
        self.known[id(tensor)] = value
        self.memories.add(self.storage[value])
        return value

    def know(self, tensors: Mapping[Value, Tensor]) -> None:
        """Replace the tensors of these values; the previous ones still map to the same values."""
        self.earlier += [self.tensors[value] for value in tensors if value in self.tensors]
        with DisableTorchFunction():  # not a call of the model
            self.storage.update({value: memory(tensor) for value, tensor in tensors.items()})
        self.tensors.update(tensors)
        self.known.update({id(tensor): value for value, tensor in tensors.items()})
        self.memories.update(self.storage.values())

    def within(self, tree: Any) -> list[Value]:
        """Return the values of the tensors in a tree, skipping unknown ones."""
        return [self.known[id(tensor)] for tensor in tensors_at(tree).values() if id(tensor) in self.known]

    def read(self, tensor: Tensor) -> Value:
        """Return the value of a tensor that the run uses; add an unknown one as a constant.

        Raise `CaptureError` if it cannot be one.
        """
        if id(tensor) in self.known:
            return self.known[id(tensor)]
        self._require_constant(tensor)
        value = self.add(tensor)
        self.sources[value] = Constant(tensor)
        return value

    def _require_constant(self, tensor: Tensor) -> None:
        if tensor.layout not in (torch.strided, torch.sparse_coo):
            raise CaptureError(
                f"{self.here()}: got a constant of layout {tensor.layout}, expected layout torch.strided or "
                f"{torch.sparse_coo}. Other layouts have no fake tensors. Store what to_sparse_coo() returns."
            )
        if tensor.requires_grad or tensor.device.type == "meta":
            raise foreign_parameter_error(self.here(), tensor.shape)
        if isinstance(tensor, FakeTensor):
            raise KeptError(
                f"{self.here()}: got a tensor of shape {list(tensor.shape)} that an earlier call created and kept "
                "in an attribute or a cache, expected a forward that keeps tensors in buffers only. Make it a buffer, "
                "or fill the cache by calling the model once before the pipeline is built."
            )

    def parameter(self, tensor: Any) -> str:
        """Return the name of the parameter that `tensor` is; empty if it is not one."""
        source = self.sources.get(self.known.get(id(tensor), Value(-1)))
        return source.name if isinstance(source, Parameter) else ""

    def views(self) -> frozenset[Value]:
        """Return the values that are views of others."""
        return frozenset(value for value, tensor in self.tensors.items() if tensor._is_view())
