# SPDX-License-Identifier: Apache-2.0
"""Create process groups together with other processes, in sight of the lookout.

Problem. torch.distributed returns a Gloo group once all of its processes have asked for it. Until then nothing ends the
call but its timeout: no signal, and no death of another process.

Idea. Torch is called in a thread. The rank waits for the thread as for everything else: in sight of the lookout, which
can give it up. Meanwhile it looks whether a process that it waits for is gone. What comes after it was given up is
destroyed. Until then, the thread may hold the connection to the job's store, so that the next group gets another.

On an accelerator, torch is called without a thread: it may use the current device, which is each thread's own.

Runs when a pipeline is built, and when channels are set up; if ranks are separate processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import Enum, auto
from functools import partial
from threading import Event, Lock, Thread
from typing import Final, Generic, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fpipe.network.waiting import Awaited, BrokenWaitError, Waitable, destroy_groups, list_closed
from fpipe.tensors.torch_private import renew_store

Made = TypeVar("Made")
LOOK: Final = 0.5  # seconds between two looks at the connections
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
    """

    wait: Callable[[Waitable], None]
    group: dist.ProcessGroup

    def create(self, make: Callable[[], Made], what: str, members: Sequence[int], device: torch.device) -> Made:
        """Return what torch makes as soon as all `members`, by their numbers in the job, ask for it.

        Raise `BrokenWaitError` if one of them does not, and what torch raises if that is not their fault.
        """
        mine = dist.get_rank()
        others = tuple(member for member in members if member != mine)
        if any(thread.name == NAME for thread in threading.enumerate()):
            renew_store()
        if device.type != "cpu" or mine not in members or not others:
            return make()
        creation = Creation(make, Awaited(what, others, self.group))
        self.wait(creation)
        return cast("Made", creation.made)

    def create_group(
        self, members: list[int], timeout: timedelta, backend: str, device: torch.device, name: str | None = None
    ) -> dist.ProcessGroup:
        """Return what `dist.new_group` returns; see `create`. Every process of the job must call this."""
        make = partial(dist.new_group, members, timeout=timeout, backend=backend, group_desc=name)
        group: dist.ProcessGroup = self.create(make, f"process group of {members}", members, device)
        return group


def _discard(made: object) -> None:
    """Destroy a group, or those of a mesh, but the one of the whole job."""
    groups = made.get_all_groups() if isinstance(made, DeviceMesh) else [made]
    destroy_groups(cast("dist.ProcessGroup", one) for one in groups if one is not dist.group.WORLD)
