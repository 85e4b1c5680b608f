# SPDX-License-Identifier: Apache-2.0
"""A rank that waits learns of failures elsewhere, reports slow peers, and gives up silent ones."""

import logging
import os
import signal
from datetime import timedelta
from math import inf
from threading import Event, Timer

import pytest
import torch.distributed as dist

from fpipe.errors import Cause
from fpipe.network import lookout as module
from fpipe.network.board import Board
from fpipe.network.lookout import Lookout
from fpipe.network.standing import Situation, Standing
from fpipe.network.trail import Trail
from fpipe.network.waiting import Awaited, BrokenWaitError

HOUR = timedelta(hours=1)
SILENT = "no sign of life from it since, within the timeout of {} s"
CAUSE = Cause(2, "a step (call 1), position 3, 2F1", "ValueError: one")


class Posted:
    """A wait for process 11, which is rank 1. It ends when it is given up; like Gloo's, no signal interrupts it."""

    def __init__(self):
        self.awaited, self.store = Awaited("1SEND_B0>0", (11,), None), dist.HashStore()

    def give_up(self):
        self.store.set("released", "")

    def wait(self):
        self.store.wait(["released"], timedelta(seconds=60))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(module, "SLICE", 0.02)
    monkeypatch.setattr(module, "SILENCE", 0.2)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")


@pytest.fixture
def start(quick):
    """A function that returns the lookout of rank 0 of 3, a wait that it may end, and its store."""
    started = []

    def begin(timeout=HOUR, trail=None):
        posted, store = Posted(), dist.HashStore()
        lookout = Lookout(Board(lambda: store, 0, 3, 0), (10, 11, 12), None, timeout, lambda: None, trail)
        started.append(lookout)
        return lookout, posted, store

    yield begin
    for one in started:
        one.stop()


def test_a_failure_elsewhere_ends_a_wait(start):
    lookout, posted, store = start()
    Timer(0.1, Board(lambda: store, 2, 3, 0).publish, [CAUSE]).start()
    with lookout.on_duty("a step (call 1)"), pytest.raises(BrokenWaitError, match="1SEND_B0>0"):
        lookout.wait(posted)
    assert lookout.board.found == CAUSE


class AtOnce(Posted):
    """A wait for process 11 on a device: the host goes on."""

    def __init__(self):
        super().__init__()
        self.given_up = Event()

    def wait(self):
        """The device waits."""

    def give_up(self):
        self.given_up.set()


class Stuck:
    """An event that a device reaches once it does not wait any more."""

    def __init__(self, posted):
        self.posted = posted

    def query(self):
        return self.posted.given_up.is_set()


@pytest.fixture
def stuck(start):
    """A lookout whose device waits for process 11 after a call, what it waits for, and the store."""

    def begin(timeout=HOUR):
        posted = AtOnce()
        lookout, _, store = start(timeout, Trail(lambda headers: (headers, Stuck(posted))))
        with lookout.on_duty("a step (call 1)"):
            lookout.wait(posted)
        (lap,) = lookout.trail.laps
        lap.give_up = posted.give_up  # it would break a group
        return lookout, posted, store

    return begin


def test_a_failure_elsewhere_ends_the_wait_of_a_device_wherever_its_host_is(start):
    posted = AtOnce()
    lookout, _, store = start(trail=Trail(lambda headers: (headers, Stuck(posted))))
    with lookout.on_duty("a step (call 1)"):
        lookout.wait(posted)
        Board(lambda: store, 2, 3, 0).publish(CAUSE)
        assert posted.given_up.wait(5)
        with pytest.raises(BrokenWaitError, match="1SEND_B0>0"):
            lookout.require_uncut()
    assert lookout.board.found == CAUSE


def test_a_failure_elsewhere_ends_the_wait_of_a_device_after_a_call(stuck):
    lookout, posted, store = stuck()
    Event().wait(0.2)
    assert not posted.given_up.is_set()
    Board(lambda: store, 2, 3, 0).publish(CAUSE)
    assert posted.given_up.wait(5)
    with pytest.raises(BrokenWaitError, match="1SEND_B0>0"):
        lookout.require_uncut()


def test_a_device_that_waits_too_long_after_a_call_is_freed(stuck):
    lookout, posted, _ = stuck(timedelta(seconds=0.5))
    assert posted.given_up.wait(5)
    assert lookout.board.found == (1, "outside fpipe, or stopped", SILENT.format(0.5))


def test_a_device_that_waits_for_a_process_that_is_gone_is_freed(stuck, monkeypatch):
    monkeypatch.setattr(module, "LONG", 0.2)
    monkeypatch.setattr(module, "is_on_host", lambda group: False)
    monkeypatch.setattr(module, "list_closed", lambda awaited: [*awaited.peers])
    lookout, posted, _ = stuck()
    assert posted.given_up.wait(5)
    assert lookout.board.found == (1, "before 1SEND_B0>0", module.DIED)
    learned = lambda link: link.have_learned(range(3))  # noqa: E731
    assert lookout.board._ask(learned, default=False), "nobody lingers for rank 2, which is gone as well"


def test_a_device_is_freed_while_its_host_waits_for_somebody_else(stuck, monkeypatch):
    monkeypatch.setattr(module, "LONG", 0.2)
    monkeypatch.setattr(module, "is_on_host", lambda group: group == "host")
    monkeypatch.setattr(module, "list_closed", lambda awaited: [*awaited.peers])
    lookout, _, _ = stuck()
    host = Posted()
    host.awaited = Awaited("an agreement", (12,), "host")
    with lookout.on_duty("a step (call 2)"), pytest.raises(BrokenWaitError, match="an agreement"):
        lookout.wait(host)
    assert lookout.board.found == (1, "before 1SEND_B0>0", module.DIED)


def test_a_device_is_freed_soon_once_the_board_is_lost_for_long(stuck, monkeypatch):
    """Or ranks in a row would be freed one after the other, each after a long wait."""
    monkeypatch.setattr(module, "LONG", HOUR.total_seconds())
    monkeypatch.setattr(module, "is_on_host", lambda group: False)
    monkeypatch.setattr(module, "list_closed", lambda awaited: [*awaited.peers])
    lookout, posted, _ = stuck()
    assert not posted.given_up.wait(10 * module.SLICE)
    lookout.alone = -inf
    assert not posted.given_up.wait(10 * module.SLICE), "the board answers again"
    assert lookout.alone is None
    monkeypatch.setattr(Board, "is_lost", True)
    lookout.alone = -inf
    assert posted.given_up.wait(5)


def test_once_a_device_is_done_nobody_asks_the_store(stuck):
    lookout, posted, store = stuck()
    posted.give_up()
    Event().wait(0.2)
    other = Board(lambda: store, 1, 3, 0)
    last = other.last_sign(0)
    Event().wait(0.2)
    assert other.last_sign(0) == last
    lookout.require_uncut()


def test_a_rank_that_waits_and_one_that_computes_give_signs_of_life(start):
    lookout, posted, store = start()
    other, seen = Board(lambda: store, 1, 3, 0), []

    def look():
        seen.append(other.last_sign(0))
        posted.give_up()

    with lookout.on_duty("a step (call 1)"):
        Event().wait(0.2)
        before = other.last_sign(0)
        Timer(0.2, look).start()
        lookout.wait(posted)
    assert (before.doing, list(before.peers)) == ("a step (call 1)", [])
    assert list(seen[0].peers) == [1]


def test_nothing_is_posted_between_calls(start):
    lookout, _, store = start()
    Event().wait(0.2)
    assert not store.num_keys()
    with lookout.on_duty("a step (call 1)"):
        Event().wait(0.2)
    other = Board(lambda: store, 1, 3, 0)
    last = other.last_sign(0)
    Event().wait(0.2)
    assert last is not None, "given within the call"
    assert last == other.last_sign(0)


@pytest.mark.parametrize("within", [Standing.MIDWAY, Standing.CONCLUDED, None])
def test_a_call_that_failed_is_the_last_one(within):
    situation = Situation()
    for call in ("a step (call 1)", "a step (call 2)"):
        situation.enter(call)
        assert (situation.is_running, situation.place) == (True, call)
        if within is not None:
            situation.move(within)
        situation.leave()
        assert situation.standing is Standing.OUTSIDE
    situation.enter("a step (call 3)")
    situation.fail("it did")
    situation.leave()
    assert (situation.standing, situation.failure, situation.is_running) == (Standing.FAILED, "it did", False)
    with pytest.raises(AssertionError, match="does not lead to"):
        situation.enter("a step (call 4)")


def test_a_slow_peer_is_reported(start, caplog, monkeypatch):
    monkeypatch.setattr(module, "FIRST_REPORT", 0.1)
    lookout, posted, _ = start()
    Timer(0.5, posted.give_up).start()
    with caplog.at_level(logging.WARNING), lookout.on_duty("a step (call 1)"):
        lookout.wait(posted)
    assert "rank 0, a step (call 1): still waiting for 1SEND_B0>0 from rank 1, 0 s" in caplog.messages


def test_the_one_who_keeps_all_waiting_is_given_up(start):
    """Rank 1 waits for rank 2, which gives no sign of life."""
    lookout, posted, store = start(timedelta(seconds=0.5))
    one, over = Board(lambda: store, 1, 3, 0), Event()

    def live():
        while not over.wait(0.05):
            one.give_sign("a step (call 1), position 5, 1B0", (2,))

    Timer(0, live).start()
    with lookout.on_duty("a step (call 1)"), pytest.raises(BrokenWaitError):
        lookout.wait(posted)
    over.set()
    assert lookout.board.found == (2, "outside fpipe, or stopped", SILENT.format(0.5))


def test_control_c_ends_a_wait(start):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background, shells ignore it
    try:
        wait_for_control_c(start)
    finally:
        signal.signal(signal.SIGINT, before)


def wait_for_control_c(start):
    lookout, posted, _ = start()
    Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt), lookout.on_duty("a step (call 1)"):
        lookout.wait(posted)
    assert lookout.board.found == (0, "a step (call 1)", "KeyboardInterrupt")


def test_a_signal_that_the_script_handles_ends_no_wait(start):
    lookout, posted, _ = start()
    told = Event()
    before = signal.signal(signal.SIGINT, lambda *_: told.set())
    try:
        Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
        Timer(0.5, lambda: lookout.situation.posted is posted and posted.give_up()).start()
        with lookout.on_duty("a step (call 1)"):
            lookout.wait(posted)
    finally:
        signal.signal(signal.SIGINT, before)
    assert told.is_set()


def test_who_listens_to_signals_already_goes_on_doing_so(start):
    lookout, _, _ = start()
    mine, other = os.pipe()
    os.set_blocking(other, False)
    signal.set_wakeup_fd(other)
    try:
        with lookout.on_duty("a step (call 1)"):
            assert signal.set_wakeup_fd(other) == other
        assert signal.set_wakeup_fd(-1) == other
    finally:
        signal.set_wakeup_fd(-1)
        os.close(mine)
        os.close(other)


def test_nobody_listens_to_signals_between_calls(start):
    lookout, _, _ = start()
    with lookout.on_duty("a step (call 1)"):
        pass
    assert signal.set_wakeup_fd(-1) == -1
