# SPDX-License-Identifier: Apache-2.0
"""The start of a build, which all processes of a job begin together.

Problem. Before a pipeline has process groups of its own, all processes of the job must create them, in the same order.
One that refuses its arguments, dies, or does something else instead, would leave the others waiting in torch.

Idea. A build begins as every call does: all processes agree on it, over a control group of the whole job. It is what
the first build makes first. Before that, there is only the user's default group, over which they gather one row each,
in the same form; it is never broken, so there a wait ends when a connection ends, or by torch's timeout.

Invariant: no process creates a group before all have agreed to build. Then all name new groups alike, by the number of
groups that any of them has created: a build that failed may have left some with fewer.

Without a process group, this process runs all ranks (`LocalJob`).

Runs when a pipeline is built, or a model is profiled.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fpipe.errors import InputError, TransportError
from fpipe.network.calls import SharedCalls
from fpipe.network.devices import identify, require_device, require_distinct
from fpipe.network.distributed import DistributedRanks
from fpipe.network.groups import GRACE, Control, Creator, Made, World, connect_all
from fpipe.network.lookout import SLICE
from fpipe.network.ranks import Fields, Ranks, claim_turn
from fpipe.network.waiting import break_group, has_streams
from fpipe.tensors.torch_private import count_groups, device_types, name_groups_from, timeout_of

_LOG: Final = logging.getLogger(__name__)
TASKS: Final = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""How many processes srun or mpirun has started, which set nothing that torch.distributed reads."""
EARLIER: Final = timedelta(seconds=4 * SLICE)
"""How much earlier than the default group a process gives up, so that it has time to find out why."""


class DistributedJob:
    """The processes of a job that begin to build.

    - `calls`: what they do together; `own`: the groups that nobody else uses.
    """

    def __init__(self, calls: SharedCalls, world: World, own: list[dist.ProcessGroup]) -> None:
        self.calls, self.world, self.own = calls, world, own

    def agree(self, fields: Fields) -> None:
        """Raise `TransportError` on all processes unless all of them begin the same, with the same fields."""
        counts = self.calls.agree(fields, "its start", count_groups())
        name_groups_from(max(counts))
        self.calls.begin()
        timeout, every = timeout_of(self.world.group, self.world.device) + GRACE, [*self.world.processes]
        self.calls.table = Control.of(every, [every], timeout, self._creator)
        self.calls.decide()

    def require_device(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Raise `TransportError` on all processes unless each has a device of its own that the group reaches."""
        require_device(device, self.world.group if group is None else group)
        if has_streams(device):
            self.calls.agree(about="its devices")
            require_distinct(device, self.calls.gather, identify(device))

    def create(self, make: Callable[[], Made], what: str, device: torch.device) -> Made:
        """Return what torch makes on the device as soon as all processes ask for it."""
        self.calls.begin()
        made = self._creator.create(make, what, self.world.processes, device)
        self.calls.decide()
        return made

    @property
    def _creator(self) -> Creator:
        return Creator(self.calls.lookout.wait, self.calls.table.group, self.own.append)

    def join(
        self,
        ranks: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        members: Sequence[int] = (),
        groups: Iterable[dist.ProcessGroup | None] = (),
    ) -> Ranks:
        """Return this process's rank in the group, by default all; every process must call this after it has agreed.

        `members` are all processes that agree on every call: those of a mesh, by default the group's. `groups` are
        those of the mesh over which a step sends messages, too.
        """
        group = self.world.group if group is None else group
        _require_size(group, ranks)
        replicas = list_replicas(dist.get_process_group_ranks(group), self.calls)
        everyone = list_replicas(list(members), self.calls) if members else replicas
        self.calls.begin()
        joined = DistributedRanks(group, device, replicas, everyone, self._creator)
        for one in groups:
            if one is not None:
                connect_all(one, "group of the mesh", device, self._creator)
        self.calls.decide()
        self.calls.agree(about="the groups of its pipelines")  # until then, all look at the board of the job
        return joined


@contextmanager
def enter_distributed_job(call: str) -> Iterator[DistributedJob]:
    """Return the context in which all processes begin a build; an error on one of them is raised on all."""
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is initialized"
    kinds = device_types(group)
    world = World(group, torch.device("cpu") if torch.device("cpu") in kinds else kinds[0])
    with claim_turn(f"rank {world.rank}, {call}"):
        known = Control.find([*world.processes], [[*world.processes]])
        own = [] if known is None else [known.group]
        calls = _open_calls(world, known, own)
        try:
            with calls.enter(call):
                yield DistributedJob(calls, world, own)
        finally:
            calls.lookout.stop()


def _open_calls(world: World, known: Control | None, own: list[dist.ProcessGroup]) -> SharedCalls:
    """Return the calls over the control group of the job, or over the default group if there is none yet."""
    timeout = timeout_of(world.group, world.device)
    if known is None:
        timeout -= min(EARLIER, timeout / 4)

    def release() -> None:
        for one in own:
            break_group(one)

    return SharedCalls(known or world, timeout, release, lambda: own)


def _require_size(group: dist.ProcessGroup, ranks: int) -> None:
    size = dist.get_world_size(group)
    if size != ranks:
        raise TransportError(
            f"got a process group of {size} processes, expected one process for each of the schedule's {ranks} "
            f"ranks. Start {ranks} processes, or build the schedule for ranks={size}."
        )


class LocalJob:
    """A job of this process alone."""

    def agree(self, fields: Fields) -> None:
        """Do nothing: there is no other process."""

    def require_device(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Do nothing: there is no other process."""

    def create(self, make: Callable[[], Made], what: str, device: torch.device) -> Made:
        """Return what it makes."""
        return make()

    def join(
        self,
        ranks: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        members: Sequence[int] = (),
        groups: Iterable[dist.ProcessGroup | None] = (),
    ) -> Ranks:
        """Return all ranks; raise `TransportError` if a launcher has started other processes."""
        require_process_group(os.environ)
        return Ranks(ranks)


JobProcesses: TypeAlias = DistributedJob | LocalJob
"""The processes that begin to build together: all of the job, or this one."""


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
    """Return the process group, given as itself or as a mesh; raise `InputError` for a mesh of several dimensions."""
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        names = list(group.mesh_dim_names or map(str, range(group.ndim)))
        raise InputError(
            f"group: got a device mesh with the dimensions {names}, expected the one along which the pipeline "
            'runs. Name it: fpipe.Place(group=mesh["pp"]).'
        )
    return group.get_group()


def join_launched() -> None:
    """Initialize the default process group if a launcher started several processes and nobody has done so."""
    size = os.environ.get("WORLD_SIZE", "")
    if size.isdecimal() and int(size) > 1 and dist.is_available() and not dist.is_initialized():
        dist.init_process_group()


def require_process_group(environment: Mapping[str, str]) -> None:
    """Raise `TransportError` if a launcher started several processes, to call if no process group exists.

    A launcher that is not torch's may have started them for other things, so that is pointed out in the log.
    """
    size = environment.get("WORLD_SIZE", "")
    if size.isdecimal() and int(size) > 1:
        raise TransportError(
            f"torch.distributed: got no process group, though a launcher has started {size} processes (WORLD_SIZE), "
            "expected one: otherwise each process runs all ranks by itself. Call "
            "torch.distributed.init_process_group() before pipeline(), and destroy_process_group() only after the last "
            'step; or, to run all ranks in every process, remove the variable first: del os.environ["WORLD_SIZE"].'
        )
    for name in TASKS:
        count = environment.get(name, "")
        if not size and count.isdecimal() and int(count) > 1:
            _LOG.warning(
                "%s=%s: a launcher has started several processes, and there is no process group, so each runs all "
                "ranks by itself. If they are the ranks of one pipeline, set RANK, WORLD_SIZE, MASTER_ADDR and "
                "MASTER_PORT, and call torch.distributed.init_process_group() first; or start torchrun on each node.",
                name,
                count,
            )


def list_replicas(world: list[int], job: SharedCalls) -> list[list[int]]:
    """Return the processes of every pipeline in the job, in the same order everywhere; `world` is this pipeline's.

    `job` are the calls of all processes.
    """
    sizes = job.agree(about="the processes of its pipelines", note=len(world))
    if len({*sizes}) > 1:
        raise TransportError(
            f"group: got groups of {sorted({*sizes})} processes, expected the same size for every pipeline of the job. "
            "Build all pipelines at the same time, over groups of the same size."
        )
    lists = sorted({tuple(other.tolist()) for other in job.gather(torch.tensor(world))})
    if sorted(rank for ranks in lists for rank in ranks) != list(range(dist.get_world_size())):
        raise TransportError(
            f"group: got groups of the processes {[*map(list, lists)]}, expected each process in exactly one of them. "
            "Pass every process the group, or the mesh, that it belongs to."
        )
    return [*map(list, lists)]
