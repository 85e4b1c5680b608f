# SPDX-License-Identifier: Apache-2.0
"""The process group over which ranks agree: it gathers small host tensors from every rank to all.

It is always a Gloo group, whichever backend carries the rest: the host reads its messages, which must neither wait for
a device nor collide with the user's own collectives. Rows go to the first rank and come back as a table: two messages
in sequence. A ring takes as many as there are ranks, each in one of Gloo's threads.

Runs when a pipeline is built and in every step, if ranks are separate processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.errors import TransportError
from fpipe.network.calls import SharedCalls
from fpipe.network.creation import Creator
from fpipe.network.waiting import Awaited, PendingWorks, Waitable, reporting
from fpipe.tensors.torch_private import process_groups, timeout_of

GRACE: Final = timedelta(minutes=1)
"""How much later than a rank its groups give up, so that the rank has time to find out why."""


class Control(NamedTuple):
    """The group, this process's rank in it, and the numbers in the job of all its processes."""

    group: dist.ProcessGroup
    rank: int
    processes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self.processes)

    @classmethod
    def of(cls, world: list[int], replicas: list[list[int]], timeout: timedelta, creator: Creator) -> Control:
        """Return the group of the processes `world`, one of `replicas`; every process of the job must call this.

        Raise `BrokenWaitError` if one does not.

        Pipelines on the same processes share the group, so that ranks that call different pipelines notice. It is
        looked up by its description in torch's own table of process groups.
        """
        known = cls.find(world, replicas)
        if known is not None:
            return known
        cpu = torch.device("cpu")
        made = [creator.create_group(one, timeout, "gloo", cpu, _describe(one, replicas)) for one in replicas]
        return cls(made[replicas.index(world)], world.index(dist.get_rank()), tuple(world))

    @classmethod
    def find(cls, world: list[int], replicas: list[list[int]]) -> Control | None:
        """Return the group of these processes, if there is one."""
        name = _describe(world, replicas)
        groups = [known for known in process_groups() if known.group_desc == name]
        return cls(groups[0], world.index(dist.get_rank()), tuple(world)) if groups else None

    @property
    def is_alive(self) -> bool:
        """True if the group has not been destroyed."""
        return self.group in process_groups()

    def gather(self, mine: Tensor, wait: Callable[[Waitable], None], call: str) -> Sequence[Tensor]:
        """Return the tensor that each rank passes, in rank order; all must have the same shape and dtype.

        `wait` waits for the others; `call` is what they are to do, for errors.
        """
        table = torch.empty(self.size, *mine.shape, dtype=mine.dtype)
        rows = table.unbind(0)
        others = range(1, self.size)
        if self.rank:
            here = self._awaited(0, call)
            with reporting(here):
                works = [self.group.recv([table], 0, 0), self.group.send([mine], 0, 0)]
            wait(PendingWorks(works[::-1], here))
            return rows
        rows[0].copy_(mine)
        self._exchange(others, lambda other: self.group.recv([rows[other]], other, 0), wait, call)
        self._exchange(others, lambda other: self.group.send([table], other, 0), wait, call)
        return rows

    def _exchange(
        self, others: Sequence[int], post: Callable[[int], dist.Work], wait: Callable[[Waitable], None], call: str
    ) -> None:
        """Post one transfer for each of the others, and wait for them in turn."""
        pending = list[PendingWorks]()
        for other in others:
            there = self._awaited(other, call)
            with reporting(there):
                pending.append(PendingWorks([post(other)], there))
        for one in pending:
            wait(one)

    def _awaited(self, other: int, call: str) -> Awaited:
        return Awaited(f"agreement on {call}", (self.processes[other],), self.group)


def _describe(world: list[int], replicas: list[list[int]]) -> str:
    """Return the description by which a control group is found."""
    return f"control group of {world} in {replicas}"


def choose_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return how long a rank may keep others waiting: the group's timeout.

    A device mesh makes its groups without the timeout that the job was initialized with; of those, it is the job's.
    """
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialized"
    return timeout_of(world if group.group_desc.startswith("mesh_") else group, device)


def find_mesh_group(
    control: Control, group: dist.ProcessGroup, everyone: list[list[int]], device: torch.device, creator: Creator
) -> dist.ProcessGroup:
    """Return the group, on the device's backend, of all processes that agree; `group` if those are its own.

    `everyone` lists these processes for each pipeline of the job.
    """
    if control.size == dist.get_world_size(group):
        return group
    if control.size == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None, "torch.distributed is initialized"
        return world
    found: dist.ProcessGroup | None = None
    for members in everyone:
        made = creator.create_group(members, timeout_of(group, device), dist.get_backend(group), device)
        found = made if dist.get_rank() in members else found
    assert found is not None, "this process is a member"
    return found


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
