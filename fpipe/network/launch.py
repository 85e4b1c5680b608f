# SPDX-License-Identifier: Apache-2.0
"""The ranks that this process runs: one under torch.distributed, otherwise all.

Runs when a pipeline is built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fpipe.errors import InputError, TransportError
from fpipe.network.creation import Made
from fpipe.network.job import enter_distributed_job
from fpipe.network.one_process import LocalRanks
from fpipe.network.ranks import Fields, Ranks


class JobProcesses(Protocol):
    """The processes that begin to build together: all of the job, or this one."""

    def agree(self, fields: Fields) -> None:
        """Raise `TransportError` on all processes unless all of them begin the same, with the same fields."""

    def create(self, make: Callable[[], Made], what: str, device: torch.device) -> Made:
        """Return what torch makes on the device as soon as all processes ask for it."""

    def join(
        self, ranks: int, group: dist.ProcessGroup | None, device: torch.device, members: Sequence[int] = ()
    ) -> Ranks:
        """Return the ranks of a schedule that this process runs; `group` holds the ranks' processes, by default all.

        `members` are all processes that agree on every call: those of a mesh, by default the group's. Raise
        `TransportError` if the processes and the ranks do not match.
        """


class LocalJob:
    """A job of this process alone."""

    def agree(self, fields: Fields) -> None:
        """Do nothing: there is no other process."""

    def create(self, make: Callable[[], Made], what: str, device: torch.device) -> Made:
        """Return what it makes."""
        return make()

    def join(
        self, ranks: int, group: dist.ProcessGroup | None, device: torch.device, members: Sequence[int] = ()
    ) -> Ranks:
        """Return all ranks; raise `TransportError` if a launcher has started other processes."""
        require_process_group(os.environ)
        return LocalRanks(ranks)


@contextmanager
def enter_job(call: str) -> Iterator[JobProcesses]:
    """Return the context in which all processes of the job begin to build; an error on one of them is raised on all.

    They agree, and then join.
    """
    if not (dist.is_available() and dist.is_initialized()):
        yield LocalJob()
        return
    with enter_distributed_job(call) as job:
        yield job


def resolve_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the process group; raise `InputError` for a mesh of several dimensions."""
    return take_dimension(group) if isinstance(group, DeviceMesh) else group


def take_dimension(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of a mesh with one dimension; raise `InputError` for another mesh."""
    if mesh.ndim != 1:
        names = list(mesh.mesh_dim_names or map(str, range(mesh.ndim)))
        raise InputError(
            f"group: got a device mesh with the dimensions {names}, expected the one along which the pipeline "
            'runs. Name it: group=mesh["pp"].'
        )
    return mesh.get_group()


def join_launched() -> None:
    """Initialize the default process group if a launcher started several processes and nobody has done so."""
    size = os.environ.get("WORLD_SIZE", "")
    if size.isdecimal() and int(size) > 1 and dist.is_available() and not dist.is_initialized():
        dist.init_process_group()


def require_process_group(environment: Mapping[str, str]) -> None:
    """Raise `TransportError` if a launcher started several processes, to call if no process group exists."""
    size = environment.get("WORLD_SIZE", "")
    if size.isdecimal() and int(size) > 1:
        raise TransportError(
            f"torch.distributed: got no process group, though a launcher has started {size} processes (WORLD_SIZE), "
            "expected one: otherwise each process runs all ranks by itself. Call "
            "torch.distributed.init_process_group() before pipeline(), and destroy_process_group() only after the last "
            "step; or, to run all ranks in every "
            'process, remove it first: del os.environ["WORLD_SIZE"].'
        )
