# SPDX-License-Identifier: Apache-2.0
"""One rank per process: the communication and agreement of torch.distributed processes.

Messages travel over channels (`fpipe.network.channels`). Before any is sent, all ranks agree on what they are about to
do (`fpipe.network.agreement`), over a separate group (`fpipe.network.groups`).

If a call fails on one rank, the others hear of it (`fpipe.network.calls`), and the pipeline's own groups are broken, so
that nobody waits for it. The user's groups stay whole.

Runs when a pipeline is built and in every step, if ranks are separate processes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.errors import TransportError
from fpipe.network import measurements
from fpipe.network.calls import SharedCalls
from fpipe.network.channels import DistributedTransport
from fpipe.network.groups import GRACE, RESULTS, Control, Creator, choose_timeout, share_group
from fpipe.network.ranks import Fields, Ranks, claim_turn, require_at_rest, require_unclosed
from fpipe.network.waiting import Line, PendingWorks, Waitable, await_all, has_streams, reporting
from fpipe.runtime.contract import StageLike
from fpipe.runtime.executor import Execution, LinkedProgram, Milestone, Outcome
from fpipe.runtime.transport import Payload, Route, Transport
from fpipe.tensors.spec import Spec
from schedules import Action


def _begins_alone(program: LinkedProgram) -> bool:
    """Return whether a program begins with a forward that needs nothing of other ranks, for one of them."""
    first = program.instructions[:1]
    return any(one.action.kind in ("F", "C") and one.sends and not one.receives for one in first)


def _begin_after_first(program: LinkedProgram, begin: Callable[[], None]) -> LinkedProgram:
    """Return the program with a call of `begin` before anything that its first action makes is sent."""
    first, *others = program.instructions

    def handler(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
        values = first.handler(run, action, stage, arrived)
        begin()
        return values

    return program._replace(instructions=(first._replace(handler=handler), *others))


class DistributedRanks(Ranks):
    """One rank of a schedule: this process, in a `group` with as many processes as ranks.

    `replicas` lists the processes of every pipeline of the job; `everyone` lists those that agree on every call, which
    are the same, or those of a mesh around each. `creator` creates their groups.

    - `calls`: the calls of the pipeline's functions.
    - `results`, `everyone`: the groups over which results go to all ranks, and to all processes that agree.
    - `own_groups`: groups, besides those of channels, that nobody but pipelines uses.
    - `connection`: its end destroys the groups that no other pipeline uses, once nobody uses the ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        replicas: list[list[int]],
        everyone: list[list[int]],
        creator: Creator,
    ) -> None:
        self.group, self.device, self.stream = group, device, None
        self.ranks = (dist.get_rank(group),)
        self.processes = tuple(dist.get_process_group_ranks(group))
        self.ranks_of = {process: rank for one in replicas for rank, process in enumerate(one)}
        timeout = choose_timeout(group, device)
        (members,) = [one for one in everyone if dist.get_rank() in one]
        self.control = Control.of(members, everyone, timeout + GRACE, creator)
        self.places = tuple(self.control.processes.index(process) for process in self.processes)
        if has_streams(device):
            on_device = timeout + GRACE, dist.get_backend(group), device, creator
            self.results = share_group(RESULTS, [*self.processes], replicas, *on_device)
            self.everyone = share_group(RESULTS, members, everyone, *on_device)
        else:
            self.results = Control.of([*self.processes], replicas, timeout + GRACE, creator).group
            self.everyone = self.control.group
        self.own_groups = [*dict.fromkeys((self.control.group, self.results, self.everyone))]
        self.transport = DistributedTransport(group, device, replicas, timeout + GRACE)
        release = partial(self.transport.release, self.own_groups)
        own, transport = self.own_groups, self.transport
        self.calls = SharedCalls(self.control, timeout, release, lambda: [*own, *transport.groups], transport.trail)
        weakref.finalize(self, self.calls.lookout.stop)
        self.connection = weakref.finalize(self, self.transport.close)
        self.connection.atexit = False  # the process ends anyway

    @contextmanager
    def enter_call(self, call: str) -> Iterator[None]:
        """Return the context for a function that all ranks call; an error before they have agreed is raised on all.

        Raise `TransportError` if an earlier call failed midway, or if another thread is inside, and `RankError` if
        another rank fails, dies or falls silent.
        """
        with claim_turn(f"rank {self.control.rank}, {call}"):
            require_unclosed(self, call)
            require_at_rest(self, call)
            self._require_whole(call)
            with self.calls.enter(call):
                self._read()
                yield

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return not self.connection.alive

    def close(self) -> None:
        """Destroy the groups of the channels, and end the threads; the groups that pipelines share stay."""
        self.calls.lookout.stop()
        self.connection()

    def conclude(self) -> None:
        """Declare that no other rank waits for this one any more: what it raises now is its own affair."""
        self.calls.conclude()

    def _read(self) -> None:
        """Raise `TransportError` on all ranks if this one has used a wrong message; wait for no device."""
        if self.transport.trail is None:
            return
        try:
            self.transport.trail.read()
        except TransportError as error:
            self.calls.lookout.require_uncut()
            self.calls.refuse(error, "a message of the last step was another than expected")
            raise

    def agree(self, fields: Fields = tuple, about: str = "", note: int = 0) -> list[int]:
        """Raise `TransportError` on every rank unless all have called the same function with the same fields."""
        return self.calls.agree(fields, about, note)

    def post_agreement(self, fields: Fields, then: Callable[[], object]) -> None:
        """Post an agreement, whose answer is awaited before the program that is run next sends anything.

        It is awaited at once by the rank for which the others wait, by one that measures how long they wait, and on a
        mesh, where the forward of a stage may itself need other processes.
        """
        self.calls.post_agreement(fields, then)
        is_mesh = self.control.size > len(self.processes)
        if is_mesh or self.control.rank == self.control.home or self.calls.idle is None:
            self.settle()

    def settle(self) -> None:
        """Wait for the answer of an agreement that was posted, if one was; raise what `agree` raises."""
        self.calls.settle()

    @property
    def idle(self) -> float:  # type: ignore[override]
        """The seconds that the first agreement after `watch_idle` took here."""
        return self.calls.idle or 0.0

    def watch_idle(self) -> None:
        """Measure `idle` when this process next agrees with the others."""
        self.calls.idle = None

    def connect(self, channels: Iterable[Route]) -> None:
        """Set up channels; every rank must pass the same ones."""
        self.calls.begin()
        keep = self.transport.groups.append
        self.transport.setup(channels, Creator(self.calls.lookout.wait, self.control.group, keep))
        self.calls.decide()

    def forget_layouts(self) -> None:
        """Drop the cached layouts of messages; the next message of each kind makes its layout again."""
        self.transport.forget_layouts()

    def _require_whole(self, what: str) -> None:
        situation = self.calls.situation
        if not situation.failure and not self.control.is_alive:
            situation.fail("its process group was destroyed")
        if situation.failure:
            raise TransportError(
                f"rank {self.control.rank}, {what}: got a pipeline that failed midway ({situation.failure}), expected "
                "one whose ranks agree: messages would no longer match. Restart all processes from a checkpoint."
            )

    def follow(
        self, copies: Sequence[Callable[[int, Transport], Execution]]
    ) -> Generator[None, None, list[dict[int, Outcome]]]:
        """Run this process's rank, blocking on each handle that it yields; yield whenever it reaches a milestone."""
        (rank,), (make,) = self.ranks, copies
        situation, wait, trail = self.calls.situation, self.calls.lookout.wait, self.transport.trail
        execution = make(rank, self.transport)
        is_ahead = self.calls.pending is not None and _begins_alone(execution.program)
        if is_ahead:
            execution.program = _begin_after_first(execution.program, self.calls.begin)
        else:
            self.calls.begin()
        situation.execution = execution
        run = execution.run()
        try:
            while True:
                posted: Any = next(run)
                if isinstance(posted, Milestone):
                    yield
                    continue
                wait(posted)
                if trail is not None and (overdue := trail.find_overdue()) is not None:
                    wait(overdue)
                    overdue.compare()
        except StopIteration as stop:
            situation.execution = None
            return [{rank: stop.value}]

    def broadcast(self, tensor: Tensor | None, spec: Spec, source: int) -> Tensor:
        """Return rank `source`'s tensor on every rank."""
        return self._broadcast(self.results, tensor, spec, source)

    def tell(self, data: Tensor | None, size: int, source: int) -> Callable[[], Tensor]:
        """Send bytes from rank `source` to each other rank; return the function that waits for them."""
        wait = self.calls.lookout.wait
        line = Line(self.control.group, torch.device("cpu"), f"what comes of {self.calls.situation.call}", wait)
        others = [place for rank, place in enumerate(self.places) if rank not in self.ranks]
        found = torch.empty(size, dtype=torch.uint8) if data is None else data
        posted = [line.post_receive(found, self.places[source])] if data is None else []
        posted += [] if data is None else [line.post_send(data, place) for place in others]

        def take() -> Tensor:
            for one in posted:
                wait(one)
            return found

        return take

    def wait(self, posted: Waitable) -> None:
        """Wait for it, in sight of the thread that looks out for other ranks."""
        self.calls.lookout.wait(posted)

    def spread(self, tensor: Tensor | None, spec: Spec, member: int) -> Tensor:
        """Return on every process that agrees the tensor of number `member` among them."""
        return self._broadcast(self.everyone, tensor, spec, member)

    def exchange_text(self, text: str, about: str = "what the model asks about its batch") -> list[str]:
        """Return the texts of all ranks, including this one; every rank must call this."""
        return self.calls.exchange_text(text, about)

    def measure_clock_offset(self) -> float:
        """Return how many seconds this process's clock is ahead of the first one's; every process must call this."""
        with self._hold_line("its clock", self.control.group, torch.device("cpu")) as line:
            return measurements.measure_offset(line)

    def measure_transfers(self, sizes: Sequence[int]) -> Tensor:
        """Return how long messages take between any two ranks; every rank must call this with the same sizes."""
        self.agree(about="transfers to measure")
        with self._hold_line("a message to measure", self.results, self.device) as line:
            rows = measurements.measure_transfers(line, sizes)
        return torch.cat(self.gather_rows(rows))

    def measure_posting(self) -> float:
        """Return how long this process takes to post a send and a receive; every rank must call this."""
        self.agree(about="messages to post")
        with self._hold_line("a message to measure", self.results, self.device) as line:
            return measurements.measure_posting(line)

    @contextmanager
    def _hold_line(self, what: str, group: dist.ProcessGroup, device: torch.device) -> Iterator[Line]:
        """Return the context in which ranks exchange messages of their own; afterwards they decide on what follows."""
        self.calls.begin()
        yield Line(group, device, f"{what} in {self.calls.situation.call}", self.calls.lookout.wait)
        self.calls.decide()

    def gather_rows(self, rows: Tensor) -> list[Tensor]:
        """Return the rows of each rank, in rank order; every rank must call this."""
        count, columns = rows.shape
        counts = self.agree(about="rows to collect", note=count)
        mine = rows.new_zeros(max([*counts, 1]), columns)
        mine[:count] = rows
        return [one[:length] for one, length in zip(self.calls.gather(mine), counts, strict=True)]

    def gather_vectors(self, vector: Tensor) -> Tensor:
        """Return the vectors of all ranks as rows; every rank must call this, once all have agreed on the length."""
        self.calls.begin()
        mine = vector.contiguous().view(torch.uint8)  # not every backend knows every dtype
        rows = mine.new_empty(dist.get_world_size(self.everyone), len(mine))
        awaited = await_all(f"vectors of {self.calls.situation.call}", self.everyone)
        with reporting(awaited):
            work = dist.all_gather([*rows], mine, group=self.everyone, async_op=True)
        self.calls.lookout.wait(PendingWorks([work], awaited))
        self.conclude()
        return rows.view(vector.dtype)

    def _broadcast(self, group: dist.ProcessGroup, tensor: Tensor | None, spec: Spec, source: int) -> Tensor:
        """Return the tensor of number `source` in the group on all its processes."""
        mine = tensor if group.rank() == source else None  # else it may be the user's own, to receive into
        data = spec.buffer() if mine is None else spec.pack(mine)
        awaited = await_all(f"result of {self.calls.situation.call}", group)  # others may pass it on
        with reporting(awaited):
            sender = dist.get_process_group_ranks(group)[source]
            work = dist.broadcast(data, src=sender, group=group, async_op=True)
        self.calls.lookout.wait(PendingWorks([work], awaited))
        return spec.unpack(data)
