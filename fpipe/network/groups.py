# SPDX-License-Identifier: Apache-2.0
"""Create process groups together with other processes, in sight of the lookout.

Problem. torch.distributed returns a Gloo group once all of its processes have asked for it. Until then nothing ends the
call but its timeout: no signal, and no death of another process.

Idea. Torch is called in a thread. The rank waits for the thread as for everything else: in sight of the lookout, which
can give it up. Meanwhile it looks whether a process that it waits for is gone. What comes after it was given up is
destroyed. Until then, the thread may hold the connection to the job's store, so that the next group gets another.

On an accelerator, creation takes more: a group may be a split of the whole job, in which all processes take part, and
its first message connects its ends. Both block the host, so a thread does both. To destroy a group that was not broken
waits there for its messages and for its other ends: that is a thread's, too.

Ranks agree over a group of their own, `Control`, which gathers small host tensors from every rank to all. It is always
a Gloo group, whichever backend carries the rest: the host reads its messages, which must neither wait for a device nor
collide with the user's own collectives.

Runs when a pipeline is built, and when channels are set up; ranks agree in every step. All of it if ranks are separate
processes.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import Enum, auto
from functools import partial
from threading import Event, Lock, Thread
from typing import Final, Generic, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fpipe.network.agreement import AgreementRow
from fpipe.network.devices import run_on
from fpipe.network.waiting import (
    Awaited,
    BrokenWaitError,
    PendingWorks,
    Waitable,
    await_all,
    break_group,
    destroy_groups,
    has_streams,
    list_closed,
    reporting,
)
from fpipe.tensors.torch_private import process_groups, renew_store, timeout_of

Made = TypeVar("Made")
LOOK: Final = 0.5  # seconds between two looks at the connections
GLIMPSE: Final = 0.01  # and between two at a device
NAME: Final = "fpipe creation"


class Fate(Enum):
    """The fate of something that torch makes: `MADE`, or `GIVEN_UP` by who waits for it, whichever comes first.

    An error counts as made: it is there to be raised. What is made after it was given up is discarded.
    """

    OPEN = auto()
    MADE = auto()
    GIVEN_UP = auto()


class Creation(Generic[Made]):
    """Something that torch makes as soon as all processes ask for it, and that this one waits for."""

    def __init__(self, make: Callable[[], Made], awaited: Awaited) -> None:
        self.make, self.awaited = make, awaited
        self.made: Made | None = None
        self.error: BaseException | None = None
        self.fate = Fate.OPEN
        self.woken, self.deciding = Event(), Lock()
        Thread(target=self._run, name=NAME, daemon=True).start()

    def wait(self) -> None:
        """Block until it is made; raise `BrokenWaitError` if it is given up, or if a process that it needs is gone.

        Raise what torch raised if none is gone.
        """
        is_wanted = False
        try:
            while not self.woken.wait(LOOK) and not list_closed(self.awaited):
                pass
            is_wanted = True
        finally:
            with self.deciding:
                is_late = self.fate is Fate.MADE and not is_wanted
                if not (self.fate is Fate.MADE and is_wanted):
                    self.fate = Fate.GIVEN_UP
            if is_late:
                _discard(self.made)
        if self.error is not None and not self._is_anyone_gone():
            raise self.error
        if self.error is not None or self.fate is Fate.GIVEN_UP:
            raise BrokenWaitError(self.awaited) from self.error

    def give_up(self) -> None:
        """End the wait, from another thread."""
        self.woken.set()

    def _is_anyone_gone(self) -> bool:
        """Return whether a process that is needed is gone; torch may have noticed before its connection ended here."""
        if isinstance(self.error, dist.DistNetworkError):
            return True  # the one that keeps the store
        return bool(list_closed(self.awaited)) or Event().wait(LOOK) or bool(list_closed(self.awaited))

    def _run(self) -> None:
        try:
            self.made = self.make()
        except BaseException as error:
            self.error = error
        with self.deciding:
            is_late = self.fate is Fate.GIVEN_UP
            self.fate = Fate.GIVEN_UP if is_late else Fate.MADE
        self.woken.set()
        if is_late:
            _discard(self.made)


class Creator(NamedTuple):
    """The way in which a rank creates what other processes create, too.

    - `wait`: waits in sight of the lookout.
    - `group`: a group of all these processes, whose connections end if one of them is gone.
    - `keep`: is passed each group that this process is in, once it is made: if anything fails later, it is broken.
    """

    wait: Callable[[Waitable], None]
    group: dist.ProcessGroup
    keep: Callable[[dist.ProcessGroup], None]

    def create(self, make: Callable[[], Made], what: str, members: Sequence[int], device: torch.device) -> Made:
        """Return what torch makes as soon as all `members`, by their numbers in the job, ask for it.

        Raise `BrokenWaitError` if one of them does not, and what torch raises if that is not their fault.
        """
        mine = dist.get_rank()
        others = tuple(member for member in members if member != mine)
        if any(thread.name == NAME for thread in threading.enumerate()):
            renew_store()
        if mine not in members or not others:
            return make()
        creation = Creation(partial(run_on, device, make), Awaited(what, others, self.group))
        self.wait(creation)
        return cast("Made", creation.made)

    def create_group(
        self, members: list[int], timeout: timedelta, backend: str, device: torch.device, name: str | None = None
    ) -> dist.ProcessGroup:
        """Return what `dist.new_group` returns; see `create`. Every process of the job must call this."""
        make = partial(dist.new_group, members, timeout=timeout, backend=backend, group_desc=name)
        taking_part = dist.get_process_group_ranks(self.group) if has_streams(device) else members
        group: dist.ProcessGroup = self.create(make, f"process group of {members}", taking_part, device)
        if dist.get_rank() in members:
            self.keep(group)
        return group

    def post_first(
        self,
        post: Callable[[], dist.Work],
        what: str,
        members: Sequence[int],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Post the first message of a group, which connects those `members` on an accelerator, and wait for it."""
        mine = dist.get_rank()
        awaited = Awaited(what, tuple(member for member in members if member != mine), group)
        with reporting(awaited):
            work = self.create(post, what, members, device) if has_streams(device) else post()
        self.wait(PendingWorks([work], awaited))


def _discard(made: object) -> None:
    """Destroy a group, or those of a mesh, but the one of the whole job; their other ends may never be made."""
    groups = {*(made.get_all_groups() if isinstance(made, DeviceMesh) else [made])} & {*process_groups()}
    for group in groups - {dist.group.WORLD}:
        break_group(group)
        destroy_groups([group])


def retire_groups(groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Destroy groups that work, in the order in which all processes have created them; return at once.

    On an accelerator, each waits for its other ends, in a thread: the order is the same everywhere, so none waits for
    ever if all processes do this.
    """
    if has_streams(device) and groups:
        Thread(target=run_on, args=(device, partial(destroy_groups, groups)), name="fpipe end", daemon=True).start()
    else:
        destroy_groups(groups)


CONTROL, RESULTS = "control group", "group of results"
GRACE: Final = timedelta(minutes=1)
"""How much later than a rank its groups give up, so that the rank has time to find out why."""


class Slate:
    """The memory in which ranks compare their rows; it is used again in every agreement.

    Python writes and reads it as bytes, torch sends and receives it as tensors that are made once: right after a step,
    when the processor's caches are full of that, each operator takes some 50 us.

    - `numbers`, `mine`: the row of this rank. `all`, `table`, `rows`: those of all. `are_same`, `answer`: one byte.
    """

    def __init__(self, size: int) -> None:
        self.numbers, self.all, self.are_same = array("q", 3 * [0]), bytearray(size * 3 * 8), bytearray(1)
        self.mine = torch.frombuffer(self.numbers, dtype=torch.int64)
        self.table = torch.frombuffer(self.all, dtype=torch.int64).view(size, 3)
        self.rows = self.table.unbind(0)
        self.answer = torch.frombuffer(self.are_same, dtype=torch.uint8)

    def write(self, row: AgreementRow) -> None:
        """Write the row of this rank."""
        self.numbers[:] = array("q", row)

    def compare(self, rank: int) -> None:
        """Compare the rows of all others, which have come, with that of this rank, and write the answer."""
        mine = self.numbers.tobytes()
        self.all[rank * len(mine) : (rank + 1) * len(mine)] = mine
        self.are_same[0] = self.all == mine * len(self.rows)


class Control(NamedTuple):
    """The group over which ranks agree, this process's rank in it, and the numbers in the job of all its processes.

    Rows go to the last rank, and an answer comes back: two messages in sequence. A ring takes as many as there are
    ranks, each in one of Gloo's threads. The last rank of most schedules has nothing to do until the others have begun.
    """

    group: dist.ProcessGroup
    rank: int
    processes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self.processes)

    @property
    def home(self) -> int:
        """The rank that compares the rows of all."""
        return self.size - 1

    @classmethod
    def of(cls, world: list[int], replicas: list[list[int]], timeout: timedelta, creator: Creator) -> Control:
        """Return the group of the processes `world`, one of `replicas`; every process of the job must call this.

        Raise `BrokenWaitError` if one does not. Pipelines on the same processes share the group, so that ranks that
        call different pipelines notice.
        """
        group = share_group(CONTROL, world, replicas, timeout, "gloo", torch.device("cpu"), creator)
        return cls(group, world.index(dist.get_rank()), tuple(world))

    @classmethod
    def find(cls, world: list[int], replicas: list[list[int]]) -> Control | None:
        """Return the group of these processes, if there is one."""
        group = _find_group(CONTROL, world, replicas)
        return None if group is None else cls(group, world.index(dist.get_rank()), tuple(world))

    @property
    def is_alive(self) -> bool:
        """True if the group has not been destroyed."""
        return self.group in process_groups()

    def gather(self, mine: Tensor, wait: Callable[[Waitable], None], call: str) -> Sequence[Tensor]:
        """Return the tensor that each rank passes, in rank order; all must have the same shape and dtype.

        `wait` waits for the others; `call` is what they are to do, for errors.
        """
        table = torch.empty(self.size, *mine.shape, dtype=mine.dtype)
        rows, is_home = table.unbind(0), self.rank == self.home
        for one in self._post_row(mine, rows if is_home else [table], call):
            wait(one)
        if is_home:
            rows[self.home].copy_(mine)
            self._tell(table, wait, call)
        return rows

    def post(self, slate: Slate, wait: Callable[[Waitable], None], call: str) -> Callable[[], Sequence[Tensor] | int]:
        """Post the row on a slate; return the function that returns the number of ranks if all have posted the same.

        Otherwise, that returns the row of each. It must be called before anything else is posted over the group. Each
        rank sends and receives a row and a byte, however many there are, unless rows differ.
        """
        is_home = self.rank == self.home
        posted = self._post_row(slate.mine, slate.rows if is_home else [slate.answer], call)

        def finish() -> Sequence[Tensor] | int:
            for one in posted:
                wait(one)
            if is_home:
                slate.compare(self.rank)
                self._tell(slate.answer, wait, call)
            if slate.are_same[0]:
                return self.size
            if is_home:
                self._tell(slate.table, wait, call)
            else:
                wait(self._post(self.home, [(self.group.recv, slate.table)], call))
            return slate.rows

        return finish

    def _post_row(self, mine: Tensor, answers: Sequence[Tensor], call: str) -> list[PendingWorks]:
        """Send this rank's row to the last, and receive the answer; on the last, receive the rows of all others."""
        if self.rank < self.home:
            return [self._post(self.home, [(self.group.recv, answers[0]), (self.group.send, mine)], call)]
        return [self._post(other, [(self.group.recv, answers[other])], call) for other in range(self.home)]

    def _tell(self, answer: Tensor, wait: Callable[[Waitable], None], call: str) -> None:
        """Send the answer to all other ranks; for the last."""
        for one in [self._post(other, [(self.group.send, answer)], call) for other in range(self.home)]:
            wait(one)

    def _post(
        self, other: int, transfers: Sequence[tuple[Callable[..., dist.Work], Tensor]], call: str
    ) -> PendingWorks:
        """Post transfers with another rank."""
        there = self._awaited(other, call)
        try:
            return PendingWorks([post([tensor], other, 0) for post, tensor in transfers][::-1], there)
        except RuntimeError as error:
            raise BrokenWaitError(there) from error

    def _awaited(self, other: int, call: str) -> Awaited:
        return Awaited(f"agreement on {call}", (self.processes[other],), self.group)


class UnbreakableWorks(PendingWorks):
    """Works over the user's group, which stays whole."""

    def give_up(self) -> None:
        """Do nothing: the wait ends as the description of this module says."""


class WatchedWorks(PendingWorks):
    """Works of a device over the user's group: the host looks now and then whether they are done, until it gives up."""

    def __init__(self, works: Sequence[dist.Work], awaited: Awaited) -> None:
        super().__init__(works, awaited)
        self.over = Event()

    def wait(self) -> None:
        """Block until all works are done; raise `BrokenWaitError` once they are given up."""
        while not all(work.is_completed() for work in self.works):
            if self.over.wait(GLIMPSE):
                raise BrokenWaitError(self.awaited)
        super().wait()

    def give_up(self) -> None:
        """End the wait; the group stays whole."""
        self.over.set()


class World(NamedTuple):
    """The default group of the user, over which processes agree until the job has a control group."""

    group: dist.ProcessGroup
    device: torch.device

    @property
    def rank(self) -> int:
        """The number of this process."""
        return dist.get_rank()

    @property
    def processes(self) -> tuple[int, ...]:
        """The numbers of all processes of the job."""
        return tuple(range(dist.get_world_size()))

    def gather(self, mine: Tensor, wait: Callable[[Waitable], None], call: str) -> Sequence[Tensor]:
        """Return the tensor that each process passes, in order; all must have the same shape and dtype."""
        sent = mine.to(self.device)
        rows, awaited = [torch.empty_like(sent) for _ in self.processes], await_all(f"agreement on {call}", self.group)
        post = partial(dist.all_gather, rows, sent, async_op=True)
        if has_streams(self.device):  # the first one connects all processes
            wait(posting := Creation(partial(run_on, self.device, post), awaited))
            wait(WatchedWorks([cast("dist.Work", posting.made)], awaited))
        else:
            with reporting(awaited):
                works = [post()]
            wait(UnbreakableWorks(works, awaited))
        return [row.cpu() for row in rows]

    def post(self, slate: Slate, wait: Callable[[Waitable], None], call: str) -> Callable[[], Sequence[Tensor] | int]:
        """Return the function that returns the number of processes if all have posted the same.

        Otherwise, that returns the row of each.
        """
        mine = slate.mine.clone()  # a gathering that was given up may still read it

        def finish() -> Sequence[Tensor] | int:
            rows = self.gather(mine, wait, call)
            return len(rows) if all(torch.equal(row, mine) for row in rows) else rows

        return finish


def choose_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return how long a rank may keep others waiting: the group's timeout.

    A device mesh makes its groups without the timeout that the job was initialized with; of those, it is the job's.
    """
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialized"
    return timeout_of(world if group.group_desc.startswith("mesh_") else group, device)


def share_group(
    kind: str,
    world: list[int],
    replicas: list[list[int]],
    timeout: timedelta,
    backend: str,
    device: torch.device,
    creator: Creator,
) -> dist.ProcessGroup:
    """Return the group of the processes `world`, one of `replicas`, that pipelines on them share for one `kind` of use.

    Every process of the job must call this. The group is looked up by its description in torch's own table; it is not
    the user's, so that it may be broken.
    """
    known = _find_group(kind, world, replicas)
    if known is not None:
        return known
    made = [creator.create_group(one, timeout, backend, device, _describe(kind, one, replicas)) for one in replicas]
    group = made[replicas.index(world)]
    connect_all(group, kind, device, creator)
    return group


def connect_all(group: dist.ProcessGroup, kind: str, device: torch.device, creator: Creator) -> None:
    """Let the first collective of a group on an accelerator, which connects its processes, come now: all are here."""
    if has_streams(device):
        members, byte = dist.get_process_group_ranks(group), torch.zeros(1, dtype=torch.uint8, device=device)
        post = partial(dist.broadcast, byte, src=members[0], group=group, async_op=True)
        creator.post_first(post, f"first byte of a {kind}", members, group, device)


def _find_group(kind: str, world: list[int], replicas: list[list[int]]) -> dist.ProcessGroup | None:
    name = _describe(kind, world, replicas)
    return next((known for known in process_groups() if known.group_desc == name), None)


def _describe(kind: str, world: list[int], replicas: list[list[int]]) -> str:
    return f"{kind} of {world} in {replicas}"
