# SPDX-License-Identifier: Apache-2.0
"""Groups of processes that exchange bytes: over torch.distributed, or within one process.

Both kinds only move bytes: `share` sends the same to all, `exchange` a piece to each. Nothing is reduced on the way.
Every process of a group posts the same messages in the same order.

The same code serves Gloo and NCCL; over NCCL it has not been run yet.

Runs in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.errors import TransportError
from fpipe.runtime.transport.interface import Handle, MessageKey, Payload
from fpipe.runtime.transport.local import LocalHandle
from fpipe.torch_private import post_all_gather


class Peers(Protocol):
    """One process's end of a group: its number in it, and the number of processes."""

    @property
    def rank(self) -> int:
        """The number of this process in the group."""

    @property
    def count(self) -> int:
        """The number of processes."""

    def share(self, message: MessageKey, data: Tensor) -> Handle:
        """Post bytes for all; the handle gives those of every process. All pass as many."""

    def exchange(self, message: MessageKey, data: Tensor, sizes: Sequence[int]) -> Handle:
        """Post bytes for each process, one piece after the other; the handle gives the pieces for this one."""


class CollectiveHandle:
    """A posted collective of torch.distributed: its work, what it sends, and what it fills."""

    end, is_done = "GROUP", False

    def __init__(self, message: MessageKey, work: dist.Work, sent: Tensor, data: Sequence[Tensor]) -> None:
        self.message, self.work, self.sent, self.data = message, work, sent, tuple(data)

    def wait(self) -> None:
        """Block until every process has sent its part; raise `TransportError` if one does not."""
        kind, stage, number, _ = self.message
        try:
            self.work.wait()
        except RuntimeError as error:
            raise TransportError(
                f"{stage}{kind}{number}: got {error}, expected the bytes of every process of the group. Look at the "
                "last output of the others: one of them may have crashed, or run another program."
            ) from error

    def take(self) -> Payload:
        """Return what arrived, and drop it from the handle."""
        data, self.data = self.data, ()
        del self.sent
        return data


@dataclass(frozen=True)
class DistributedPeers:
    """A process group of torch.distributed."""

    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """The number of this process in the group."""
        return dist.get_rank(self.group)

    @property
    def count(self) -> int:
        """The number of processes."""
        return dist.get_world_size(self.group)

    def share(self, message: MessageKey, data: Tensor) -> CollectiveHandle:
        """Post an all-gather."""
        rows = data.new_empty(self.count, len(data))
        work = post_all_gather(rows.view(-1), data, self.group)
        return CollectiveHandle(message, work, data, rows.unbind())

    def exchange(self, message: MessageKey, data: Tensor, sizes: Sequence[int]) -> CollectiveHandle:
        """Post an all-to-all."""
        mine = sizes[self.rank]
        rows = data.new_empty(self.count, mine)
        arriving = [mine] * self.count
        work = dist.all_to_all_single(rows.view(-1), data, arriving, list(sizes), group=self.group, async_op=True)
        assert work is not None, "this process is in the group"
        return CollectiveHandle(message, work, data, rows.unbind())


@dataclass(frozen=True, eq=False)
class Meeting:
    """The meeting point of a group within this process: what each member has posted for a message, until all have."""

    count: int
    posted: dict[MessageKey, dict[int, tuple[LocalHandle, Sequence[Tensor]]]] = field(default_factory=dict)

    def post(self, rank: int, message: MessageKey, pieces: Sequence[Tensor]) -> LocalHandle:
        """Post the pieces of member `rank`, one for each; the last to come completes the handles of all."""
        handle, there = LocalHandle("GROUP", message), self.posted.setdefault(message, {})
        assert rank not in there, "every member posts a message once"
        there[rank] = handle, pieces
        if len(there) == self.count:
            del self.posted[message]
            for k, (waiting, _) in there.items():
                waiting.finish(tuple(there[other][1][k] for other in range(self.count)))
        return handle


@dataclass(frozen=True)
class LocalPeers:
    """A member of a group within this process."""

    rank: int
    meeting: Meeting

    @property
    def count(self) -> int:
        """The number of members."""
        return self.meeting.count

    def share(self, message: MessageKey, data: Tensor) -> LocalHandle:
        """Post the same bytes for all."""
        return self.meeting.post(self.rank, message, [data] * self.count)

    def exchange(self, message: MessageKey, data: Tensor, sizes: Sequence[int]) -> LocalHandle:
        """Post a piece for each."""
        return self.meeting.post(self.rank, message, torch.split(data, list(sizes)))
