# SPDX-License-Identifier: Apache-2.0
"""Channels between processes: point-to-point messages of torch.distributed, over Gloo on CPU and NCCL on GPU.

Each channel has its own process group. On NCCL, a pair of ranks would otherwise share one communicator and stream for
both directions, and plain 1F1B could deadlock on them. Groups are created, and warmed up with one byte, in one order of
channels on every rank, so that connecting can't deadlock either.

Every receive is described by a `Spec` known beforehand; nothing is pickled, and no shapes travel. Every message states
its identity. On a CPU this is checked before the message is used. On an accelerator, that would block the host in every
action, so it is checked as the device goes on (`fpipe.network.trail`).

Every send costs tens of microseconds, however small. So a message has a head (`Envelope`): its identity, its length and
a digest of its specs, followed by all small tensors in the same buffer. So most messages are one send. On a CPU, where
copies cost as much as sends, large tensors are sent separately, as they are. On an accelerator, every message is one
send and one kernel: two in the same stream could block those of other channels. Every tensor begins where it could have
been allocated: some kernels depend on alignment.

The same code serves Gloo and NCCL. Over NCCL it has been run by ranks that share one GPU, not on several yet; what is
posted has been played on models of devices (`schedules.run_on_device`).

Runs in every step; channels are set up when a plan is made: once per kind of batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import cached_property, partial
from itertools import count
from typing import Any, Final, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.errors import TransportError
from fpipe.network.fingerprint import digest
from fpipe.network.groups import Creator, retire_groups
from fpipe.network.trail import Arrived, Trail, make_trail
from fpipe.network.waiting import (
    Awaited,
    BrokenWaitError,
    break_group,
)
from fpipe.runtime.transport import Payload, Route
from fpipe.tensors.spec import Spec
from schedules import Action
from schedules.language.actions import SENDS, Message, receive_of

Specs: TypeAlias = tuple[Spec, ...]

LINE: Final = 64
SMALL_BYTES: Final = 2**16
CARRIED: Final = tuple(SENDS.values())


class Layout(NamedTuple):
    """The layout of all messages: tensors begin at multiples of `line` bytes; of more than `small`, they go separately.

    The header has `LINE` bytes, and takes a whole line.
    """

    line: int
    small: float


ON_CPU, ON_DEVICE = Layout(LINE, SMALL_BYTES), Layout(512, math.inf)
"""An accelerator's allocator aligns to 512 bytes."""


class Envelope:
    """The layout of one message between two ranks.

    - `sizes`: the bytes of each tensor; `small`: whether each travels in the head.
    - `header`: the first line of the head; `values`: the numbers in its first `LINE` bytes.
    """

    def __init__(self, message: Message, specs: Specs, device: torch.device, layout: Layout = ON_CPU) -> None:
        self.message, self.specs, self.device, self.line = message, specs, device, layout.line
        self.sizes = [spec.buffer().numel() for spec in specs]
        self.small = [size <= layout.small for size in self.sizes]
        kind, source, microbatch, target, _ = message
        about = digest(f"{spec} {spec.stride}" for spec in specs)
        values = [CARRIED.index(kind), source, microbatch, target, sum(self.sizes), about, 0, 0]
        self.values = torch.tensor(values)
        self.header = torch.nn.functional.pad(self.values.view(torch.uint8), (0, self.line - LINE)).to(device)

    @cached_property
    def length(self) -> int:
        """The length of the head in bytes."""
        return self.line + sum(
            self._round_up(size) for size, small in zip(self.sizes, self.small, strict=True) if small
        )

    def pack(self, payload: Payload) -> tuple[Tensor, ...]:
        """Return the buffers to send for these tensors, in order."""
        head, rest = [self.header], list[Tensor]()
        for spec, tensor, size, small in zip(self.specs, payload, self.sizes, self.small, strict=True):
            packed = spec.pack(tensor)
            if not small:
                rest.append(packed)
                continue
            head.append(packed)
            if size % self.line:
                head.append(self.padding[: -size % self.line])
        return (torch.cat(head) if len(head) > 1 else self.header, *rest)

    def buffers(self) -> tuple[Tensor, ...]:
        """Return uninitialized buffers that receive what `pack` returns."""
        large = [spec.buffer() for spec, small in zip(self.specs, self.small, strict=True) if not small]
        return (torch.empty(self.length, dtype=torch.uint8, device=self.device), *large)

    def unpack(self, data: tuple[Tensor, ...]) -> Payload:
        """Return the tensors in these received buffers."""
        head, *rest = data
        found, start, large = list[Any](), self.line, iter(rest)
        for spec, size, small in zip(self.specs, self.sizes, self.small, strict=True):
            found.append(spec.unpack(head[start : start + size] if small else next(large)))
            start += self._round_up(size) if small else 0
        return tuple(found)

    @cached_property
    def padding(self) -> Tensor:
        """Zeros that pad small tensors to whole lines."""
        return torch.zeros(self.line, dtype=torch.uint8, device=self.device)

    def _round_up(self, size: int) -> int:
        return -(-size // self.line) * self.line

    def require(self, header: Tensor) -> None:
        """Raise `TransportError` unless a received header, which must be on the CPU, is that of this message."""
        got = header.view(torch.int64)
        if torch.equal(got, self.values):
            return
        (what, *_, length, about), (*_, mine, expected) = got.tolist()[:6], self.values.tolist()[:6]
        known = what in range(len(CARRIED))
        said = str(Action(CARRIED[what], *got.tolist()[1:4])) if known else f"unknown bytes {got.tolist()}"
        same = "" if about == expected else ", with tensors of other shapes or dtypes"
        wanted = receive_of(self.message)
        raise TransportError(
            f"a message: got {said} of {length} bytes{same}, expected that of {wanted} of {mine} bytes. It was not "
            "used. The ranks run different programs: stop the processes, and build the pipeline from the same "
            "arguments on every rank."
        )


class DistributedHandle:
    """A posted send or receive: its `dist.Work`s, and the buffers that must stay alive until they are done."""

    is_done = False

    def __init__(
        self,
        channel: DistributedChannel,
        end: str,
        envelope: Envelope,
        works: Sequence[dist.Work],
        data: tuple[Tensor, ...],
    ) -> None:
        self.channel, self.end, self.message, self.envelope = channel, end, envelope.message, envelope
        self.works, self.data = works, data

    @property
    def awaited(self) -> Awaited:
        """The action of the process at the other end."""
        return self.channel.awaited(self.end, self.message)

    def wait(self) -> None:
        """Block until the transfer is done; then release a send's buffers. Raise `BrokenWaitError` if it can't be."""
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise BrokenWaitError(self.awaited) from error
        self.works = ()
        if self.end == "SEND":
            self.data = ()

    def give_up(self) -> None:
        """Break the channel."""
        break_group(self.channel.group)

    def take(self) -> Payload:
        """Return the tensors that arrived, and drop the buffers; without a trail, refuse a wrong message."""
        data, self.data = self.data, ()
        header, trail = data[0][:LINE], self.channel.trail
        if trail is None:
            self.envelope.require(header)
        else:  # a view would keep the whole buffer alive
            trail.add(Arrived(header.clone(), self.envelope.require, self.awaited))
        return self.envelope.unpack(data)


class DistributedChannel:
    """A channel: a process group of two, the rank in it of each end, and the numbers in the job of both.

    `trail`: what compares headers on an accelerator.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        source: int,
        target: int,
        device: torch.device,
        trail: Trail | None = None,
        ends: tuple[int, int] = (0, 1),
    ) -> None:
        self.group, self.source, self.target, self.ends = group, source, target, ends
        self.device, self.trail = device, trail
        self.envelopes: dict[tuple[Message, int], Envelope] = {}

    @classmethod
    def between(
        cls, group: dist.ProcessGroup, source: int, target: int, device: torch.device, trail: Trail | None
    ) -> DistributedChannel:
        """Return the channel from process `source` of the job to `target`; groups rank processes in ascending order."""
        return cls(group, int(source > target), int(target > source), device, trail, (source, target))

    def send(self, message: Message, payload: Payload, specs: Specs) -> DistributedHandle:
        """Post a send of a tuple of tensors; raise `BrokenWaitError` if the other process is gone."""
        envelope = self._envelope(message, specs)
        data = envelope.pack(payload)
        try:
            works = [self.group.send([bytes_], self.target, 0) for bytes_ in data]
        except RuntimeError as error:
            raise BrokenWaitError(self.awaited("SEND", message)) from error
        return DistributedHandle(self, "SEND", envelope, works, data)

    def receive(self, message: Message, specs: Specs) -> DistributedHandle:
        """Post a receive of tensors with these specs; raise `BrokenWaitError` if the other process is gone."""
        envelope = self._envelope(message, specs)
        data = envelope.buffers()
        try:
            works = [self.group.recv([bytes_], self.source, 0) for bytes_ in data]
        except RuntimeError as error:
            raise BrokenWaitError(self.awaited("RECV", message)) from error
        return DistributedHandle(self, "RECV", envelope, works, data)

    def awaited(self, end: str, message: Message) -> Awaited:
        """Return what one end of a message waits for: that the other end is posted."""
        source, target = self.ends
        if end == "SEND":
            return Awaited(str(receive_of(message)), (target,), self.group)
        return Awaited(str(message), (source,), self.group)

    def _envelope(self, message: Message, specs: Specs) -> Envelope:
        """Return the layout of a message, cached; the cache keeps the specs alive, so that their ids stay unique."""
        # By identity: specs are made once per plan, and hashing those of a message in every step takes longer.
        known = self.envelopes.get((message, id(specs)))
        if known is None:
            layout = ON_CPU if self.trail is None else ON_DEVICE
            known = self.envelopes[message, id(specs)] = Envelope(message, specs, self.device, layout)
        return known


def order_in_rounds(channels: Iterable[Route]) -> list[Route]:
    """Return the channels so that they can be set up in few rounds, in each of which no rank takes part twice.

    Ranks set up their channels one by one. In ascending order, a chain of n ranks would take n - 1 rounds, each waiting
    for the one before; so it takes four, whatever n. A rank with k channels takes part in fewer than 4 k rounds.

    >>> order_in_rounds([(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)])
    [(0, 1), (2, 3), (1, 0), (3, 2), (1, 2), (2, 1)]
    """
    rounds = dict[Route, int]()
    busy = defaultdict[int, set[int]](set)
    for source, target in sorted(channels):
        taken = busy[source] | busy[target]
        rounds[source, target] = first = next(k for k in count() if k not in taken)
        busy[source].add(first)
        busy[target].add(first)
    return sorted(rounds, key=lambda route: (rounds[route], route))


class DistributedTransport:
    """The channels of this process, rank `rank` of the pipeline whose processes are `world`; `timeout` is their own.

    `replicas` lists the processes of every pipeline of the job: all of them take part in creating every group, since
    torch.distributed names a group by the number of groups created so far.

    - `groups`: those of the channels that begin or end here, in the order in which they were created.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, replicas: list[list[int]], timeout: timedelta
    ) -> None:
        self.device, self.replicas, self.timeout = device, replicas, timeout
        self.rank, self.world = dist.get_rank(group), dist.get_process_group_ranks(group)
        self.backend = dist.get_backend(group)
        self.channels: dict[Route, DistributedChannel] = {}
        self.groups: list[dist.ProcessGroup] = []
        self.trail = make_trail(device)

    def setup(self, channels: Iterable[Route], creator: Creator) -> None:
        """Create a process group for each new channel, in the same order everywhere, and warm it up."""
        for source, target in order_in_rounds(one for one in channels if one not in self.channels):
            replicas = [
                creator.create_group([world[source], world[target]], self.timeout, self.backend, self.device)
                for world in self.replicas
            ]
            group = replicas[self.replicas.index(self.world)]
            self.channels[source, target] = DistributedChannel.between(
                group, self.world[source], self.world[target], self.device, self.trail
            )
            if self.rank in (source, target):
                self._warm_up(self.channels[source, target], self.rank == source, creator)

    def _warm_up(self, channel: DistributedChannel, sends: bool, creator: Creator) -> None:
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        post, end = (channel.group.send, channel.target) if sends else (channel.group.recv, channel.source)
        first = partial(post, [byte], end, 0)
        creator.post_first(first, "first byte of a channel", channel.ends, channel.group, self.device)

    def channel(self, source: int, target: int) -> DistributedChannel:
        """Return the channel, which must have been set up."""
        return self.channels[source, target]

    def forget_layouts(self) -> None:
        """Drop the cached layouts of messages, which keep the specs of every plan alive."""
        for channel in self.channels.values():
            channel.envelopes.clear()

    def release(self, others: Iterable[dist.ProcessGroup]) -> None:
        """End all waits over these channels and over other groups."""
        for group in {*self.groups, *others}:
            break_group(group)

    def close(self) -> None:
        """Destroy the groups of all channels, and wait for nobody; drop what is cached."""
        retire_groups([*self.groups], self.device)
        self.groups.clear()
        self.channels.clear()
        if self.trail is not None:
            self.trail.clear()
