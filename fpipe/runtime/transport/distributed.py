# SPDX-License-Identifier: Apache-2.0
"""One rank per process: the communication and agreement of torch.distributed processes.

Messages travel over channels (`fpipe.runtime.transport.channels`). Before any is sent, all ranks agree on what they are
about to do (`fpipe.runtime.transport.agreement`), over a separate group (`fpipe.runtime.transport.control`).

Runs when a pipeline is built and in every step, if ranks are separate processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.errors import TransportError
from fpipe.runtime.executor import Execution, Outcome
from fpipe.runtime.ranks import Fields
from fpipe.runtime.transport import clocks, speeds
from fpipe.runtime.transport.agreement import agree, announce_refusal, exchange_texts
from fpipe.runtime.transport.channels import DistributedTransport
from fpipe.runtime.transport.control import Control
from fpipe.runtime.transport.interface import Route, Transport
from fpipe.runtime.turns import claim_turn
from fpipe.tensors.spec import Spec
from fpipe.torch_private import timeout_of


class DistributedRanks:
    """One rank of a schedule: this process, in a `group` with as many processes as ranks.

    `members` are the processes that agree on every call: those of the group, or of a mesh around it.

    - `calls`: the number of calls of the pipeline's functions so far; `call`: the name and number of the current one.
    - `failure`: why later calls are refused, or `None`; `deciding`: whether the others wait for this rank to agree.
    """

    def __init__(self, ranks: int, group: dist.ProcessGroup, device: torch.device, members: Sequence[int] = ()) -> None:
        size = dist.get_world_size(group)
        if size != ranks:
            raise TransportError(
                f"got a process group of {size} processes, expected one process for each of the schedule's {ranks} "
                f"ranks. Start {ranks} processes, or build the schedule for ranks={size}."
            )
        self.group, self.device = group, device
        self.ranks = (dist.get_rank(group),)
        self.processes = tuple(dist.get_process_group_ranks(group))
        self.failure: str | None = None
        self.calls, self.call, self.deciding = 0, "", False
        replicas = _replicas(dist.get_process_group_ranks(group), device)
        timeout = timeout_of(group, device)
        if members:
            self.control = Control.of(list(members), _replicas(list(members), device), timeout)
        else:
            self.control = Control.of(dist.get_process_group_ranks(group), replicas, timeout)
        everyone = dist.get_process_group_ranks(self.control.group)
        self.places = tuple(everyone.index(process) for process in self.processes)
        self.members = _group_of(self.control, group, device)
        self.transport = DistributedTransport(group, device, replicas)

    @contextmanager
    def enter_call(self, call: str) -> Iterator[None]:
        """Return the context for a function that all ranks call; an error before they have agreed is raised on all.

        Raise `TransportError` if an earlier call failed midway, or if another thread is inside.
        """
        with claim_turn(f"rank {self.control.rank}, {call}"):
            self._require_whole(call)
            self.calls += 1
            self.call, self.deciding = f"{call} (call {self.calls})", True
            try:
                self._read()
                yield
            except Exception as error:
                if self.deciding and self.failure is None:
                    with suppress(RuntimeError):  # no other rank is left
                        announce_refusal(self._gather, self.call, error)
                raise
            finally:
                self.deciding = False

    def _read(self) -> None:
        """Raise `TransportError` on all ranks if this one used a wrong message in the last step."""
        try:
            self.transport.read()
        except TransportError as error:
            with suppress(RuntimeError):
                announce_refusal(self._gather, self.call, error)
            self.failure = "a message of the last step was another than expected"
            raise

    def agree(self, fields: Fields = tuple, about: str = "", note: int = 0) -> list[int]:
        """Raise `TransportError` on every rank unless all have called the same function with the same fields.

        `about` distinguishes several agreements within one call. Return the `note` that each rank passed.
        """
        call = f"{self.call}, {about}" if about else self.call
        try:
            return agree(self.control.rank, self._gather, call, fields(), note)
        except TransportError:
            self.deciding = False  # the others raise it too
            raise

    def _gather(self, mine: Tensor) -> Sequence[Tensor]:
        try:
            return self.control.gather(mine)
        except RuntimeError as error:
            self.failure = "no answer from the other ranks"
            raise TransportError(
                f"rank {self.control.rank}, {self.call}: got no answer from the other ranks ({error}), expected them "
                "to make the same call. Call the same functions on every rank. Look at the last output of the others: "
                "one of them may have crashed."
            ) from error

    def connect(self, channels: Iterable[Route]) -> None:
        """Set up channels; every rank must pass the same ones."""
        try:
            self.transport.setup(channels)
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise

    def forget_layouts(self) -> None:
        """Drop the cached layouts of messages; the next message of each kind makes its layout again."""
        self.transport.forget_layouts()

    def _require_whole(self, what: str) -> None:
        if self.failure is None and not self.control.is_alive:
            self.failure = "its process group was destroyed"
        if self.failure is not None:
            raise TransportError(
                f"rank {self.control.rank}, {what}: got a pipeline that failed midway ({self.failure}), expected one "
                "whose ranks are in step: messages would no longer match. Restart all processes from a checkpoint."
            )

    def run(self, copies: Sequence[Callable[[int, Transport], Execution]]) -> list[dict[int, Outcome]]:
        """Run this process's rank to completion, blocking on each handle that it yields; return its outcome."""
        (rank,), (execution,) = self.ranks, copies
        self.deciding = False
        run = execution(rank, self.transport).run()
        try:
            while True:
                posted: Any = next(run)
                posted.wait()
        except StopIteration as stop:
            return [{rank: stop.value}]
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise

    def broadcast(self, tensor: Tensor | None, spec: Spec, source: int) -> Tensor:
        """Return rank `source`'s tensor on every rank."""
        return _broadcast(self.group, tensor, spec, source)

    def spread(self, tensor: Tensor | None, spec: Spec, member: int) -> Tensor:
        """Return on every process that agrees the tensor of number `member` among them."""
        return _broadcast(self.members, tensor, spec, member)

    def agree_if_any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return any(self.agree(about="a question to all ranks", note=int(flag)))

    def exchange_text(self, text: str, about: str = "what the model asks about its batch") -> list[str]:
        """Return the texts of all ranks, including this one; every rank must call this."""
        self.agree(about=about)
        return exchange_texts(self._gather, text)

    def measure_clock_offset(self) -> float:
        """Return how many seconds this process's clock is ahead of the first rank's; every rank must call this."""
        return clocks.measure_offset(self.group, self.device)

    def measure_transfers(self, sizes: Sequence[int]) -> Tensor:
        """Return how long messages take between any two ranks; every rank must call this with the same sizes."""
        self.agree(about="transfers to measure")
        return torch.cat(self.gather_rows(speeds.measure_transfers(self.group, self.device, sizes)))

    def measure_posting(self) -> float:
        """Return how long this process takes to post a send and a receive; every rank must call this."""
        self.agree(about="messages to post")
        return speeds.measure_posting(self.group, self.device)

    def gather_rows(self, rows: Tensor) -> list[Tensor]:
        """Return the rows of each rank, in rank order; every rank must call this."""
        count, columns = rows.shape
        counts = self.agree(about="rows to collect", note=count)
        mine = rows.new_zeros(max([*counts, 1]), columns)
        mine[:count] = rows
        return [one[:length] for one, length in zip(self._gather(mine), counts, strict=True)]

    def gather_vectors(self, vector: Tensor) -> Tensor:
        """Return the vectors of all ranks as rows; every rank must call this, once all have agreed on the length."""
        self.deciding = False
        mine = vector.contiguous().view(torch.uint8)  # not every backend knows every dtype
        rows = mine.new_empty(dist.get_world_size(self.members), len(mine))
        try:
            dist.all_gather([*rows], mine, group=self.members)
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise
        return rows.view(vector.dtype)


def _broadcast(group: dist.ProcessGroup, tensor: Tensor | None, spec: Spec, source: int) -> Tensor:
    """Return the tensor of number `source` in the group on all its processes."""
    data = spec.buffer() if tensor is None else spec.pack(tensor)
    dist.broadcast(data, src=dist.get_process_group_ranks(group)[source], group=group)
    return spec.unpack(data)


def _group_of(control: Control, group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return the group, on the device's backend, of all processes that agree; `group` if those are its own."""
    if control.size == dist.get_world_size(group):
        return group
    if control.size == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None, "torch.distributed is initialized"
        return world
    found: dist.ProcessGroup | None = None
    mine = torch.tensor([*dist.get_process_group_ranks(control.group)], device=device)
    for members in _replicas(mine.tolist(), device):
        made = dist.new_group(members, timeout=timeout_of(group, device), backend=dist.get_backend(group))
        found = made if dist.get_rank() in members else found
    assert found is not None, "this process is a member"
    return found


def _replicas(world: list[int], device: torch.device) -> list[list[int]]:
    """Return the processes of every pipeline in the job, in the same order everywhere; `world` is this pipeline's."""
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(world)], device=device))
    if len({size.item() for size in sizes}) > 1:
        raise TransportError(
            f"group: got groups of {sorted({int(size.item()) for size in sizes})} processes, expected the same size "
            "for every pipeline of the job. Build all pipelines at the same time, over groups of the same size."
        )
    mine = torch.tensor(world, device=device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    lists = sorted({tuple(other.tolist()): other.tolist() for other in found}.values())
    if sorted(rank for ranks in lists for rank in ranks) != list(range(dist.get_world_size())):
        raise TransportError(
            f"group: got groups of the processes {lists}, expected each process in exactly one of them. Pass every "
            "process the group, or the mesh, that it belongs to."
        )
    return lists
