# SPDX-License-Identifier: Apache-2.0
"""All ranks read the same first cause off the board, and none waits for a board that is lost."""

import json
import subprocess
import sys
from itertools import count
from threading import Event, Timer
from time import monotonic
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from fpipe.errors import Cause
from fpipe.network import board as module
from fpipe.network.board import Board, _find_keeper
from tests.common.sizes import by_night

FIRST, SECOND = Cause(1, "a step (call 3), position 2, 1F1", "ValueError: one"), Cause(0, "a step (call 3)", "two")


def boards(count, store=None, keeper=0):
    shared = dist.HashStore() if store is None else store
    return [Board(lambda: shared, rank, count, keeper) for rank in range(count)]


def seconds_of(function):
    start = monotonic()
    function()
    return monotonic() - start


class Dead:
    """A store whose process is gone."""

    def check(self, keys):
        raise dist.DistNetworkError("Connection reset by peer")

    add = set = check


class Stopped:
    """A store whose process is stopped; it goes on in the end."""

    def __init__(self, store, going_on):
        self.store, self.going_on = store, going_on

    def __getattr__(self, name):
        self.going_on.wait()
        return getattr(self.store, name)


def test_the_first_cause_is_every_rank_s():
    zero, one, two = boards(3)
    assert two.read() is None
    assert one.publish(FIRST) == FIRST
    assert zero.publish(SECOND) == FIRST
    assert two.read() == FIRST


def test_a_cause_is_published_once_by_whoever_is_first():
    zero, one = boards(2)
    assert zero.publish(SECOND) == SECOND
    assert one.publish(FIRST) == SECOND
    assert one.publish(FIRST) == SECOND


def test_a_new_board_on_the_same_store_is_about_the_next_failure():
    """A rank that has not learned of the first failure, because it is slow, still does."""
    store = dist.HashStore()
    zero, slow = boards(2, store)
    zero.publish(FIRST)
    again, _ = boards(2, store)
    assert again.read() is None
    again.publish(SECOND)
    assert slow.read() == FIRST
    assert boards(2, store)[1].read() == SECOND


def test_a_rank_that_was_stopped_itself_asks_again(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.02)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=count(0, 100).__next__))
    store, going_on = dist.HashStore(), Event()
    store.set("cause/0", json.dumps(FIRST))
    (board,) = boards(1, Stopped(store, going_on))
    Timer(0.2, going_on.set).start()
    assert board.read() == FIRST
    assert not board.is_lost


@pytest.mark.parametrize("late", [1, 2])
def test_a_rank_lingers_until_all_know(late, monkeypatch):
    """Also rank 1, which the cause names: it was too slow, or waits in a circle. Each rank counts once."""
    monkeypatch.setattr(module, "LINGER", 0.3)
    zero, one, two = boards(3)
    zero.publish(FIRST)
    (one, two)[2 - late].read()
    assert seconds_of(zero.linger) > 0.2, f"rank {late} does not know yet"
    monkeypatch.setattr(module, "LINGER", 60.0)
    (one, two)[late - 1].read()
    zero.linger()  # returns at once


def test_nobody_lingers_for_a_dead_rank(monkeypatch):
    monkeypatch.setattr(module, "LINGER", 60.0)
    zero, _, two = boards(3)
    two.publish(FIRST, [1])
    zero.read()
    zero.linger()


def test_a_rank_that_was_given_up_reads_the_cause_when_it_comes_after_all():
    store = dist.HashStore()
    zero, _ = boards(2, store)
    zero.publish(FIRST, [1])
    assert boards(2, store)[1].read() == FIRST


def test_only_who_keeps_the_store_lingers(monkeypatch):
    monkeypatch.setattr(module, "LINGER", 60.0)
    _, one = boards(2)
    one.publish(FIRST)
    one.linger()


def test_a_rank_does_not_linger_for_long(monkeypatch):
    monkeypatch.setattr(module, "LINGER", 0.05)
    zero, _ = boards(2)
    zero.publish(SECOND)
    zero.linger()


def test_signs_of_life_are_those_of_their_rank():
    zero, one = boards(2)
    assert one.last_sign(0) is None
    zero.give_sign("a step (call 3)", (1,))
    first = one.last_sign(0)
    assert (first.doing, tuple(first.peers)) == ("a step (call 3)", (1,))
    zero.give_sign("a step (call 3)", (1,))
    assert one.last_sign(0) != first, "every sign is new"


@pytest.mark.parametrize(("keeper", "named"), [(2, "rank 2"), (None, "a process")])
def test_a_dead_store_means_that_its_process_failed_first(keeper, named):
    (zero,) = boards(1, Dead(), keeper)
    assert zero.lost_cause is None
    assert zero.read() is None
    assert zero.publish(SECOND) == zero.lost_cause
    assert str(zero.lost_cause).startswith(f"{named}, which holds the store")
    zero.linger()  # returns at once


def test_a_store_that_nobody_can_connect_to_is_lost():
    def connect():
        raise dist.DistNetworkError("The client socket has timed out")

    board = Board(connect, 1, 2, 0)
    assert board.publish(FIRST) == board.lost_cause
    assert board.lost_cause.rank == 0


def test_a_store_that_does_not_answer_is_lost_until_it_does(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    going_on, store = module.Event(), dist.HashStore()
    zero, one = *boards(1, Stopped(store, going_on)), Board(lambda: store, 1, 2, 0)
    one.publish(FIRST)
    assert zero.read() is None
    assert "does not answer" in zero.lost_cause.problem
    going_on.set()
    zero.trouble.done.wait()
    monkeypatch.setattr(module, "PATIENCE", 60.0)
    assert zero.read() == FIRST


def test_the_launcher_or_the_first_process_keeps_the_store():
    assert _find_keeper([0, 1, 2], {}) == 0
    assert _find_keeper([3, 0], {"TORCHELASTIC_USE_AGENT_STORE": "False"}) == 1
    assert _find_keeper([0, 1], {"TORCHELASTIC_USE_AGENT_STORE": "True"}) is None
    assert _find_keeper([2, 3], {}) is None


SLOW = """
from time import monotonic, sleep
import torch.distributed as dist
from fpipe.network.board import Board

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

class Slow:
    def check(self, keys):
        end = monotonic() + 0.5
        while monotonic() < end:
            store.check(keys)  # in C++, without Python's lock
        return False

board = Board(Slow, 0, 1, None)
sleep(0.1)
"""


@by_night
def test_a_process_ends_in_peace_while_the_store_is_being_asked():
    done = subprocess.run([sys.executable, "-c", SLOW], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
