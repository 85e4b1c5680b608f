# SPDX-License-Identifier: Apache-2.0
"""A device over Gloo that has NCCL's manners where failures are concerned.

Waiting for a transfer returns at once: the device waits. The host waits later, for all that was posted, wherever it
needs data. The device does not notice that a peer has failed, and waits for it until this process breaks a group of its
own; then it goes on, with garbage.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Thread
from unittest.mock import patch

from torch import Tensor

from fpipe.network import channels, lookout, trail, waiting
from fpipe.network.groups import CONTROL
from fpipe.network.trail import Trail


class LateDevice:
    """The device of this process: what it has not passed, and whether a group was broken."""

    def __init__(self) -> None:
        self.threads: list[Thread] = []
        self.is_broken = False

    def post(self, works: Sequence[object], data: object = None) -> None:
        """Let it wait for these works, which need the data until then."""
        self.threads = [thread for thread in self.threads if thread.is_alive()]
        for work in works:
            self.threads.append(Thread(target=self._pass, args=(work, data), daemon=True))
            self.threads[-1].start()

    def _pass(self, work, data) -> None:
        try:
            work.wait()
        except RuntimeError:
            while not self.is_broken:  # Gloo has noticed; a device does not
                time.sleep(0.01)

    def query(self) -> bool:
        """Return whether it has passed all that was posted."""
        return self.is_broken or not any(thread.is_alive() for thread in self.threads)

    def synchronize(self) -> None:
        """Block until it has."""
        while not self.query():
            time.sleep(0.01)

    def copy(self, headers: Sequence[Tensor]) -> tuple[Sequence[Tensor], LateDevice]:
        """Return the headers, to be read later, and an event, which is reached a little late: when all is."""
        return headers, self


@contextmanager
def late_device() -> Iterator[LateDevice]:
    """Inside, pipelines are built, and run, on such a device."""
    device, take, breaks = LateDevice(), channels.DistributedHandle.take, waiting.break_group

    def wait(handle) -> None:
        device.post(handle.works, handle.data)
        handle.works = ()

    def take_late(handle):
        device.synchronize()
        return take(handle)

    def break_group(group) -> None:
        device.is_broken = True
        breaks(group)

    with ExitStack() as stack:
        enter = stack.enter_context
        enter(patch.object(channels, "make_trail", lambda _: Trail(device.copy)))
        enter(patch.object(channels.DistributedHandle, "wait", wait))
        enter(patch.object(channels.DistributedHandle, "take", take_late))
        for module in (lookout, trail):
            enter(patch.object(module, "is_on_host", lambda group: group.group_desc.startswith(CONTROL)))
        for module in (channels, trail, waiting):
            enter(patch.object(module, "break_group", break_group))
        yield device


@contextmanager
def late_results(pipe, device: LateDevice) -> Iterator[None]:
    """Inside, the results of a pipeline are broadcast on the device, too."""
    wait = waiting.PendingWorks.wait

    def late(works) -> None:
        on_host = works.awaited.what.startswith("agreement")  # on a CPU, over the same group as results
        if on_host or works.awaited.group is not pipe.ranks.results:
            return wait(works)
        return device.post(works.works)

    with patch.object(waiting.PendingWorks, "wait", late):
        yield
