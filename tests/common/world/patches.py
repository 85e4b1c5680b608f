# SPDX-License-Identifier: Apache-2.0
"""What fpipe uses of torch.distributed, of threads, of the clock and of files, replaced by a simulated world."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed
from torch import Tensor
from torch.distributed.tensor import DTensor

from fpipe.checkpoints import manifest, save
from fpipe.meshes import arguments, exchange, holdings
from fpipe.network import board, channels, devices, distributed, groups, job, lookout, ranks, standing, waiting
from fpipe.network.trail import Trail
from fpipe.pipelines import builder
from fpipe.runtime import executor
from fpipe.streams import execution
from tests.common.world.device import DeviceGroup
from tests.common.world.fibers import Lock, Queue, Signal, World
from tests.common.world.network import Group, Mesh, Network, Works


class Distributed:
    """The part of `torch.distributed` that fpipe uses; the rest is the real one's."""

    def __init__(self, network: Network) -> None:
        self.network, self.world = network, network.world

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    @property
    def group(self) -> Any:
        return SimpleNamespace(WORLD=self._default)

    @property
    def _default(self) -> Group:
        return self.network.all[self.world.process]

    def is_initialized(self) -> bool:
        return True

    def get_rank(self, group: Group | None = None) -> int:
        return (group or self._default).rank()

    def get_world_size(self, group: Group | None = None) -> int:
        return (group or self._default).size()

    def get_process_group_ranks(self, group: Group) -> list[int]:
        return list(group.room.ranks)

    def get_group_rank(self, group: Group, rank: int) -> int:
        return group.room.ranks.index(rank)

    def get_global_rank(self, group: Group, rank: int) -> int:
        return group.room.ranks[rank]

    def get_backend(self, group: Any) -> str:
        return self.network.backend if group is self._default or isinstance(group, DeviceGroup) else "gloo"

    def new_group(
        self, ranks: Sequence[int], timeout: Any = None, backend: str = "gloo", group_desc: str | None = None
    ) -> Any:
        return self.network.create(ranks, timeout, group_desc or "", backend)

    def destroy_process_group(self, group: Group) -> None:
        self.world.step("destroy")
        if isinstance(group, DeviceGroup):
            group.destroy()
        group.process.open.remove(group)
        gloo = group.gloo if isinstance(group, DeviceGroup) else group
        if gloo is not None:
            gloo.room.close(group.process.rank)

    def all_gather(self, rows: list[Tensor], mine: Tensor, group: Group | None = None, async_op: bool = False) -> Any:
        group = group or self._default
        group.collectives += 1
        tag, me, works = ("all_gather", group.collectives), group.rank(), []
        if isinstance(group, DeviceGroup):
            rows[me].copy_(mine)
            others = [other for other in range(len(rows)) if other != me]
            sends = [group.part(mine, other, tag, True) for other in others]
            work = group.post([*sends, *(group.part(rows[other], other, tag, False) for other in others)])
            return work if async_op else work.wait()
        for other, row in enumerate(rows):
            if other == me:
                row.copy_(mine)
            else:
                works += [group.recv([row], other, tag), group.send([mine], other, tag)]
        return Works(works) if async_op else Works(works).wait()

    def P2POp(self, kind: str, data: Tensor, group: Group, group_peer: int) -> Any:
        return kind, data, group, group_peer

    isend, irecv = "send", "recv"

    def batch_isend_irecv(self, operations: Sequence[Any]) -> list[Any]:
        _, _, whole, _ = operations[0]
        if isinstance(whole, DeviceGroup):
            return [whole.post([whole.part(data, peer, "p2p", kind == "send") for kind, data, _, peer in operations])]
        return [getattr(group, kind)([data], peer, "p2p") for kind, data, group, peer in operations]

    def gather_flat(self, rows: Tensor, mine: Tensor, group: Group) -> Works:
        return self.all_gather([*rows.view(group.size(), -1)], mine, group, async_op=True)

    def whole_tensor(self, tensor: Tensor) -> Tensor:
        """Return the whole of a tensor sharded along one dimension of a mesh, which all its holders ask for."""
        if not isinstance(tensor, DTensor):
            return tensor
        group, mine = tensor.device_mesh.get_group(), tensor.to_local()
        sizes = [len(rows) for rows in torch.empty(tensor.shape, device="meta").chunk(group.size())]
        sizes += [0] * (group.size() - len(sizes))
        parts = [mine.new_empty(size, *mine.shape[1:]) for size in sizes]
        self.all_gather(parts, mine.contiguous(), group)
        return torch.cat(parts)

    def init_device_mesh(self, device: str, sizes: Sequence[int], mesh_dim_names: Sequence[str]) -> Mesh:
        return Mesh.join(self.network, sizes, mesh_dim_names)

    def broadcast(self, data: Tensor, src: int, group: Group, async_op: bool = True) -> Works:
        group.collectives += 1
        tag, me, root = ("broadcast", group.collectives), group.rank(), group.room.ranks.index(src)
        if isinstance(group, DeviceGroup):
            others = [other for other in range(group.size()) if other != me] if me == root else [root]
            return Works([group.post([group.part(data, other, tag, me == root) for other in others])])
        if me == root:
            return Works([group.send([data], other, tag) for other in range(group.size()) if other != me])
        return Works([group.recv([data], root, tag)])


class FiberThread:
    """A `threading.Thread` that is a fiber of the process that starts it."""

    def __init__(
        self, world: World, target: Any, args: Sequence[Any] = (), name: str = "", daemon: bool = True
    ) -> None:
        self.world, self.name = world, name
        self.target = lambda: target(*args)

    def start(self) -> None:
        self.world.start(self.world.process, self.name, self.target)

    def join(self, timeout: float) -> None:
        """Do nothing: the world ends its fibers itself."""


class Bell:
    """The end of a socket pair that nobody writes to."""

    def __init__(self, world: World) -> None:
        self.world, self.patience = world, 0.0

    def settimeout(self, seconds: float) -> None:
        self.patience = seconds

    def recv(self, size: int) -> bytes:
        self.world.sleep(self.patience)
        raise TimeoutError

    def setblocking(self, blocks: bool) -> None:
        pass

    def close(self) -> None:
        pass


class Writer:
    """A `ThreadPoolExecutor` that runs its task at once; a fault may strike before."""

    def __init__(self, world: World) -> None:
        self.world = world

    def submit(self, task: Any, *args: Any) -> Future[Any]:
        self.world.step("write")
        done: Future[Any] = Future()
        try:
            done.set_result(task(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def shutdown(self, wait: bool) -> None:
        pass


class Files:
    """The module `os`, in which a fault may strike before a file is durable, which is before and after its renaming."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, number: int) -> None:
        self.world.step("fsync")


PLAYED = torch.device("cpu", 0)
"""The device that a simulated process plays, in contrast to its host, which has no number."""


def has_streams(device: torch.device) -> bool:
    """Return whether it is the played device."""
    return device.index is not None


def has_gloo(group: Any) -> bool:
    """Return whether the host's bytes go over a group."""
    return not isinstance(group, DeviceGroup) or group.gloo is not None


def device_types(group: Any) -> list[torch.device]:
    """Return the devices whose tensors a group moves."""
    return [torch.device("cpu") if has_gloo(group) else PLAYED]


def users() -> list[Any]:
    """Return the modules of fpipe that know `torch.distributed` as `dist`."""
    found = [module for name, module in sys.modules.items() if name.startswith("fpipe.")]
    return [module for module in found if vars(module).get("dist") is torch.distributed]


@contextmanager
def inhabit(network: Network) -> Iterator[None]:
    """Return the context in which fpipe's ranks live in the world of a network."""
    world = network.world
    one = Distributed(network)

    def make_trail(device: torch.device) -> Trail | None:
        return Trail(network.devices[world.process].copy) if has_streams(device) else None

    def on_device(method: Any) -> Any:
        """Return a method of a job with the played device in place of the host's."""

        def call(*given: Any) -> Any:
            played = [PLAYED if isinstance(value, torch.device) else value for value in given]
            return method(*(given if network.manners is None else played))

        return call

    replaced: list[tuple[Any, str, Any]] = [(module, "dist", one) for module in users()]
    replaced += [(ranks, "TURN", mock.MagicMock())]
    for module in (board, groups, lookout, standing):
        replaced += [
            (module, "Thread", lambda **options: FiberThread(world, **options)),
            (module, "Lock", lambda: Lock(world)),
        ]
    replaced += [
        (board, "Event", lambda: Signal(world)),
        (groups, "Event", lambda: Signal(world)),
        (waiting, "has_gloo", has_gloo),
        *((module, "has_streams", has_streams) for module in (distributed, groups, job)),
        *((job.DistributedJob, name, on_device(vars(job.DistributedJob)[name])) for name in ("join", "create")),
        (channels, "make_trail", make_trail),
        (groups, "renew_store", lambda: None),
        (board, "SimpleQueue", lambda: Queue(world)),
        (board, "time", SimpleNamespace(monotonic=lambda: world.now, sleep=world.sleep)),
        (lookout, "monotonic", lambda: world.now),
        (lookout, "socket", SimpleNamespace(socketpair=lambda: (Bell(world), Bell(world)), socket=object)),
        *((module, "process_groups", lambda: list(world.process.open)) for module in (groups, lookout, waiting)),
        (waiting, "destroy_group", one.destroy_process_group),
        (groups, "timeout_of", lambda group, device: group.room.timeout),
        (job, "timeout_of", lambda group, device: group.room.timeout),
        (job, "count_groups", lambda: world.process.groups),
        (job, "name_groups_from", lambda count: setattr(world.process, "groups", count)),
        *((module, "device_types", device_types) for module in (devices, job)),
        (arguments, "init_device_mesh", one.init_device_mesh),
        (holdings, "get_rank", one.get_rank),
        (holdings, "get_process_group_ranks", one.get_process_group_ranks),
        (save, "whole_tensor", one.whole_tensor),
        (exchange, "post_all_gather", one.gather_flat),
        (builder.Builder, "_captures", stepped(world, "capture", builder.Builder._captures)),
        (save, "ThreadPoolExecutor", lambda **options: Writer(world)),
        (manifest, "os", Files(world)),
        (executor.Execution, "__init__", observe(world, executor.Execution.__init__)),
        (execution.EndlessExecution, "__init__", observe_pieces(world, execution.EndlessExecution.__init__)),
    ]
    environment = {"TORCHELASTIC_USE_AGENT_STORE": str(not network.is_kept)}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        for target, name, value in replaced:
            if not hasattr(target, name):
                continue  # not every module uses every kind of lock
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def stepped(world: World, what: str, function: Any) -> Any:
    """Return a function whose calls are steps of their process."""

    def step(*arguments: Any) -> Any:
        world.step(what)
        return function(*arguments)

    return step


def observe(world: World, init: Any) -> Any:
    """Return the initializer of executions whose actions are steps of their process."""

    def observed(run: Any, rank: int, program: Any, *others: Any) -> None:
        init(run, rank, watch(world, program), *others)

    return observed


def observe_pieces(world: World, init: Any) -> Any:
    """Return the same for executions of programs that come in pieces."""

    def observed(run: Any, rank: int, pieces: Any, *others: Any) -> None:
        init(run, rank, (watch(world, piece) for piece in pieces), *others)

    return observed


def watch(world: World, program: Any) -> Any:
    """Return a program whose actions are steps of the process that runs them."""

    def watched(handler: Any) -> Any:
        def handle(run: Any, action: Any, stage: Any, arrived: Any) -> Any:
            process = world.process
            process.place = str(action)
            process.computed += 1
            world.step("compute")
            return handler(run, action, stage, arrived)

        return handle

    rows = tuple(row._replace(handler=watched(row.handler)) for row in program.instructions)
    return program._replace(instructions=rows)
