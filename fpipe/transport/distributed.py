# SPDX-License-Identifier: Apache-2.0
"""One rank per process: point-to-point messages of torch.distributed, over Gloo on CPU and NCCL on GPU.

Each channel has a process group of its own. On NCCL a pair of ranks would otherwise share one communicator and stream
for both directions, on which plain 1F1B can deadlock. Groups are made, and warmed up with one byte, in ascending order
of channels on every rank, so that connecting cannot deadlock either.

What arrives is described by a `Spec` known beforehand; nothing is pickled, and no shape travels.

The same code serves Gloo and NCCL; over NCCL it has not been run on several GPUs yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.errors import TransportError
from fpipe.executor import Execution, Outcome
from fpipe.spec import Spec
from fpipe.transport import clocks
from fpipe.transport.contract import Message, Payload, Route, Transport

Tensors: TypeAlias = tuple[Tensor, ...]
Specs: TypeAlias = tuple[Spec, ...]


class Posted:
    """A posted send or receive: its works, and the bytes that must live until they are done."""

    done = False

    def __init__(self, end: str, message: Message, works: Sequence[dist.Work], data: Tensors, specs: Specs) -> None:
        self.end, self.message = end, message
        self.works, self.data, self.specs = works, data, specs

    def wait(self) -> None:
        """Block until the works are done; what was sent need not live any longer."""
        for work in self.works:
            work.wait()
        self.works = ()
        if not self.specs:
            self.data = ()

    def take(self) -> Payload:
        """What arrived, which is then no longer held here."""
        data, self.data = self.data, ()
        return tuple([spec.unpack(bytes_) for spec, bytes_ in zip(self.specs, data, strict=True)])


class DistributedChannel(NamedTuple):
    """A channel as a process group of two, and which of them is at which end."""

    group: dist.ProcessGroup
    source: int
    target: int

    @classmethod
    def between(cls, group: dist.ProcessGroup, source: int, target: int) -> DistributedChannel:
        """From process `source` of the job to `target`; groups count their processes in ascending order."""
        return cls(group, int(source > target), int(target > source))

    def send(self, message: Message, payload: Tensors, specs: Specs) -> Posted:
        """Post the send of a tuple of tensors."""
        data = tuple([spec.pack(tensor) for spec, tensor in zip(specs, payload, strict=True)])
        works = [self.group.send([bytes_], self.target, 0) for bytes_ in data if bytes_.numel()]
        return Posted("SEND", message, works, data, ())

    def receive(self, message: Message, specs: Specs) -> Posted:
        """Post the receive of tensors of these specs."""
        data = tuple([spec.buffer() for spec in specs])
        works = [self.group.recv([bytes_], self.source, 0) for bytes_ in data if bytes_.numel()]
        return Posted("RECV", message, works, data, specs)


class DistributedTransport:
    """The channels of this process in `group`."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.device = device
        self.rank, self.world = dist.get_rank(group), dist.get_process_group_ranks(group)
        self.replicas = _replicas(self.world, device)
        self.backend = dist.get_backend(group)
        self.timeout = group._get_backend(device).options._timeout
        self.channels: dict[Route, DistributedChannel] = {}

    def setup(self, channels: Iterable[Route]) -> None:
        """Make a process group for each new channel, in ascending order, and send a first byte through it.

        Every process takes part in making every group: torch.distributed names a group by how many there are.
        """
        for source, target in channels:
            if (source, target) not in self.channels:
                replicas = [
                    dist.new_group([world[source], world[target]], timeout=self.timeout, backend=self.backend)
                    for world in self.replicas
                ]
                group = replicas[self.replicas.index(self.world)]
                self.channels[source, target] = DistributedChannel.between(
                    group, self.world[source], self.world[target]
                )
                self._warm_up(source, target)

    def _warm_up(self, source: int, target: int) -> None:
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        if self.rank == source:
            dist.send(byte, dst=self.world[target], group=self.channels[source, target].group)
        elif self.rank == target:
            dist.recv(byte, src=self.world[source], group=self.channels[source, target].group)

    def channel(self, source: int, target: int) -> DistributedChannel:
        """The channel, which has been set up."""
        return self.channels[source, target]


def _replicas(world: list[int], device: torch.device) -> list[list[int]]:
    """The processes of every pipeline in the job, `world` being those of this one, in the same order everywhere."""
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(world)], device=device))
    if len({size.item() for size in sizes}) > 1:
        raise TransportError(
            f"group: got groups of {sorted({int(size.item()) for size in sizes})} processes, expected the same size "
            "for every pipeline of the job. Build all pipelines at the same time, over groups of one size."
        )
    mine = torch.tensor(world, device=device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return sorted({tuple(other.tolist()): other.tolist() for other in found}.values())


class DistributedRanks:
    """One rank of a schedule: this process, in a `group` of as many processes as ranks."""

    def __init__(self, ranks: int, group: dist.ProcessGroup, device: torch.device) -> None:
        size = dist.get_world_size(group)
        if size != ranks:
            raise TransportError(
                f"got a process group of {size} processes, expected one process for each of the schedule's {ranks} "
                f"ranks. Start {ranks} processes, or build the schedule for ranks={size}."
            )
        self.group, self.device = group, device
        self.ranks = (dist.get_rank(group),)
        self.failure: str | None = None
        self.steps = 0
        self.shared: tuple[Tensor, int] | None = None
        self.transport = DistributedTransport(group, device)

    def prepare(self, description: str, channels: Iterable[Route]) -> None:
        """Raise `TransportError` unless every rank passes the same description; then connect."""
        digest = int.from_bytes(blake2b(description.encode(), digest_size=8).digest(), signed=True)
        mine = torch.tensor([digest], device=self.device)
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        try:
            dist.all_gather(found, mine, group=self.group)
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.ranks[0]}: got no answer from the other ranks ({error}), expected all of them to make "
                f"ready for {description}. Call the same functions on every rank; pass a batch of other shapes than "
                "the example's on all of them, on the meta device where its values are not read."
            ) from error
        different = [rank for rank, other in enumerate(found) if other.item() != digest]
        if different:
            raise TransportError(
                f"rank {self.ranks[0]}: got another pipeline on ranks {different}, expected the same model, example, "
                f"schedule and cuts on every rank. Here it is: {description}. Build it from the same arguments "
                "everywhere."
            )
        self.transport.setup(channels)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Count the step; raise `TransportError` if an earlier one broke off in the middle."""
        self._require_whole("another step")
        self._require_same_step()
        self.steps += 1
        yield

    def _require_whole(self, what: str) -> None:
        if self.failure is not None:
            raise TransportError(
                f"rank {self.ranks[0]}: got {what} after one that broke off ({self.failure}), expected none: the "
                "other ranks' messages no longer fit. End the process, and start again from a checkpoint."
            )

    def run(self, execution: Callable[[int, Transport], Execution]) -> dict[int, Outcome]:
        """Run this process's rank to its end, waiting where it must."""
        (rank,) = self.ranks
        run = execution(rank, self.transport).run()
        try:
            while True:
                posted: Any = next(run)
                posted.wait()
        except StopIteration as stop:
            return {rank: stop.value}
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise

    def share(self, tensor: Tensor | None, spec: Spec, source: int) -> Tensor:
        """Broadcast the tensor of rank `source`, and with it how many steps that rank has begun.

        Raises `TransportError` if this rank has begun another number: then their messages were of different steps. On
        an accelerator that is read when the next step begins, so that no step waits for the device.
        """
        count = torch.full((1,), self.steps, device=spec.device).view(torch.uint8)
        data = torch.cat([spec.buffer() if tensor is None else spec.pack(tensor), count])
        dist.broadcast(data, src=dist.get_process_group_ranks(self.group)[source], group=self.group)
        self.shared = data[-len(count) :].clone().view(torch.int64), source
        if spec.device.type == "cpu":
            self._require_same_step()
        return spec.unpack(data[: -len(count)].clone())

    def _require_same_step(self) -> None:
        if self.shared is None:
            return
        (theirs, source), self.shared = self.shared, None
        if theirs.item() != self.steps:
            self.failure = "steps out of step"
            raise TransportError(
                f"rank {self.ranks[0]}: got step {theirs.item()} of rank {source} in its own step {self.steps}, "
                "expected the same step on every rank: some rank skipped one. Call the step as often on every rank; "
                "end the process."
            )

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        value = torch.tensor([int(flag)], device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return bool(value.item())

    def tell(self, text: str) -> list[str]:
        """Return the texts of all ranks, this one's among them; every rank must call this."""
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(self.device)
        most = max(int(rows.item()) for rows in self._gathered(torch.tensor([len(data)], device=self.device)))
        mine = torch.full((most,), ord(" "), dtype=torch.uint8, device=self.device)
        mine[: len(data)] = data
        return [bytes(row.tolist()).decode() for row in self._gathered(mine)]

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(found, mine, group=self.group)
        return found

    def ahead(self) -> float:
        """By how many seconds this process's clock is ahead of the first rank's; every rank must call this."""
        self._require_whole("a timeline to put together")
        return clocks.ahead(self.group, self.device)

    def collect(self, rows: Tensor) -> list[Tensor]:
        """The rows of all ranks; every rank must call this."""
        count, columns = rows.shape
        size = dist.get_world_size(self.group)
        counts = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(size)]
        dist.all_gather(counts, torch.tensor([count], device=self.device), group=self.group)
        most = max(int(one.item()) for one in counts)
        mine = rows.new_zeros(most, columns, device=self.device)
        mine[:count] = rows
        found = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(found, mine, group=self.group)
        return [one[: int(length.item())].cpu() for one, length in zip(found, counts, strict=True)]
