# SPDX-License-Identifier: Apache-2.0
"""Groups of processes that exchange bytes: over torch.distributed, or within one process.

Both kinds only move bytes: `share` sends the same to all, `exchange` tensors to each. Nothing is reduced on the way.
Every process of a group posts the same messages in the same order.

The same code serves Gloo and NCCL; over NCCL it has not been run yet.

Runs in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.network.waiting import Awaited, BrokenWaitError, await_all, break_group, reporting
from fpipe.runtime.local import LocalHandle
from fpipe.runtime.transport import Handle, Payload
from fpipe.tensors.torch_private import post_all_gather
from schedules import Action


class Peers(Protocol):
    """One process's end of a group: its number in it, and the number of processes."""

    @property
    def rank(self) -> int:
        """The number of this process in the group."""

    @property
    def count(self) -> int:
        """The number of processes."""

    def share(self, message: Action, data: Tensor) -> Handle:
        """Post bytes for all; the handle gives those of every process. All pass as many."""

    def exchange(
        self, message: Action, leaving: Sequence[Payload], arriving: Sequence[Payload], result: Payload
    ) -> Handle:
        """Post tensors for each process, and room for those of each; the handle gives `result` once all are there.

        A process sends itself nothing.
        """


def make_room(peers: Peers, own: Payload) -> tuple[Payload, ...]:
    """Return room for what every process sends this one, which has its own part already."""
    return tuple(own if k == peers.rank else tuple(map(torch.empty_like, own)) for k in range(peers.count))


class CollectiveHandle:
    """A posted collective of torch.distributed: its works, what it sends, and what it gives."""

    end, is_done = "GROUP", False

    def __init__(
        self, message: Action, group: dist.ProcessGroup, works: Sequence[dist.Work], sent: Payload, data: Payload
    ) -> None:
        self.message, self.group, self.works, self.sent, self.data = message, group, works, sent, data

    @property
    def awaited(self) -> Awaited:
        """The part of every other process of the group."""
        return await_all(str(self.message), self.group)

    def wait(self) -> None:
        """Block until every process has sent its part; raise `BrokenWaitError` if one does not."""
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise BrokenWaitError(self.awaited) from error

    def give_up(self) -> None:
        """Break the group."""
        break_group(self.group)

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

    def share(self, message: Action, data: Tensor) -> CollectiveHandle:
        """Post an all-gather."""
        rows = data.new_empty(self.count, len(data))
        with reporting(await_all(str(message), self.group)):
            work = post_all_gather(rows.view(-1), data, self.group)
        return CollectiveHandle(message, self.group, (work,), (data,), rows.unbind())

    def exchange(
        self, message: Action, leaving: Sequence[Payload], arriving: Sequence[Payload], result: Payload
    ) -> CollectiveHandle:
        """Post sends and receives: first those of the next process, so that no process is everyone's first."""
        operations = list[dist.P2POp]()
        for step in range(1, self.count):
            target, source = (self.rank + step) % self.count, (self.rank - step) % self.count
            operations += [self._operation(dist.isend, tensor, target) for tensor in leaving[target] if len(tensor)]
            operations += [self._operation(dist.irecv, tensor, source) for tensor in arriving[source] if len(tensor)]
        with reporting(await_all(str(message), self.group)):
            works = dist.batch_isend_irecv(operations) if operations else []
        return CollectiveHandle(message, self.group, works, (leaving, arriving), result)

    def _operation(self, kind: Callable[..., Any], tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, group=self.group, group_peer=peer)


OnArrival: TypeAlias = Callable[[Sequence[Payload]], Payload]
"""Takes what every member of a group has sent a member, and returns what that member's handle gives."""


class Posted(NamedTuple):
    """A member's part of a message: its handle, what leaves for each member, and how it takes what arrives."""

    handle: LocalHandle
    leaving: Sequence[Payload]
    finish: OnArrival


@dataclass(frozen=True, eq=False)
class Meeting:
    """The meeting point of a group in this process: what each member has posted for a collective, until all have."""

    count: int
    posted: dict[Action, dict[int, Posted]] = field(default_factory=dict)

    def post(self, rank: int, message: Action, leaving: Sequence[Payload], finish: OnArrival) -> LocalHandle:
        """Post what member `rank` has for each; the last to come completes the handles of all."""
        there = self.posted.setdefault(message, {})
        assert rank not in there, "every member posts a message once"
        there[rank] = posted = Posted(LocalHandle("GROUP", message), leaving, finish)
        if len(there) == self.count:
            del self.posted[message]
            for k, one in there.items():
                one.handle.finish(one.finish([there[other].leaving[k] for other in range(self.count)]))
        return posted.handle


@dataclass(frozen=True)
class LocalPeers:
    """A member of a group within this process."""

    rank: int
    meeting: Meeting

    @property
    def count(self) -> int:
        """The number of members."""
        return self.meeting.count

    def share(self, message: Action, data: Tensor) -> LocalHandle:
        """Post the same bytes for all."""
        return self.meeting.post(self.rank, message, [(data,)] * self.count, lambda all_: tuple(one for (one,) in all_))

    def exchange(
        self, message: Action, leaving: Sequence[Payload], arriving: Sequence[Payload], result: Payload
    ) -> LocalHandle:
        """Post tensors for each; those of the others are copied into the room for them."""

        def finish(arrived: Sequence[Payload]) -> Payload:
            for k in range(self.count):
                for room, tensor in zip(arriving[k], arrived[k], strict=True) if k != self.rank else ():
                    room.copy_(tensor)
            return result

        return self.meeting.post(self.rank, message, leaving, finish)
