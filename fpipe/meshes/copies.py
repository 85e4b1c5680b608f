# SPDX-License-Identifier: Apache-2.0
"""The copies of a pipeline on a device mesh, and which of them this process plays.

Each copy trains on rows of its own. Along one dimension of the mesh, the copies are replicas: each has all weights.
Along another, each has a shard of them. So copy `k` is shard `k % shards` of replica `k // shards`. The processes that
hold the same stages in all copies exchange weights and gradients (`fpipe.meshes.exchange`).

Invariant: copies see the same global batch as one device would, cut into `count` times as many microbatches.

Runs when a pipeline is built and in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fpipe.meshes.exchange import CopyLinks, DistributedPeers, LocalPeers, Meeting
from schedules import Schedule, forwards, reduce_gradients, shard
from schedules.language.actions import GATHERINGS


@dataclass(frozen=True, eq=False)
class PipelineCopies:
    """The copies of a pipeline.

    - `replicas`, `shards`: how many there are along each dimension; there are as many copies as their product.
    - `here`: the copies that this process plays: one under torch.distributed, otherwise all.
    - `own_rows`: whether a process is passed the rows of its own copy only, instead of the whole batch.
    - `gathered`: the number of stages of a rank whose weights are gathered at once; `None` for all of them.
    - `members`: for each copy, the number of one of its processes among all processes of the mesh.
    - `position`: the number of this process's place along all dimensions but those of ranks and replicas.
    - `part`: the number of this process's place along the dimensions of the model's own modules.
    - `groups`: the process groups of this process's shards and replicas; `None` where there is only one.
    - `mesh`, `names`: the device mesh, and the names of its dimensions of replicas and shards, if any.
    """

    replicas: int = 1
    shards: int = 1
    here: tuple[int, ...] = (0,)
    own_rows: bool = False
    gathered: int | None = None
    members: tuple[int, ...] = (0,)
    position: int = 0
    part: int = 0
    groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None)
    mesh: DeviceMesh | None = None
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = f"{self.replicas} replicas of {self.shards} shards"
        how = "rows of their own" if self.own_rows else "whole batches"
        return f"{sizes} over {list(self.names)} of {self.mesh}, {how}, {self.gathered} stages gathered"

    @property
    def count(self) -> int:
        """The number of copies."""
        return self.replicas * self.shards

    @property
    def is_local(self) -> bool:
        """True if this process plays every copy."""
        return len(self.here) == self.count

    @property
    def is_first(self) -> bool:
        """True if this process is at the start of every dimension of the mesh but that of ranks."""
        return self.here[0] == 0 == self.position

    @property
    def pieces(self) -> int:
        """The number of pieces that a batch is cut into for each microbatch of the schedule."""
        return 1 if self.own_rows else self.count

    @property
    def phases(self) -> int:
        """The number of messages that a reduction takes."""
        return (self.shards > 1) + 2 * (self.replicas > 1)

    def shard_of(self, copy: int) -> int:
        """Return the number of a copy's shard."""
        return copy % self.shards

    @cached_property
    def held_shards(self) -> tuple[int, ...]:
        """The shards that this process holds."""
        return tuple(dict.fromkeys(self.shard_of(copy) for copy in self.here))

    def link(self) -> Mapping[int, CopyLinks]:
        """Return the groups of every copy that this process plays, for one step."""
        if not self.is_local:
            alone = LocalPeers(0, Meeting(1))
            ends = [alone if group is None else DistributedPeers(group) for group in self.groups]
            return {copy: CopyLinks(*ends) for copy in self.here}
        rows = [Meeting(self.shards) for _ in range(self.replicas)]
        columns = [Meeting(self.replicas) for _ in range(self.shards)]
        return {
            copy: CopyLinks(LocalPeers(s, rows[r]), LocalPeers(r, columns[s]))
            for copy in self.here
            for r, s in [divmod(copy, self.shards)]
        }

    def train(self, schedule: Schedule) -> Schedule:
        """Return the schedule with the collectives of a training step, unless it has them already.

        A schedule that updates weights in flight gets none: a stream reduces the gradients of each batch.
        """
        kinds = {action.kind for rank in range(schedule.ranks) for action in schedule.actions(rank)}
        if "U" in kinds:
            return schedule
        if self.count > 1 and schedule.backward and "REDUCE_GRAD" not in kinds:
            schedule = reduce_gradients(schedule)
        return schedule if kinds & GATHERINGS else self._gather(schedule)

    def evaluate(self, schedule: Schedule) -> Schedule:
        """Return the forwards of a schedule, with the collectives that they need."""
        return self._gather(forwards(schedule))

    def _gather(self, schedule: Schedule) -> Schedule:
        if self.shards == 1:
            return schedule
        most = max(len(schedule.placement.stages_on(rank)) for rank in range(schedule.ranks))
        return shard(schedule, limit=most if self.gathered is None else self.gathered)


ALONE = PipelineCopies()
"""A single copy, as without a mesh."""
