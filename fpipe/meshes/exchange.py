# SPDX-License-Identifier: Apache-2.0
"""The collectives of a step: the processes that hold the same stages gather weights, and reduce gradients.

Groups of processes only move bytes, over torch.distributed or within one process: `share` sends the same to all,
`exchange` tensors to each. Nothing is reduced on the way. Every process of a group posts the same messages in the same
order. The same code serves Gloo and NCCL; over NCCL it has not been run yet.

A reduction takes one message if weights are sharded: each process gets its shard of all gradients, and adds them in the
order of shards. If there are replicas, it takes two more: each process gets a portion of the gradients of all replicas,
adds them in the order of replicas, and sends the sum to all. Per process, these are the bytes of a reduce-scatter, and
of an all-reduce.

Invariant: sums are added in the order of copies, replica by replica the sums over shards. So their bits depend neither
on the backend nor on how stages are cut.

Runs in every step; layouts are made once per plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.meshes.pieces import FlatBuffer, Pieces
from fpipe.network.waiting import Awaited, PendingWorks, await_all, reporting
from fpipe.runtime.local import LocalHandle
from fpipe.runtime.transport import Handle, Payload
from fpipe.stages.accumulation import Grads
from fpipe.tensors.spec import Spec
from fpipe.tensors.torch_private import post_all_gather
from schedules import Action


class CollectiveHandle(PendingWorks):
    """A posted collective of torch.distributed: its works, what it sends, and what it gives."""

    end, is_done = "GROUP", False

    def __init__(
        self, message: Action, works: Sequence[dist.Work], awaited: Awaited, sent: Payload, data: Payload
    ) -> None:
        super().__init__(works, awaited)
        self.message, self.sent, self.data = message, sent, data

    def take(self) -> Payload:
        """Return what arrived, and drop it from the handle."""
        data, self.data = self.data, ()
        del self.sent
        return data


@dataclass(frozen=True)
class DistributedPeers:
    """One process's end of a group of torch.distributed: its number in it, and the number of processes."""

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
        """Post bytes for all; the handle gives those of every process. All pass as many."""
        rows, awaited = data.new_empty(self.count, len(data)), await_all(str(message), self.group)
        with reporting(awaited):
            work = post_all_gather(rows.view(-1), data, self.group)
        return CollectiveHandle(message, (work,), awaited, (data,), rows.unbind())

    def exchange(
        self, message: Action, leaving: Sequence[Payload], arriving: Sequence[Payload], result: Payload
    ) -> CollectiveHandle:
        """Post tensors for each process, and room for those of each; the handle gives `result` once all are there.

        A process sends itself nothing. The next process comes first, so that no process is everyone's first.
        """
        operations, awaited = list[dist.P2POp](), await_all(str(message), self.group)
        for step in range(1, self.count):
            target, source = (self.rank + step) % self.count, (self.rank - step) % self.count
            operations += [self._operation(dist.isend, tensor, target) for tensor in leaving[target] if len(tensor)]
            operations += [self._operation(dist.irecv, tensor, source) for tensor in arriving[source] if len(tensor)]
        with reporting(awaited):
            works = dist.batch_isend_irecv(operations) if operations else []
        return CollectiveHandle(message, works, awaited, (leaving, arriving), result)

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
    """One member's end of a group within this process; it does what `DistributedPeers` does."""

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


Peers: TypeAlias = DistributedPeers | LocalPeers
"""One end of a group of processes that exchange bytes."""


def make_room(peers: Peers, own: Payload) -> tuple[Payload, ...]:
    """Return room for what every process sends this one, which has its own part already."""
    return tuple(own if k == peers.rank else tuple(map(torch.empty_like, own)) for k in range(peers.count))


class CopyLinks(NamedTuple):
    """The two groups of one copy: its fellow shards of a replica, and its counterparts in the other replicas."""

    shards: Peers
    replicas: Peers


@dataclass(frozen=True)
class StageLayout:
    """The cuts of a stage's weights and gradients; `shard` is the number of the process's own shard.

    - `weights`, `totals`: the specs of the stage's parameters, and of its gradients.
    """

    weights: tuple[Spec, ...]
    totals: tuple[Spec, ...]
    shards: int
    shard: int
    replicas: int
    device: torch.device

    @cached_property
    def parameters(self) -> Pieces:
        """The shards of the parameters."""
        return Pieces(self.weights, self.shards)

    @cached_property
    def rows(self) -> Pieces:
        """The shards of the gradients."""
        return Pieces(self.totals, self.shards)

    @cached_property
    def local(self) -> tuple[Spec, ...]:
        """The specs of the gradients that this process keeps."""
        return self.totals if self.shards == 1 else self.rows.packings[self.shard].specs

    @cached_property
    def flat(self) -> FlatBuffer:
        """The portions of this process's gradients that the replicas add up."""
        return FlatBuffer(self.local, self.replicas)


class Exchange:
    """One copy's collectives in one step; it implements `fpipe.runtime.contract.StageGroup`.

    - `shards`: per stage, this copy's shards of its parameters.
    - `enter`, `leave`: put gathered weights into the parameters of a stage, and remove them.
    - `complete`: adds up the parts of a stage's gradients that the model's own modules have on several processes.
    """

    def __init__(
        self,
        links: CopyLinks,
        layouts: Mapping[int, StageLayout],
        shards: Mapping[int, Payload],
        enter: Callable[[int, Payload], None],
        leave: Callable[[int], None],
        complete: Callable[[int, Payload], Payload],
    ) -> None:
        self.links, self.layouts, self.shards = links, layouts, shards
        self.put, self.remove, self.complete = enter, leave, complete
        self.phases = [self._scatter_rows] * (links.shards.count > 1)
        self.phases += [self._scatter_portions, self._share_portions] * (links.replicas.count > 1)

    def unshard(self, stage: int, number: int) -> Handle:
        """Post an all-gather of the stage's weights."""
        layout, message = self.layouts[stage], Action("UNSHARD", stage, number)
        if not layout.weights:
            return _nothing(message)
        data = layout.parameters.pack_one(layout.shard, self.shards[stage], layout.device)
        return self.links.shards.share(message, data)

    def enter(self, stage: int, weights: Payload) -> None:
        """Put the gathered weights into the parameters of the stage."""
        layout = self.layouts[stage]
        self.put(stage, layout.parameters.join(weights) if layout.weights else ())

    def reshard(self, stage: int) -> None:
        """Remove the gathered weights."""
        self.remove(stage)

    def reduce(self, stage: int, microbatch: int, phase: int, values: Payload) -> Handle:
        """Post a phase of the reduction of the stage's gradients."""
        layout, message = self.layouts[stage], Action("REDUCE_GRAD", stage, microbatch)
        if not layout.totals:
            return _nothing(message)
        return self.phases[phase](layout, message, values if phase else self.complete(stage, values))

    def reduced(self, stage: int, values: Payload) -> Grads:
        """Return the reduced gradients, given what the last phase gave."""
        layout = self.layouts[stage]
        if not layout.totals:
            return ()
        if self.links.replicas.count > 1:
            return layout.flat.unpack(values[0])
        return layout.rows.add(layout.shard, values)

    def _scatter_rows(self, layout: StageLayout, message: Action, values: Payload) -> Handle:
        peers, leaving = self.links.shards, [(one,) for one in layout.rows.pack(values, layout.device)]
        arriving = make_room(peers, leaving[peers.rank])
        return peers.exchange(message, leaving, arriving, tuple(piece for (piece,) in arriving))

    def _scatter_portions(self, layout: StageLayout, message: Action, values: Payload) -> Handle:
        local = layout.rows.add(layout.shard, values) if self.links.shards.count > 1 else values
        peers, buffer = self.links.replicas, layout.flat.pack(local, layout.device)
        leaving = layout.flat.parts(buffer)
        arriving = make_room(peers, leaving[peers.rank])
        return peers.exchange(message, leaving, arriving, (buffer, *arriving))

    def _share_portions(self, layout: StageLayout, message: Action, values: Payload) -> Handle:
        buffer, *arrived = values
        peers = self.links.replicas
        layout.flat.add(peers.rank, buffer, arrived)
        portions = [(data,) for data, _ in layout.flat.parts(buffer)]
        return peers.exchange(message, [portions[peers.rank]] * peers.count, portions, (buffer,))


def _nothing(message: Action) -> LocalHandle:
    """Return the handle of a message without bytes, which is never sent."""
    handle = LocalHandle("GROUP", message)
    handle.finish(())
    return handle


def shard_spec(spec: Spec, shards: int, k: int) -> Spec:
    """Return the spec of shard `k` of a tensor."""
    return spec if shards == 1 else Pieces((spec,), shards).packings[k].specs[0]
