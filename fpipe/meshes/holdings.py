# SPDX-License-Identifier: Apache-2.0
"""The parameters that a process holds, as the user sees them: plain tensors, or DTensors.

A parameter is a DTensor if the model's modules split it (`parallelize_module`), if the pipeline shards it, or both. A
sharded one has the layout of `torch.distributed.fsdp.fully_shard`, so optimizers, and checkpoints of either, work with
both. Inside a step there are plain local tensors only. A process that plays every copy of the pipeline holds plain
tensors, of which each copy gets its shards.

Runs when parameters are made, and at both ends of every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import get_process_group_ranks, get_rank
from torch.distributed.device_mesh import DeviceMesh

from fpipe.errors import InputError
from fpipe.meshes.copies import PipelineCopies
from fpipe.meshes.exchange import shard_spec
from fpipe.meshes.pieces import take_rows
from fpipe.tensors.placed import Placed, complete_place, local_part
from fpipe.tensors.spec import Spec
from fpipe.tensors.torch_private import strided_shard

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

Places = Mapping[str, Placed]


@dataclass(frozen=True, eq=False)
class Holdings:
    """The form of the tensors that this process holds.

    - `params`: the specs of its parameters, before they are sharded.
    - `split`, `arriving`: the places of those that the model's modules split, and of a microbatch's gradients.
    """

    copies: PipelineCopies
    params: Mapping[str, Spec]
    split: Places
    arriving: Places

    @cached_property
    def split_gradients(self) -> Places:
        """The places of the gradients that modules split; they are complete if copies have reduced them."""
        if self.copies.count == 1:
            return self.arriving
        return {name: complete_place(place) for name, place in self.arriving.items()}

    @cached_property
    def placed(self) -> Places:
        """The places of all parameters and buffers that are DTensors, as the user sees them."""
        return self._shard_all(self.split)

    @cached_property
    def placed_gradients(self) -> Places:
        """The places of all gradients that are DTensors, as the user sees them."""
        return self._shard_all(self.split_gradients)

    @cached_property
    def specs(self) -> Mapping[str, Spec]:
        """The specs of the parameters' plain tensors that this process holds."""
        if self.copies.is_local:
            return self.params
        shards, (mine,) = self.copies.shards, self.copies.held_shards
        return {name: shard_spec(spec, shards, mine) for name, spec in self.params.items()}

    def require_rows(self) -> None:
        """Raise `InputError` for a parameter that can't be sharded, since it has no dimensions."""
        for name, spec in self.params.items() if self.copies.shards > 1 else ():
            if not spec.shape:
                raise InputError(
                    f"params[{name!r}]: got a parameter without dimensions, expected at least one, along which it is "
                    "sharded. Give it the shape (1,), or leave out shard."
                )

    def require_apart(self, processes: Sequence[int]) -> None:
        """Raise `InputError` if modules split a parameter over processes that hold other stages, or other copies.

        `processes` are those of this process's pipeline.
        """
        groups = [group for group in self.copies.groups if group is not None]
        others = {*processes, *(one for group in groups for one in get_process_group_ranks(group))} - {get_rank()}
        for name, place in self.split.items():
            shared = sorted(others.intersection(place.mesh.mesh.flatten().tolist()))
            if shared:
                raise InputError(
                    f"model, {name}: got {place}, over processes {shared} that hold other stages or other copies of "
                    "the pipeline, expected another dimension of the mesh. Call parallelize_module with a dimension "
                    "that is neither pp, dp nor shard."
                )

    def adopt(self, name: str, value: Tensor) -> Tensor:
        """Return what this process holds of a parameter, in new memory if it is a part; all that it holds if split."""
        if self.copies.shards > 1 and not self.copies.is_local:
            (shard,) = self.copies.held_shards
            value = take_rows(value, self.copies.shards, shard).clone()
        return self.placed[name].place(value) if name in self.placed else value

    def take_part(self, name: str, value: Tensor) -> Tensor:
        """Return this process's part of a parameter that the model's modules split, or of a tensor like it."""
        if name not in self.split:
            return value
        from torch.distributed.tensor import distribute_tensor

        place = self.split[name]
        return local_part(distribute_tensor(value, place.mesh, place.placements, src_data_rank=None)).clone()

    def counts(self, name: str) -> bool:
        """Return whether this process's part of a gradient counts: of equal parts on several processes, the first."""
        if name not in self.split:
            return self.copies.part == 0
        place = self.split[name]
        at = place.mesh.get_coordinate() or [0] * place.mesh.ndim
        return all(one.is_shard() or k == 0 for k, one in zip(at, place.placements, strict=True))

    def locals(self, values: dict[str, Tensor], copy: int) -> dict[str, Tensor]:
        """Return the plain tensors with which a copy computes, given those that this process holds."""
        if self.copies.shards == 1 or not self.copies.is_local:
            return values
        shards, k = self.copies.shards, self.copies.shard_of(copy)
        return {name: take_rows(value, shards, k) for name, value in values.items()}

    def join(self, found: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the plain gradients that this process holds, given what each copy in it has reduced."""
        own = [found[copy] for copy in self.copies.here[: self.copies.shards]]
        if len(own) == 1:
            return dict(own[0])
        return {name: _join_rows([one[name] for one in own], self.params[name]) for name in own[0]}

    def _shard_all(self, split: Places) -> Places:
        """Return these places, and those of all parameters if they are sharded."""
        copies = self.copies
        if copies.shards == 1 or copies.is_local:
            return split
        return {**split, **{name: self._shard(name, spec, split.get(name)) for name, spec in self.params.items()}}

    def _shard(self, name: str, spec: Spec, split: Placed | None) -> Placed:
        """Return the place of a sharded parameter: over the dimensions of replicas, of shards, and of its modules."""
        from torch.distributed.tensor import Replicate

        whole = spec.shape if split is None else split.shape
        stride = torch.empty(whole, device="meta").stride()
        mesh, rows = self._find_mesh(name, split), _shard_rows(split)
        within = {} if split is None else dict(zip(split.mesh.mesh_dim_names or (), split.placements, strict=True))
        names, shards = mesh.mesh_dim_names or (), self.copies.names[-1]
        places = [rows if dim == shards else within.get(dim, Replicate()) for dim in names]
        return Placed(mesh, tuple(places), whole, stride)

    @cached_property
    def _own_mesh(self) -> DeviceMesh:
        """The part of the mesh that whole parameters are sharded over; slicing a mesh takes long."""
        mesh, own = self.copies.mesh, self.copies.names
        assert mesh is not None, "processes are on a mesh"
        return mesh[own]

    def _find_mesh(self, name: str, split: Placed | None) -> DeviceMesh:
        mesh, own = self.copies.mesh, self.copies.names
        assert mesh is not None, "processes are on a mesh"
        if split is None:
            return self._own_mesh
        others = split.mesh.mesh_dim_names or ()
        every = mesh.mesh_dim_names or ()
        if not set(others) <= set(every) - set(own) or mesh[others] != split.mesh:
            raise InputError(
                f"params[{name!r}]: got {split}, expected one over dimensions of the pipeline's mesh {list(every)} "
                f"other than {list(own)}. Call parallelize_module(model, mesh[...], ...) with that mesh."
            )
        return mesh[tuple(dim for dim in every if dim in (*own, *others))]


def _shard_rows(split: Placed | None) -> Placement:
    """Return the placement along the dimension of shards; it is strided if modules have split the same rows."""
    from torch.distributed.tensor import Shard

    if split is None:
        return Shard(0)
    parts = [size for size, place in zip(split.mesh.mesh.shape, split.placements, strict=True) if place.is_shard(0)]
    factor = torch.Size(parts).numel()
    return strided_shard(0, factor) if factor > 1 else Shard(0)


def _join_rows(parts: Sequence[Tensor], spec: Spec) -> Tensor:
    whole = torch.cat([*parts])
    return spec.allocate().copy_(whole) if whole.stride() != spec.stride else whole


def whole_specs(specs: Mapping[str, Spec], split: Places) -> dict[str, Spec]:
    """Return the specs of tensors as the model has them, given those of their local tensors."""
    return {
        name: replace(spec, shape=split[name].shape, stride=split[name].stride) if name in split else spec
        for name, spec in specs.items()
    }
