# SPDX-License-Identifier: Apache-2.0
"""The process group over which ranks agree: it gathers small host tensors from every rank to all.

It is always a Gloo group, whichever backend carries the rest: the host reads its messages, which must neither wait for
a device nor collide with the user's own collectives. Rows go to the first rank and come back as a table: two messages
in sequence. A ring takes as many as there are ranks, each in one of Gloo's threads.

Runs when a pipeline is built and in every step, if ranks are separate processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.torch_private import process_groups


class Control(NamedTuple):
    """The group, and this process's rank in it."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, world: list[int], replicas: list[list[int]], timeout: timedelta) -> Control:
        """Return the group of the processes `world`, one of `replicas`; every process of the job must call this.

        Pipelines on the same processes share the group, so that ranks that call different pipelines notice. It is
        looked up by its description in torch's own table of process groups.
        """
        names = [f"control group of {ranks} in {replicas}" for ranks in replicas]
        mine, rank = replicas.index(world), world.index(dist.get_rank())
        for known in process_groups():
            if known.group_desc == names[mine]:
                return cls(known, rank, len(world))
        pairs = zip(replicas, names, strict=True)
        made = [dist.new_group(ranks, timeout=timeout, backend="gloo", group_desc=name) for ranks, name in pairs]
        return cls(cast("dist.ProcessGroup", made[mine]), rank, len(world))

    @property
    def is_alive(self) -> bool:
        """True if the group has not been destroyed."""
        return self.group in process_groups()

    def gather(self, mine: Tensor) -> Sequence[Tensor]:
        """Return the tensor that each rank passes, in rank order; all must have the same shape and dtype."""
        table = torch.empty(self.size, *mine.shape, dtype=mine.dtype)
        rows = table.unbind(0)
        others = range(1, self.size)
        if self.rank:
            answer = self.group.recv([table], 0, 0)
            self.group.send([mine], 0, 0).wait()
            answer.wait()
            return rows
        rows[0].copy_(mine)
        for work in [self.group.recv([rows[other]], other, 0) for other in others]:
            work.wait()
        for work in [self.group.send([table], other, 0) for other in others]:
            work.wait()
        return rows
