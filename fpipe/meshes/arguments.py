# SPDX-License-Identifier: Apache-2.0
"""The place where a pipeline runs, and that of this process in the mesh around it.

Runs when a pipeline is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fpipe.errors import InputError
from fpipe.meshes.copies import ALONE, PipelineCopies
from fpipe.tensors.arguments import require_arguments, require_integer
from schedules import Schedule
from schedules.arguments import MOST_STAGES

MeshArgument: TypeAlias = DeviceMesh | Mapping[str, int] | None
"""A device mesh, or the size of each of its dimensions by name."""
Create: TypeAlias = Callable[[Callable[[], DeviceMesh], str, torch.device], DeviceMesh]
ROWS = ("whole", "own")


@dataclass(frozen=True)
class Sharded:
    """A dimension of the mesh over which parameters, gradients and optimizer state are sharded.

    - `dim`: the name of the dimension.
    - `gathered`: the number of stages of a rank whose weights are gathered at the same time. By default all of them, so
      each is gathered once per step: ZeRO-2 (arXiv 1910.02054). With fewer, weights are freed between passes: ZeRO-3.
      To gather less often, group microbatches with `schedules.repeat`.

    >>> Sharded("fsdp", gathered=1)
    Sharded(dim='fsdp', gathered=1)
    """

    dim: str
    gathered: int | None = None

    def __post_init__(self) -> None:
        require_arguments(Sharded.__init__, vars(self))
        if self.gathered is not None:
            require_integer("Sharded: gathered", self.gathered, least=1)


class Dimensions(NamedTuple):
    """The names of the mesh's dimensions, by use."""

    pp: str
    dp: str | None
    shard: str | None


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a pipeline: its ranks, their copies, and the device of this process.

    - `group`: if torch.distributed is initialized, the processes that are the ranks, one each: a process group, or one
      dimension of a device mesh, `mesh["pp"]`; defaults to all. Every process of the job must then build its pipeline
      at the same time, and all groups must have the same size. If torch.distributed is not initialized, all ranks run
      in this process.
    - `mesh`: instead of a group, a `DeviceMesh` with named dimensions, or their sizes by name, `{"pp": 4, "dp": 2}`.
      The pipeline runs along `pp`. If torch.distributed is not initialized, this process runs the whole mesh.
    - `dp`: the dimension of replicas. Each trains on its own rows, split into the schedule's number of microbatches.
    - `shard`: the dimension over which parameters, gradients and optimizer state are sharded, as by `fully_shard`, or a
      `fpipe.Sharded`. Shards train on their own rows, too. Parameters are DTensors.
    - `rows`: `"whole"` if you pass every process whole batches, `"own"` if you pass it only the rows that it trains on.
    - `device`: the device of this process. By default that of the first tensor of the example that has values. Later
      batches must be there, or on meta if a rank does not need their values; lengths and the like may be on the CPU.
      The model may be there, on the CPU or on meta.

    >>> Place(mesh={"pp": 4, "dp": 2}, dp="dp").rows
    'whole'
    """

    group: dist.ProcessGroup | DeviceMesh | None = None
    mesh: MeshArgument = None
    pp: str = "pp"
    dp: str | None = None
    shard: str | Sharded | None = None
    rows: str = "whole"
    device: torch.device | str | None = None

    def require(self) -> None:
        """Raise `InputError` for a field that can't be."""
        require_arguments(Place.__init__, vars(self))
        if self.rows not in ROWS:
            raise InputError(f"rows: got {self.rows!r}, expected one of {list(ROWS)}. Choose one.")

    def describe(self) -> list[str]:
        """Return lines that are the same in all processes of a job; raise `InputError` for anything but a mesh."""
        if self.mesh is None:
            return ["no mesh"]
        sizes = _list_sizes(self.mesh)
        if isinstance(self.mesh, DeviceMesh):  # processes may be in meshes of different shapes
            return ["a DeviceMesh"]
        used = {"pp": self.pp, "dp": self.dp, "shard": self.shard, "rows": self.rows}
        return [str(sizes), *(f"{name}={value!r}" for name, value in used.items())]


class MeshPlace(NamedTuple):
    """The place of this process in a mesh.

    - `copies`: the copies of the pipeline. `group`: the processes of this process's own, `None` for all.
    - `members`: all processes of the mesh, which agree on every call; empty without a mesh.
    """

    copies: PipelineCopies = ALONE
    group: dist.ProcessGroup | DeviceMesh | None = None
    members: tuple[int, ...] = ()


def find_place(options: Place, ranks: int, device: torch.device, create: Create) -> MeshPlace:
    """Return the place of this process in the mesh, or in the group, for a schedule of so many ranks.

    `create` returns what torch makes together with all processes.

    Raise `InputError`, naming the argument, if they do not fit together.
    """
    if options.mesh is None:
        _require_no_dimensions(options)
        return MeshPlace(group=options.group)
    if options.group is not None:
        raise InputError(f"group: got {options.group} besides a mesh, expected one of them. Leave out group.")
    sharded = Sharded(options.shard) if isinstance(options.shard, str) else options.shard
    sizes = _list_sizes(options.mesh)
    dims = Dimensions(options.pp, options.dp, None if sharded is None else sharded.dim)
    _require_dimensions(sizes, dims, ranks)
    replicas, shards = (1 if name is None else sizes[name] for name in (dims.dp, dims.shard))
    if replicas * shards > MOST_STAGES:
        raise InputError(
            f"mesh: got {replicas} replicas of {shards} shards, expected at most {MOST_STAGES} copies of a pipeline. "
            "Pass the sizes of an existing mesh."
        )
    copies = PipelineCopies(
        replicas,
        shards,
        here=tuple(range(replicas * shards)),
        gathered=None if sharded is None else sharded.gathered,
    )
    if dist.is_available() and dist.is_initialized():
        return _place_in(_make_mesh(options.mesh, device, create), dims, copies, options.rows == "own")
    _require_playable(sizes, dims)
    return MeshPlace(copies)


def _place_in(mesh: DeviceMesh, dims: Dimensions, copies: PipelineCopies, own_rows: bool) -> MeshPlace:
    shard, replica = (0 if name is None else mesh.get_local_rank(name) for name in (dims.shard, dims.dp))
    groups = [_find_group(mesh, name) for name in (dims.shard, dims.dp)]
    found = replace(
        copies,
        here=(replica * copies.shards + shard,),
        own_rows=own_rows,
        members=_find_members(mesh, dims),
        position=_find_position(mesh, (dims.pp, dims.dp)),
        part=_find_position(mesh, dims),
        groups=(groups[0], groups[1]),
        mesh=mesh,
        names=tuple(name for name in mesh.mesh_dim_names or () if name in (dims.dp, dims.shard)),
    )
    return MeshPlace(found, mesh.get_group(dims.pp), tuple(mesh.mesh.flatten().tolist()))


def _find_group(mesh: DeviceMesh, name: str | None) -> dist.ProcessGroup | None:
    return None if name is None or mesh[name].size() == 1 else mesh.get_group(name)


def _find_position(mesh: DeviceMesh, left_out: Sequence[str | None]) -> int:
    """Return the number of this process's place along all dimensions but these."""
    position = 0
    for name, size in _list_sizes(mesh).items():
        if name not in left_out:
            position = position * size + mesh.get_local_rank(name)
    return position


def _find_members(mesh: DeviceMesh, dims: Dimensions) -> tuple[int, ...]:
    """Return, for each copy, the number in the flattened mesh of the process at the start of all other dimensions."""
    numbers = torch.arange(mesh.mesh.numel()).reshape(mesh.mesh.shape)
    names = list(mesh.mesh_dim_names or ())
    order = [names.index(name) for name in (dims.dp, dims.shard) if name is not None]
    rest = [dim for dim in range(len(names)) if dim not in order]
    rows = numbers.permute(*order, *rest).reshape(*[numbers.shape[dim] for dim in order], -1)
    return tuple(rows[..., 0].flatten().tolist())


def _make_mesh(mesh: DeviceMesh | Mapping[str, int], device: torch.device, create: Create) -> DeviceMesh:
    if isinstance(mesh, DeviceMesh):
        if mesh.device_type != device.type:
            raise InputError(
                f"mesh: got a mesh of {mesh.device_type} devices, expected one of {device.type}, where the pipeline "
                f"is. Call init_device_mesh({device.type!r}, ...), or pass device, too."
            )
        return mesh
    make = partial(init_device_mesh, device.type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    return create(make, f"mesh of {dict(mesh)}", device)


def _list_sizes(mesh: Any) -> dict[str, int]:
    """Return the size of each dimension by name; raise `InputError` for anything but a mesh with names."""
    if isinstance(mesh, DeviceMesh):
        if not mesh.mesh_dim_names:
            raise InputError(
                f"mesh: got {mesh} without names, expected one whose dimensions have names. Pass mesh_dim_names to "
                "init_device_mesh."
            )
        return dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))
    if not isinstance(mesh, Mapping):
        raise InputError(
            f"mesh: got {type(mesh).__name__}, expected a DeviceMesh, or a dict of sizes by name. Pass what "
            "init_device_mesh returned."
        )
    for name, size in mesh.items():
        if not isinstance(name, str) or not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InputError(
                f"mesh[{name!r}]: got {size!r}, expected an integer of 1 or more for a name. Write mesh={{'pp': 4, "
                "'dp': 2}}."
            )
    return dict(mesh)


def _require_no_dimensions(options: Place) -> None:
    for what, name in (("dp", options.dp), ("shard", options.shard)):
        if name is not None:
            raise InputError(
                f"{what}: got {name!r} without a mesh, expected both or none. Pass fpipe.Place(mesh=...) a DeviceMesh, "
                "or sizes such as {'pp': 4, 'dp': 2}."
            )


def _require_dimensions(sizes: Mapping[str, int], dims: Dimensions, ranks: int) -> None:
    given = {"pp": dims.pp, "dp": dims.dp, "shard": dims.shard}
    used = {what: name for what, name in given.items() if name is not None}
    for what, name in used.items():
        if name not in sizes:
            raise InputError(
                f"{what}: got {name!r}, which the mesh does not have, expected one of its dimensions {list(sizes)}. "
                "Pass the name that mesh_dim_names has."
            )
        other = next((one for one, same in used.items() if same == name and one != what), None)
        if other is not None:
            raise InputError(
                f"{what}: got {name!r}, as for {other}, expected another dimension of {list(sizes)}: each dimension "
                "has one use. Choose another for one of the two."
            )
    if (size := sizes[dims.pp]) != ranks:
        raise InputError(
            f"mesh: got {size} processes along {dims.pp!r}, expected one for each of the schedule's {ranks} ranks. "
            f"Build the schedule for ranks={size}, or another mesh."
        )


def _require_playable(sizes: Mapping[str, int], dims: Dimensions) -> None:
    others = {name: size for name, size in sizes.items() if name not in dims and size > 1}
    if others:
        raise InputError(
            f"mesh: got the dimensions {others} in one process, expected only 'pp', 'dp' and 'shard' dimensions: "
            "modules that compute together need separate processes. Start them with torchrun, or leave these out."
        )


def require_collectives(schedule: Schedule, copies: PipelineCopies) -> None:
    """Raise `InputError` for a schedule with collectives for which there is no dimension of the mesh."""
    for rank in range(schedule.ranks):
        for action in schedule.actions(rank):
            needs = {"REDUCE_GRAD": copies.count, "UNSHARD": copies.shards, "RESHARD": copies.shards}
            if needs.get(action.kind, 2) == 1:
                raise InputError(
                    f"schedule: got {action} on rank {rank}, expected no such action: there are no copies of the "
                    "pipeline. Pass mesh and dp or shard, or the schedule without UNSHARD, RESHARD and REDUCE_GRAD."
                )
