# SPDX-License-Identifier: Apache-2.0
"""Wait for works of torch.distributed, and say what was awaited if they fail.

A wait on Gloo can't be interrupted: not by a signal, and not by a timeout of its own, which breaks all connections of
the group. So another thread ends it, by breaking the group on purpose (`break_group`).

Runs in every step, if ranks are separate processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.errors import TransportError
from fpipe.tensors.torch_private import destroy_group, has_gloo, process_groups

NEVER_SENT: Final = 2**20
"""A tag on which nothing is sent."""
AT_ONCE: Final = timedelta(milliseconds=1)


def has_streams(device: torch.device) -> bool:
    """Return whether a device waits for messages in the place of the host, which goes on: an accelerator does."""
    return device.type != "cpu"


def is_on_host(group: dist.ProcessGroup) -> bool:
    """Return whether hosts wait for what comes over a group: over Gloo, which notices if a process is gone."""
    return dist.get_backend(group) == "gloo"


class Awaited(NamedTuple):
    """The thing that a rank waits for.

    - `what`: what `peers` do then, such as an action; `peers`: their numbers in the job.
    - `group`: the process group over which they do it.
    """

    what: str
    peers: tuple[int, ...]
    group: dist.ProcessGroup


class Waitable(Protocol):
    """Something that a rank waits for."""

    @property
    def awaited(self) -> Awaited:
        """The thing that is awaited, and who does it."""

    def wait(self) -> None:
        """Block until it is there; raise `BrokenWaitError` if it will not come."""

    def give_up(self) -> None:
        """Let `wait` raise, from another thread."""


class BrokenWaitError(TransportError):
    """A connection ended while this rank waited, or before it could post what it wanted to send or receive.

    Why is found out by the function that all ranks call, which raises `RankError` in its place.
    """

    def __init__(self, awaited: Awaited) -> None:
        super().__init__(f"got a connection that ended, expected {awaited.what} from the processes {awaited.peers}")
        self.awaited = awaited


class PendingWorks:
    """Works that are waited for together."""

    def __init__(self, works: Sequence[dist.Work], awaited: Awaited) -> None:
        self.works, self.awaited = works, awaited

    def wait(self) -> None:
        """Block until all works are done; raise `BrokenWaitError` if they can't be."""
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise BrokenWaitError(self.awaited) from error
        self.works = ()

    def give_up(self) -> None:
        """Break the group."""
        break_group(self.awaited.group)


class Line(NamedTuple):
    """Messages between any two processes of a group, one at a time.

    - `device`: where their tensors are; `what`: what they are, for errors; `wait` waits for them.
    """

    group: dist.ProcessGroup
    device: torch.device
    what: str
    wait: Callable[[Waitable], None]

    def send(self, tensor: Tensor, other: int) -> None:
        """Send a tensor to number `other` of the group, and wait until it is sent."""
        self.wait(self.post_send(tensor, other))

    def receive(self, tensor: Tensor, other: int) -> None:
        """Receive a tensor from number `other` of the group, and wait until it is there."""
        self.wait(self.post_receive(tensor, other))

    def post_send(self, tensor: Tensor, other: int) -> PendingWorks:
        """Post a send, and return it."""
        awaited = self._awaited(other)
        with reporting(awaited):
            return PendingWorks(self._post(dist.isend, tensor, other), awaited)

    def post_receive(self, tensor: Tensor, other: int) -> PendingWorks:
        """Post a receive, and return it."""
        awaited = self._awaited(other)
        with reporting(awaited):
            return PendingWorks(self._post(dist.irecv, tensor, other), awaited)

    def _post(self, kind: Callable[..., Any], tensor: Tensor, other: int) -> Sequence[dist.Work]:
        """Post a batch of one: over NCCL, a message by itself would get a communicator of its two processes."""
        if has_streams(self.device):
            return dist.batch_isend_irecv([dist.P2POp(kind, tensor, group=self.group, group_peer=other)])
        post = self.group.send if kind is dist.isend else self.group.recv
        return [post([tensor], other, 0)]

    def _awaited(self, other: int) -> Awaited:
        return Awaited(self.what, (dist.get_global_rank(self.group, other),), self.group)


def await_all(what: str, group: dist.ProcessGroup) -> Awaited:
    """Return what a collective waits for: that all other processes of the group take part."""
    mine = dist.get_rank()
    return Awaited(what, tuple(peer for peer in dist.get_process_group_ranks(group) if peer != mine), group)


@contextmanager
def reporting(awaited: Awaited) -> Iterator[None]:
    """Raise `BrokenWaitError` in place of the transport's own error."""
    try:
        yield
    except RuntimeError as error:
        raise BrokenWaitError(awaited) from error


def break_group(group: dist.ProcessGroup) -> None:
    """Make everything fail that waits on the group, in this process and at those connected to it; return at once.

    Gloo has no function for it. It does this when a wait times out, so one is made to: on the first connection that is
    still open.
    """
    if not is_on_host(group):
        group.abort()
    if not has_gloo(group):
        return
    byte, mine = torch.empty(1, dtype=torch.uint8), group.rank()
    for peer in range(group.size()):
        with suppress(RuntimeError):
            if peer != mine:
                group.recv([byte], peer, NEVER_SENT).wait(AT_ONCE)


def destroy_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy those of the groups that are not destroyed yet, in this process; return at once if they are broken."""
    for group in dict.fromkeys(groups):
        if group in {*process_groups()}:
            destroy_group(group)


def list_closed(awaited: Awaited) -> list[int]:
    """Return which of the peers have closed their connection to this process, by their numbers in the job.

    Of processes without Gloo this is not known.
    """
    if not has_gloo(awaited.group):
        return []
    closed, byte = [], torch.empty(1, dtype=torch.uint8)
    for peer in awaited.peers:
        try:
            awaited.group.recv([byte], dist.get_group_rank(awaited.group, peer), NEVER_SENT)
        except RuntimeError:
            closed.append(peer)
    return closed
