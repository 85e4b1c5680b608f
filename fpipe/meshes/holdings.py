# SPDX-License-Identifier: Apache-2.0
"""What a process holds of the parameters, as the user sees it: plain tensors, or DTensors.

A parameter that is sharded is a DTensor in the layout of `torch.distributed.fsdp.fully_shard`, so that optimizers, and
checkpoints of either, work with both. Inside a step there are plain tensors only. A process that plays every copy holds
whole plain tensors.

Runs when parameters are made, and at both ends of every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fpipe.errors import InputError
from fpipe.meshes.copies import Copies
from fpipe.meshes.pieces import take_rows
from fpipe.tensors.spec import Spec


@dataclass(frozen=True, eq=False)
class Holdings:
    """What this process holds of the parameters: shards along the dimensions that `copies` names, or all."""

    copies: Copies

    @cached_property
    def mesh(self) -> DeviceMesh | None:
        """The device mesh of the DTensors; `None` if parameters are plain tensors. Slicing a mesh takes long."""
        copies = self.copies
        return copies.mesh[copies.names] if copies.mesh is not None and copies.shards > 1 else None

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """The placements of the DTensors, by dimension of their mesh."""
        mesh, shards = self.mesh, self.copies.names[-1]
        assert mesh is not None, "there are DTensors"
        return tuple(Shard(0) if name == shards else Replicate() for name in mesh.mesh_dim_names or ())

    def adopt(self, value: Tensor) -> Tensor:
        """Return what this process holds of a whole tensor, in new memory if it is a part."""
        if self.mesh is None:
            return value
        (shard,) = self.copies.held_shards
        return self.wrap(take_rows(value, self.copies.shards, shard).clone(), value)

    def wrap(self, local: Tensor, whole: Tensor | Spec) -> Tensor:
        """Return this process's part of a tensor like `whole` as the user sees it."""
        if self.mesh is None:
            return local
        shape = torch.Size(whole.shape)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False, shape=shape, stride=stride)

    def locals(self, values: Mapping[str, Tensor], copy: int) -> dict[str, Tensor]:
        """Return the plain tensors with which a copy computes: its shards, or whole tensors."""
        if self.copies.shards == 1:
            return dict(values)
        return {name: self.local(value, copy) for name, value in values.items()}

    def local(self, value: Tensor, copy: int) -> Tensor:
        """Return a copy's shard of a parameter or gradient."""
        if isinstance(value, DTensor):
            return value.to_local()
        return take_rows(value, self.copies.shards, self.copies.shard_of(copy))

    def join(self, found: Mapping[int, Mapping[str, Tensor]], specs: Mapping[str, Spec]) -> dict[str, Tensor]:
        """Return the gradients as the user sees them, given what each copy in this process has reduced."""
        first = self.copies.here[: self.copies.shards]
        own = [found[copy] for copy in first]
        if self.mesh is not None:
            return {name: self.wrap(local, specs[name]) for name, local in own[0].items()}
        return {name: _join_rows([one[name] for one in own], specs[name]) for name in own[0]}

    def require(self, what: str, values: Mapping[str, Tensor]) -> None:
        """Raise `InputError`, naming the leaf, unless these are tensors of the kind that this process holds."""
        for name, value in values.items():
            self._require_one(f"{what}[{name!r}]", value)

    def _require_one(self, where: str, value: Tensor) -> None:
        if self.mesh is None:
            if isinstance(value, DTensor):
                raise InputError(
                    f"{where}: got a DTensor over {_describe(value)}, expected a plain tensor: no dimension of the "
                    "mesh shards it. Pass what pipe.init(model) returned, updated leaf by leaf."
                )
            return
        if not isinstance(value, DTensor):
            raise InputError(
                f"{where}: got a plain tensor, expected a DTensor of placements {list(self.placements)}, this "
                "process's shard. Pass what pipe.init(model) returned, updated leaf by leaf."
            )
        if value.device_mesh != self.mesh or tuple(value.placements) != self.placements:
            raise InputError(
                f"{where}: got a DTensor over {_describe(value)}, expected placements {list(self.placements)} over "
                f"{self.mesh}. Redistribute it, or pass what pipe.init(model) returned."
            )


def as_plain(tensor: Tensor) -> Tensor:
    """Return the plain tensor of this process: the local one of a DTensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _join_rows(parts: Sequence[Tensor], spec: Spec) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    whole = torch.cat([*parts])
    return spec.allocate().copy_(whole) if whole.stride() != spec.stride else whole


def _describe(value: DTensor) -> str:
    return f"{value.device_mesh} with placements {list(value.placements)}"
