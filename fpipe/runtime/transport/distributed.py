# SPDX-License-Identifier: Apache-2.0
"""One rank per process: the communication and agreement of torch.distributed processes.

Messages travel over channels (`fpipe.runtime.transport.channels`). Before any is sent, all ranks agree on what they are
about to do (`fpipe.runtime.transport.agreement`), over a separate group (`fpipe.runtime.transport.control`).

If a call fails midway on one rank, it tells the others (`fpipe.runtime.transport.board`) and breaks the pipeline's own
groups, so that nobody waits for it; theirs raise `RankError` then. The user's groups stay whole.

Runs when a pipeline is built and in every step, if ranks are separate processes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.errors import Cause, RankError, TransportError
from fpipe.runtime.executor import Execution, Outcome
from fpipe.runtime.ranks import Fields, require_unclosed
from fpipe.runtime.transport import clocks, speeds
from fpipe.runtime.transport.agreement import agree, announce_refusal, exchange_texts
from fpipe.runtime.transport.board import Board
from fpipe.runtime.transport.channels import DistributedTransport
from fpipe.runtime.transport.control import GRACE, Control, choose_timeout, find_mesh_group, list_replicas
from fpipe.runtime.transport.interface import Route, Transport
from fpipe.runtime.transport.lookout import Lookout
from fpipe.runtime.transport.waiting import (
    Awaited,
    BrokenWaitError,
    PendingWorks,
    await_all,
    destroy_groups,
    find_closed,
    reporting,
)
from fpipe.runtime.turns import claim_turn
from fpipe.tensors.spec import Spec
from fpipe.torch_private import process_groups

DIED: Final = "it died, or left: its connection ended, and it left no word. Look at the last lines that it printed"
MOST_SAID: Final = 2000


class DistributedRanks:
    """One rank of a schedule: this process, in a `group` with as many processes as ranks.

    `members` are the processes that agree on every call: those of the group, or of a mesh around it.

    - `calls`: the number of calls of the pipeline's functions so far; `call`: the name and number of the current one.
    - `failure`: why later calls are refused, or `None`; `deciding`: whether the others wait for this rank to agree.
    - `is_midway`: whether the others may wait for what this rank computes.
    - `results`, `everyone`: the groups over which results go to all ranks, and to all processes that agree.
    - `own_groups`: groups, besides those of channels, that nobody but pipelines uses.
    - `connection`: its end destroys the groups that no other pipeline uses, once nobody uses the ranks.
    """

    def __init__(self, ranks: int, group: dist.ProcessGroup, device: torch.device, members: Sequence[int] = ()) -> None:
        size = dist.get_world_size(group)
        if size != ranks:
            raise TransportError(
                f"got a process group of {size} processes, expected one process for each of the schedule's {ranks} "
                f"ranks. Start {ranks} processes, or build the schedule for ranks={size}."
            )
        self.group, self.device, before = group, device, [*process_groups()]
        self.ranks = (dist.get_rank(group),)
        self.processes = tuple(dist.get_process_group_ranks(group))
        self.failure: str | None = None
        self.calls, self.call, self.deciding, self.is_midway = 0, "", False, False
        replicas = list_replicas(list(self.processes), device)
        timeout = choose_timeout(group, device)
        everyone = list_replicas(list(members), device) if members else replicas
        self.control = Control.of(list(members or self.processes), everyone, timeout + GRACE)
        self.places = tuple(self.control.processes.index(process) for process in self.processes)
        self.own_groups = [self.control.group]
        if device.type == "cpu":
            self.results = Control.of(list(self.processes), replicas, timeout + GRACE).group
            self.everyone = self.control.group
            self.own_groups.append(self.results)
        else:
            self.results, self.everyone = group, find_mesh_group(self.control, group, device)
        self.transport = DistributedTransport(group, device, replicas, timeout + GRACE)
        release = partial(self.transport.release, self.own_groups)
        self.lookout = Lookout(Board.of(self.control.group), self.control.processes, timeout, release)
        weakref.finalize(self, self.lookout.stop)
        made = [group for group in (self.everyone,) if group not in {*before, self.results, self.control.group}]
        self.connection = weakref.finalize(self, self.transport.close, made)
        self.connection.atexit = False  # the process ends anyway

    @contextmanager
    def enter_call(self, call: str) -> Iterator[None]:
        """Return the context for a function that all ranks call; an error before they have agreed is raised on all.

        Raise `TransportError` if an earlier call failed midway, or if another thread is inside, and `RankError` if
        another rank fails, dies or falls silent.
        """
        with claim_turn(f"rank {self.control.rank}, {call}"):
            require_unclosed(self, call)
            self._require_whole(call)
            self.calls += 1
            self.call, self.deciding, self.is_midway = f"{call} (call {self.calls})", True, False
            with self.lookout.on_duty(self.call):
                try:
                    self._read()
                    yield
                except BrokenWaitError as error:
                    raise self._learn(error.awaited) from error.__cause__
                except BaseException as error:
                    self._share(error)
                    if isinstance(error, SystemExit) and not error.code:
                        raise self._refuse_exit() from error
                    raise
                finally:
                    self.deciding = False

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return not self.connection.alive

    def close(self) -> None:
        """Destroy the groups of the channels, and end the threads; the groups that pipelines share stay."""
        self.lookout.stop()
        self.connection()

    def _share(self, error: BaseException) -> None:
        """Let the other ranks know of an error, if they wait for this one."""
        if self.failure is None and (self.is_midway or (self.deciding and not isinstance(error, Exception))):
            self._tell(error)
        elif self.failure is None and self.deciding:
            with suppress(RuntimeError):  # no other rank is left
                announce_refusal(self._gather, self.call, error)

    def _tell(self, error: BaseException) -> None:
        """Tell the other ranks of an error midway in a call, and end their waits for this one."""
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        mine = Cause(self.control.rank, self.lookout.place, said[:MOST_SAID])
        first = self.lookout.board.publish(mine)
        self._fail(said)
        order = "the first failure; the other ranks were told" if first == mine else f"after the first failure: {first}"
        error.add_note(f"rank {mine.rank}, {mine.place}: {order}")

    def _learn(self, awaited: Awaited) -> RankError:
        """Return the error of this rank, for which something did not come; find out why, and tell the others."""
        lookout, place = self.lookout, self.lookout.place
        board = lookout.board
        cause = board.read() or board.lost_cause
        if cause is None:
            lost = lookout.ranks_of(awaited._replace(peers=tuple(find_closed(awaited))))
            cause = board.publish(Cause(lost[0] if lost else None, f"before {awaited.what}", DIED))
        self._fail(str(cause))
        return RankError(self.control.rank, place, lookout.name(awaited), cause)

    def _fail(self, why: str) -> None:
        """Refuse later calls, end all waits in this pipeline, and wait until all ranks that are left know why."""
        self.failure = why
        self.lookout.release(None)
        self.lookout.board.linger()
        with self.lookout.asking:  # the thread may be about to break them, too
            destroy_groups([*self.own_groups, *self.transport.groups])
            self.lookout.call = ""

    def _refuse_exit(self) -> TransportError:
        return TransportError(
            f"rank {self.control.rank}, {self.call}: got sys.exit() in the middle of a call, expected its end: other "
            "ranks wait for this one. Exit between calls, on every rank; or with a code other than 0, if this failed."
        )

    def conclude(self) -> None:
        """Declare that no other rank waits for this one any more: what it raises now is its own affair."""
        self.is_midway = False

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
            self.deciding = self.is_midway = False  # the others raise it too
            raise

    def _gather(self, mine: Tensor) -> Sequence[Tensor]:
        return self.control.gather(mine, self.lookout.wait, self.call)

    def connect(self, channels: Iterable[Route]) -> None:
        """Set up channels; every rank must pass the same ones."""
        self.deciding, self.is_midway = False, True
        self.transport.setup(channels, self.lookout.wait)
        self.deciding, self.is_midway = True, False

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
        self.deciding, self.is_midway = False, True
        self.lookout.execution = execution(rank, self.transport)
        run, wait = self.lookout.execution.run(), self.lookout.wait
        try:
            while True:
                posted: Any = next(run)
                wait(posted)
        except StopIteration as stop:
            self.lookout.execution = None
            return [{rank: stop.value}]

    def broadcast(self, tensor: Tensor | None, spec: Spec, source: int) -> Tensor:
        """Return rank `source`'s tensor on every rank."""
        return self._broadcast(self.results, tensor, spec, source)

    def spread(self, tensor: Tensor | None, spec: Spec, member: int) -> Tensor:
        """Return on every process that agrees the tensor of number `member` among them."""
        return self._broadcast(self.everyone, tensor, spec, member)

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
        self.deciding, self.is_midway = False, True
        mine = vector.contiguous().view(torch.uint8)  # not every backend knows every dtype
        rows = mine.new_empty(dist.get_world_size(self.everyone), len(mine))
        awaited = await_all(f"vectors of {self.call}", self.everyone)
        with reporting(awaited):
            work = dist.all_gather([*rows], mine, group=self.everyone, async_op=True)
        self.lookout.wait(PendingWorks([work], awaited))
        self.conclude()
        return rows.view(vector.dtype)

    def _broadcast(self, group: dist.ProcessGroup, tensor: Tensor | None, spec: Spec, source: int) -> Tensor:
        """Return the tensor of number `source` in the group on all its processes."""
        data = spec.buffer() if tensor is None else spec.pack(tensor)
        awaited = await_all(f"result of {self.call}", group)  # others may pass it on
        with reporting(awaited):
            sender = dist.get_process_group_ranks(group)[source]
            work = dist.broadcast(data, src=sender, group=group, async_op=True)
        self.lookout.wait(PendingWorks([work], awaited))
        return spec.unpack(data)
