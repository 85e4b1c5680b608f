# SPDX-License-Identifier: Apache-2.0
"""The network of a simulated world: process groups with Gloo's manners, and the store.

A send meets a receive of the same tag in order, and then takes a drawn time; both are done when it arrives, after those
before it. Nothing is copied before, and a receiver finds garbage in its buffers until then. If a process dies, if it
destroys a group, or if a wait times out, its connections close: what waits on them fails, as does what is posted later.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.common.world.device import Device, DeviceGroup, Fabric
from tests.common.world.fibers import Process, Signal, World

HALF_AN_HOUR = timedelta(minutes=30)  # the timeout of groups of a mesh, whatever that of the job


class Work:
    """A posted transfer between two processes of a room."""

    def __init__(self, room: Room, ends: tuple[int, int], tag: Any, data: Tensor) -> None:
        self.room, self.ends, self.tag, self.data = room, ends, tag, data
        self.signal, self.is_failed = Signal(room.network.world), False

    def finish(self, failed: bool = False) -> None:
        """Let it be done, or fail."""
        if not self.signal.is_given:
            self.is_failed = failed
            self.signal.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is done; raise `RuntimeError` if it fails or takes too long, which closes connections."""
        world = self.room.network.world
        world.step("wait")
        if not self.signal.wait((timeout or self.room.timeout).total_seconds()):
            self.room.close(world.process.rank)
            raise RuntimeError("timed out")
        if self.is_failed:
            raise RuntimeError("connection closed by peer")
        return True


class Works:
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all."""
        return all(work.wait(timeout) for work in self.works)


class Room:
    """What all processes of one group share: messages on their way, and closed connections."""

    def __init__(self, network: Network, ranks: tuple[int, ...], timeout: timedelta) -> None:
        self.network, self.ranks, self.timeout = network, ranks, timeout
        self.closed = set[frozenset[int]]()
        self.present, self.is_complete = set[int](), Signal(network.world)
        self.pending: dict[Any, tuple[deque[Work], deque[Work]]] = defaultdict(lambda: (deque(), deque()))
        self.works: list[Work] = []
        self.arrivals = defaultdict[Any, float](float)

    def post(self, source: int, target: int, tag: Any, data: Tensor, is_send: bool) -> Work:
        """Post one end of a transfer; raise `RuntimeError` if the connection is closed."""
        self.network.world.step("post")
        if frozenset((source, target)) in self.closed:
            raise RuntimeError("connection closed by peer")
        work = Work(self, (source, target), tag, data)
        self.works = [one for one in self.works if not one.signal.is_given] + [work]
        sends, receives = pair = self.pending[source, target, tag]
        pair[not is_send].append(work)
        if not is_send:
            data.view(-1).view(torch.uint8).fill_(0xFF)
        if sends and receives:
            self._carry(sends.popleft(), receives.popleft())
        return work

    def _carry(self, sent: Work, received: Work) -> None:
        """Let a message arrive after a drawn time, but not before earlier ones of its channel."""
        channel, world = (*sent.ends, sent.tag), self.network.world
        delay = self.network.delay(sent.ends, sent.tag)
        if delay is None:
            return
        time = max(world.now + delay, self.arrivals[channel])
        self.arrivals[channel] = time
        world.at(time, lambda: self._arrive(sent, received))

    def _arrive(self, sent: Work, received: Work) -> None:
        if sent.signal.is_given or received.signal.is_given:
            return
        here, there = (one.data.view(-1).view(torch.uint8) for one in (sent, received))
        if len(here) != len(there):  # Gloo aborts the process that receives
            self.network.aborted.append(received.ends[1])
            self.network.world.kill(self.network.world.processes[received.ends[1]])
            return
        there.copy_(here)
        self.network.arrived(received)
        sent.finish()
        received.finish()

    def gather(self, rank: int) -> None:
        """Wait until all processes are here; raise `RuntimeError` if that takes too long."""
        self.network.world.step("rendezvous")
        self.present.add(rank)
        if self.present == {*self.ranks}:
            self.is_complete.set()
        if not self.is_complete.wait(self.timeout.total_seconds()):
            raise RuntimeError("Wait timeout")

    def close(self, rank: int) -> None:
        """Close all connections of a process in this room, at both ends."""
        for other in self.ranks:
            self.closed.add(frozenset((rank, other)))
        for work in self.works:
            if rank in work.ends:
                work.finish(failed=True)


class Group:
    """One process's end of a process group."""

    def __init__(self, room: Room, process: Process, group_desc: str) -> None:
        self.room, self.process, self.group_desc = room, process, group_desc
        self.collectives = 0
        self.number = len(process.open)

    def __hash__(self) -> int:
        """Return a number that is the same in every replay: sets of groups are walked in its order."""
        return self.number

    def rank(self) -> int:
        """Return the number of this process in the group."""
        return self.room.ranks.index(self.process.rank)

    def size(self) -> int:
        """Return the number of processes."""
        return len(self.room.ranks)

    def send(self, tensors: Sequence[Tensor], target: int, tag: Any) -> Work:
        """Post a send to number `target` of the group."""
        (data,) = tensors
        return self.room.post(self.process.rank, self.room.ranks[target], tag, data, True)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: Any) -> Work:
        """Post a receive from number `source` of the group."""
        (data,) = tensors
        return self.room.post(self.room.ranks[source], self.process.rank, tag, data, False)

    def get_group_store(self) -> Store:
        """Return the store."""
        return self.room.network.open_store()


class Mesh(DeviceMesh):
    """One process's view of a mesh; those of the job are in order.

    DTensors on it are torch's own. What they do without communication they do here, too.
    """

    def __init__(self, rank: int, grid: Tensor, groups: dict[str, Group]) -> None:
        super().__init__("cpu", grid, mesh_dim_names=tuple(groups), _init_backend=False, _rank=rank)
        self.groups, self.parts = groups, dict[tuple[str, ...], Mesh]()

    @classmethod
    def join(cls, network: Network, sizes: Sequence[int], names: Sequence[str]) -> Mesh:
        """Return the running process's view of a new mesh of all processes, which all create."""
        rank, grid = network.world.process.rank, torch.arange(network.size).reshape(*sizes)
        groups = {}
        for dim, name in enumerate(names):
            rows = grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist()
            made = [network.create(row, HALF_AN_HOUR, f"mesh_{name}", network.backend) for row in rows]
            groups[name] = next(group for group in made if group is not None)
        return cls(rank, grid, groups)

    def __hash__(self) -> int:
        """Return the number of one of its groups."""
        return hash(next(iter(self.groups.values())))

    def __eq__(self, other: object) -> bool:
        """Return whether it is this one: what torch caches must not lead to a mesh of another process."""
        return self is other

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """Return the group along a dimension."""
        return self.groups[mesh_dim] if isinstance(mesh_dim, str) else [*self.groups.values()][mesh_dim or 0]

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return the number of this process along a dimension."""
        rank: int = self.get_group(mesh_dim).rank()
        return rank

    def __getitem__(self, names: str | tuple[str, ...]) -> Mesh:
        """Return the part of the mesh along some dimensions."""
        names = (names,) if isinstance(names, str) else names
        if names not in self.parts:
            at = tuple(
                slice(None) if name in names else k
                for name, k in zip(self.groups, self.get_coordinate() or (), strict=True)
            )
            self.parts[names] = Mesh(self._rank, self.mesh[at], {name: self.groups[name] for name in names})
        return self.parts[names]


class Store:
    """A connection to the store of a job, which process 0 may keep, or nobody who can fail."""

    def __init__(self, network: Network) -> None:
        self.network, self.values = network, network.values

    def clone(self) -> Store:
        """Return another connection."""
        return self

    def _reach(self) -> None:
        """Wait for the store; raise `RuntimeError` if it is gone."""
        world = self.network.world
        world.step("store")
        keeper = world.processes[0] if self.network.is_kept else None
        while keeper is not None and keeper.is_stopped and not keeper.is_dead:
            world.sleep(0.1)
        if keeper is not None and keeper.is_dead:
            raise RuntimeError("connection to the store was reset")

    def add(self, key: str, amount: int) -> int:
        """Add to a number; return it."""
        self._reach()
        self.values[key] = self.values.get(key, 0) + amount
        return self.values[key]

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        self._reach()
        self.values[key] = value

    def get(self, key: str) -> bytes:
        """Return a value, which must be there."""
        self._reach()
        return self.values[key].encode()

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of them are there."""
        self._reach()
        return all(key in self.values for key in keys)


class Manners(NamedTuple):
    """How the devices of a world behave, where NCCL leaves it open.

    - `is_bound`: groups are made at once, as splits of the job, instead of at their first messages.
    - `is_eager`: a send is over before its receive. `has_gloo`: groups have Gloo beside NCCL.
    """

    is_bound: bool
    is_eager: bool
    has_gloo: bool


class Network:
    """All rooms and the store of a world.

    - `manners`: those of its devices; `None` if processes compute on the host. `devices`: the device of each process.
    - `delay(ends, tag)` returns how long a message takes, or `None` if it is lost; `arrived(work)` is told of each.
    - `is_kept`: whether process 0 keeps the store; `aborted`: who was sent a message of the wrong size.
    """

    def __init__(
        self,
        world: World,
        size: int,
        timeout: timedelta,
        is_kept: bool,
        delay: Callable[[tuple[int, int], Any], float | None],
        manners: Manners | None = None,
    ) -> None:
        self.world, self.size, self.timeout, self.is_kept, self.delay = world, size, timeout, is_kept, delay
        self.arrived: Callable[[Work], None] = lambda work: None
        self.values: dict[str, Any] = {}
        self.rooms: dict[Any, Room] = {}
        self.aborted: list[int] = []
        self.manners, self.fabrics = manners, dict[Any, Fabric]()
        world.processes = [Process(rank) for rank in range(size)]
        world.on_death.append(self._close_all)
        self.devices = {process: Device(world, process) for process in world.processes}
        self.whole = Fabric(self, tuple(range(size)))
        self.all = {process: self._begin(process) for process in world.processes}

    @property
    def backend(self) -> str:
        """The backend of the job's group."""
        if self.manners is None:
            return "gloo"
        return "cpu:gloo,cuda:nccl" if self.manners.has_gloo else "nccl"

    def _begin(self, process: Process) -> Group | DeviceGroup:
        """Return a process's end of the group of the job, whose collectives go over Gloo, if it has that."""
        if self.manners is None or self.manners.has_gloo:
            return self._enter(process, -1, self.whole.ranks, self.timeout, "")
        group = DeviceGroup(self.whole, self.devices[process], self.timeout, "")
        process.open.append(group)
        return group

    def open_store(self) -> Store:
        """Return a connection to the store."""
        return Store(self)

    def _close_all(self, process: Process) -> None:
        for room in self.rooms.values():
            if process.rank in room.ranks:
                room.close(process.rank)

    def _enter(self, process: Process, number: int, ranks: tuple[int, ...], timeout: timedelta, desc: str) -> Group:
        room = self._find_room(number, ranks, timeout)
        for other in ranks:
            if self.world.processes[other].is_dead:
                room.close(other)
        process.open.append(group := Group(room, process, desc))
        return group

    def _find_room(self, number: int, ranks: tuple[int, ...], timeout: timedelta) -> Room:
        return self.rooms.setdefault((number, ranks), Room(self, ranks, timeout))

    def create(self, ranks: Sequence[int], timeout: timedelta | None, desc: str, backend: str) -> Any:
        """Return the running process's end of a new group, which all processes create, and its members wait for."""
        process = self.world.process
        process.groups += 1
        number, seconds = process.groups, (timeout or self.timeout).total_seconds()
        is_on_device = self.manners is not None and backend != "gloo"
        if self.manners is not None and is_on_device and self.manners.is_bound:
            self.whole.meet(("split", number), process.rank, self.whole.ranks, seconds)
        if process.rank not in ranks:
            return None
        place = number, tuple(sorted(ranks)), timeout or self.timeout
        if backend != "nccl":
            self._find_room(*place).gather(process.rank)
        if not is_on_device:
            return self._enter(process, *place, desc)
        gloo = self._enter(process, *place, desc) if self.manners is not None and self.manners.has_gloo else None
        if gloo is not None:
            process.open.remove(gloo)
        fabric = self.fabrics.setdefault(place[:2], Fabric(self, place[1]))
        process.open.append(group := DeviceGroup(fabric, self.devices[process], place[2], desc, gloo))
        return group
