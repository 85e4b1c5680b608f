# SPDX-License-Identifier: Apache-2.0
"""Create process groups together with other processes, in sight of the lookout.

Problem. torch.distributed returns a Gloo group once all of its processes have asked for it. Until then nothing ends the
call but its timeout: no signal, and no death of another process.

Idea. Torch is called in a thread. The rank waits for the thread as for everything else: in sight of the lookout, which
can give it up. Meanwhile it looks whether a process that it waits for is gone. A thread that was given up destroys the
group that it may still get.

Runs when a pipeline is built, and when channels are set up; if ranks are separate processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from threading import Event, Thread
from typing import Final, Generic, TypeAlias, TypeVar, cast

import torch.distributed as dist

from fpipe.runtime.transport.waiting import Awaited, BrokenWaitError, Waitable, destroy_groups, list_closed

Made = TypeVar("Made")
Wait: TypeAlias = Callable[[Waitable], None]
"""Waits for something, in sight of the lookout."""
LOOK: Final = 0.5  # seconds between two looks at the connections


class Creation(Generic[Made]):
    """Something that torch makes as soon as all processes ask for it, and that this one waits for."""

    def __init__(self, make: Callable[[], Made], awaited: Awaited) -> None:
        self.make, self.awaited = make, awaited
        self.made: Made | None = None
        self.error: BaseException | None = None
        self.is_over = self.is_given_up = False
        self.woken = Event()
        Thread(target=self._run, name="fpipe creation", daemon=True).start()

    def wait(self) -> None:
        """Block until it is made; raise `BrokenWaitError` if it is given up, or if a process that it needs is gone.

        Raise what torch raised if none is gone.
        """
        try:
            while not self.woken.wait(LOOK) and not list_closed(self.awaited):
                pass
        finally:
            self.is_given_up = not self.is_over
        if self.error is not None and not self._is_anyone_gone():
            raise self.error
        if self.error is not None or not self.is_over:
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
        self.is_over = True
        self.woken.set()
        if self.is_given_up and self.made is not None:
            destroy_groups([cast("dist.ProcessGroup", self.made)])


def create(make: Callable[[], Made], what: str, members: Sequence[int], wait: Wait) -> Made:
    """Return what torch makes as soon as all `members`, by their numbers in the job, ask for it.

    Raise `BrokenWaitError` if one of them does not, and what torch raises if that is not their fault.
    """
    group, mine = dist.group.WORLD, dist.get_rank()
    assert group is not None, "torch.distributed is initialized"
    others = tuple(member for member in members if member != mine)
    creation = Creation(make, Awaited(what, others, group))
    wait(creation)
    return cast("Made", creation.made)


def create_group(
    members: list[int], wait: Wait, timeout: timedelta, backend: str, group_desc: str | None = None
) -> dist.ProcessGroup:
    """Return what `dist.new_group` returns; see `create`. Every process of the job must call this."""
    make = partial(dist.new_group, members, timeout=timeout, backend=backend, group_desc=group_desc)
    if backend != "gloo" or members == [dist.get_rank()] or dist.get_rank() not in members:
        return cast("dist.ProcessGroup", make())  # nobody waits here
    group: dist.ProcessGroup = create(make, f"process group of {members}", members, wait)
    return group
