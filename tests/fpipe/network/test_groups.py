# SPDX-License-Identifier: Apache-2.0
"""A rank waits for what torch creates, and for nothing else: not for one that is dead, nor after it was given up."""

import os
import signal
from functools import partial
from queue import SimpleQueue
from threading import Event, Timer

import pytest
import torch
import torch.distributed as dist

from fpipe.network import groups as module
from fpipe.network.groups import Creation, WatchedWorks, retire_groups
from fpipe.network.waiting import Awaited, BrokenWaitError

AWAITED = Awaited("process group of [0, 1]", (1,), None)


@pytest.fixture
def gone(monkeypatch):
    """The processes whose connections have ended."""
    found = []
    monkeypatch.setattr(module, "list_closed", lambda awaited: found)
    monkeypatch.setattr(module, "LOOK", 0.02)
    return found


@pytest.fixture
def coming(gone):
    """Something that comes late: set when torch's call may return; it does in the end."""
    come = Event()
    yield come
    come.set()


def test_what_is_made_is_there_after_the_wait(gone):
    creation = Creation(lambda: "group", AWAITED)
    creation.wait()
    assert creation.made == "group"


def test_a_wait_ends_when_it_is_given_up_or_a_process_is_gone(gone, coming):
    creation = Creation(coming.wait, AWAITED)
    Timer(0.1, creation.give_up).start()
    with pytest.raises(BrokenWaitError):
        creation.wait()
    other = Creation(coming.wait, AWAITED)
    Timer(0.1, gone.append, [1]).start()
    with pytest.raises(BrokenWaitError):
        other.wait()


def test_control_c_ends_a_wait(coming):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            Creation(coming.wait, AWAITED).wait()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_group_that_comes_too_late_is_destroyed(coming, monkeypatch):
    destroyed, broken = SimpleQueue(), []
    monkeypatch.setattr(module, "process_groups", lambda: ["late"])
    monkeypatch.setattr(module, "break_group", broken.append)
    monkeypatch.setattr(module, "destroy_groups", lambda groups: destroyed.put(*groups))
    creation = Creation(lambda: coming.wait() and "late", AWAITED)
    creation.give_up()
    with pytest.raises(BrokenWaitError):
        creation.wait()
    coming.set()
    assert "late" in iter(partial(destroyed.get, timeout=60), None)
    assert broken == ["late"], "its other ends may never be made"


def fail(error):
    raise error


def test_an_error_is_torch_s_own_unless_a_process_is_gone(gone):
    with pytest.raises(RuntimeError, match="too many open files"):
        Creation(lambda: fail(RuntimeError("too many open files")), AWAITED).wait()
    with pytest.raises(BrokenWaitError):
        Creation(lambda: fail(dist.DistNetworkError("connection to the store was reset")), AWAITED).wait()
    gone.append(1)
    with pytest.raises(BrokenWaitError):
        Creation(lambda: fail(RuntimeError("connection refused")), AWAITED).wait()


class DeviceWork:
    """A work that a device has not done yet."""

    def __init__(self):
        self.is_done, self.waits = False, 0

    def is_completed(self):
        return self.is_done

    def wait(self):
        self.waits += 1


def test_a_wait_over_the_users_group_on_a_device_ends_when_it_is_given_up():
    work = DeviceWork()
    watched = WatchedWorks([work], AWAITED)
    Timer(0.1, watched.give_up).start()
    with pytest.raises(BrokenWaitError):
        watched.wait()
    assert not work.waits, "the host would wait for the device"


def test_a_wait_over_the_users_group_on_a_device_ends_with_its_works():
    work = DeviceWork()
    Timer(0.1, setattr, [work, "is_done", True]).start()
    WatchedWorks([work], AWAITED).wait()
    assert work.waits == 1


def test_who_ends_groups_on_a_device_waits_for_nobody(coming, monkeypatch):
    destroyed = SimpleQueue()
    monkeypatch.setattr(module, "destroy_groups", lambda groups: (coming.wait(), destroyed.put(groups)))
    retire_groups(["a", "b"], torch.device("cuda", 0))
    assert destroyed.empty()
    coming.set()
    assert destroyed.get(timeout=60) == ["a", "b"], "in the order in which all processes made them"
    retire_groups(["c"], torch.device("cpu"))
    assert destroyed.get_nowait() == ["c"]
