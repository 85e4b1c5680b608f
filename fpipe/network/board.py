# SPDX-License-Identifier: Apache-2.0
"""The board on which ranks post what others must know when something goes wrong, and whether they are alive.

It is the store of a process group, which outlives any connection between two ranks. Whoever learns of a failure first
publishes its cause; all others read that one, so all of them name the same. A rank that is long in a call posts a sign
of life now and then: what it is doing, and whom it waits for.

If the process that keeps the store dies or is stopped, the board is lost. That is a finding, too. A stopped store does
not even refuse to answer, so a thread asks it, and nobody waits for the answer for long.

Runs when a call takes long, or fails; if ranks are separate processes.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from typing import Any, Final, NamedTuple, TypeVar, cast

import torch.distributed as dist

from fpipe.errors import Cause

T = TypeVar("T")
PATIENCE: Final = 2.0  # seconds until a store that does not answer is lost
LINGER, PAUSE = 3.0, 0.01  # seconds that a rank waits for the others to learn of a failure, and between two looks
CLAIM, CAUSE, READ, LEARNED, SIGN = "claim", "cause", "read", "learned", "sign"


class Sign(NamedTuple):
    """A sign of life of a rank: when it was given, by the rank's own clock, what it is doing, and whom it waits for."""

    time: float
    doing: str
    peers: tuple[int, ...]


class Connection(NamedTuple):
    """A connection to the store, and the number of failures that its rank has read from this board before.

    The board of a group of the user's outlives a failure. Then each is about what happens next.
    """

    store: dist.Store
    epoch: int

    @classmethod
    def of(cls, store: dist.Store, rank: int) -> Connection:
        """Return the connection of a rank."""
        return next(one for one in map(partial(cls, store), count()) if not one.has_read(rank))

    def claim(self) -> bool:
        """Return whether this rank is the first that has something to publish about the next failure."""
        return self.store.add(f"{CLAIM}/{self.epoch}", 1) == 1

    def publish(self, cause: Cause, lost: Iterable[int]) -> None:
        """Publish the cause of the next failure, of which lost ranks will not learn."""
        for rank in lost:
            self.note_learned(rank)
        self.store.set(f"{CAUSE}/{self.epoch}", json.dumps(cause))

    def read(self) -> Cause | None:
        """Return the cause of the next failure, if there is one."""
        text = self.find(f"{CAUSE}/{self.epoch}")
        return None if text is None else Cause(*json.loads(text))

    def note_read(self, rank: int) -> None:
        """Note that a rank has read the cause of the next failure."""
        self.store.set(f"{READ}/{self.epoch}/{rank}", "")
        self.note_learned(rank)

    def has_read(self, rank: int) -> bool:
        """Return whether a rank has read it."""
        return self.store.check([f"{READ}/{self.epoch}/{rank}"])

    def note_learned(self, rank: int) -> None:
        """Count a rank as one for which nobody has to linger: it has read the cause, or never will."""
        self.store.set(f"{LEARNED}/{self.epoch}/{rank}", "")

    def have_learned(self, ranks: Iterable[int]) -> bool:
        """Return whether nobody has to linger for any of these ranks."""
        return self.store.check([f"{LEARNED}/{self.epoch}/{rank}" for rank in ranks])

    def find(self, key: str) -> str | None:
        """Return the text under a key, if there is one."""
        return self.store.get(key).decode() if self.store.check([key]) else None


class Board:
    """The board of the ranks that agree with each other, `size` of them, of which this process is number `rank`.

    - `connect`: returns a connection to the store that no other call blocks. The thread that asks calls it.
    - `keeper`: the rank whose process keeps the store, if one of them does.
    - `found`: the first cause, once it is known here.
    - `trouble`: the question that the store refused to answer, or did not answer in time.
    """

    def __init__(self, connect: Callable[[], dist.Store], rank: int, size: int, keeper: int | None) -> None:
        self.connect, self.rank, self.size, self.keeper = connect, rank, size, keeper
        self.found: Cause | None = None
        self.made: Connection | None = None
        self.trouble: StoreQuery | None = None
        self.queries: SimpleQueue[StoreQuery | None] = SimpleQueue()
        self.queries.put(StoreQuery(self._connect))  # connect now, but let nobody wait for it
        thread = Thread(target=_answer_all, args=(self.queries,), name="fpipe board", daemon=True)
        thread.start()
        weakref.finalize(self, _dismiss, thread, self.queries)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Board:
        """Return the board of the processes of a group."""
        shared: Any = group.get_group_store()
        keeper = _find_keeper(dist.get_process_group_ranks(group), os.environ)
        return cls(shared.clone, group.rank(), group.size(), keeper)

    def publish(self, cause: Cause, lost: Iterable[int] = ()) -> Cause:
        """Publish a cause unless there is one; return the one that all ranks name.

        `lost`: the ranks that died or hang. They will not learn of it, and nobody lingers for them.
        """
        if self.found is None:
            if self._ask(Connection.claim, default=False):
                self._ask(lambda link: link.publish(cause, lost), default=None)
            limit = time.monotonic() + LINGER
            while self.read() is None and not self.is_lost and time.monotonic() < limit:
                time.sleep(PAUSE)  # another rank has claimed to publish, and is about to
        return self.found or self.lost_cause or cause

    def read(self) -> Cause | None:
        """Return the first cause, if one is published, and count as a rank that has learned of it."""
        if self.found is None and (found := self._ask(Connection.read, default=None)):
            self.found = found
            self._ask(lambda link: link.note_read(self.rank), default=None)
        return self.found

    @property
    def is_lost(self) -> bool:
        """True if the store does not answer."""
        return self.trouble is not None and (self.trouble.error is not None or not self.trouble.done.is_set())

    @property
    def lost_cause(self) -> Cause | None:
        """The cause if the board is lost: something is wrong with the process that keeps the store."""
        if self.trouble is None or not self.is_lost:
            return None
        died, stopped = "it died, or left: the store is gone", "it is stopped: the store does not answer"
        problem = stopped if self.trouble.error is None else died
        return Cause(self.keeper, "which holds the store of the process group", problem)

    def linger(self) -> None:
        """Wait until all ranks that are left know the cause, but not for long.

        The store ends with the process that keeps it. If the launcher does, it ends all ranks soon after the first.
        """
        if self.keeper not in (self.rank, None):
            return
        limit = time.monotonic() + LINGER
        while not self.is_lost and time.monotonic() < limit:
            if self._ask(lambda link: link.have_learned(range(self.size)), default=True):
                return
            time.sleep(PAUSE)

    def give_sign(self, doing: str, peers: tuple[int, ...]) -> None:
        """Post a sign of life of this rank."""
        text = json.dumps(Sign(time.monotonic(), doing, peers))
        self._ask(lambda link: link.store.set(f"{SIGN}/{self.rank}", text), default=None)

    def last_sign(self, rank: int) -> Sign | None:
        """Return the last sign of life that a rank has posted."""
        text = self._ask(lambda link: link.find(f"{SIGN}/{rank}"), default=None)
        return None if text is None else Sign(*json.loads(text))

    def _connect(self) -> Connection:
        if self.made is None:
            self.made = Connection.of(self.connect(), self.rank)
        return self.made

    def _ask(self, ask: Callable[[Connection], T], default: T) -> T:
        """Return what the store answers; the default if it does not."""
        if self.is_lost:
            return default
        query = StoreQuery(lambda: ask(self._connect()))
        self.queries.put(query)
        asked = time.monotonic()
        while not query.done.wait(PATIENCE):
            if time.monotonic() - asked < 2 * PATIENCE:
                self.trouble = query
                return default
            asked = time.monotonic()  # this process was stopped itself: the answer may be there at once
        if query.error is not None:
            self.trouble = query
        return default if self.is_lost else cast(T, query.answer)


class StoreQuery:
    """A question to the store: `ask` asks it; it is `done` once there is an `answer`, or an `error`."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self.ask, self.done = ask, Event()
        self.answer: Any = None
        self.error: Exception | None = None


def _answer_all(queries: SimpleQueue[StoreQuery | None]) -> None:
    """Ask the store one question after the other, until there is none."""
    while (query := queries.get()) is not None:
        try:
            query.answer = query.ask()
        except Exception as error:
            query.error = error
        query.done.set()
        del query


def _dismiss(thread: Thread, queries: SimpleQueue[StoreQuery | None]) -> None:
    """End the thread that asks, at the end of the process at the latest.

    Let it finish its question, unless the store is lost. A thread that comes back from torch while Python ends aborts
    the process: Python ends it by unwinding its stack, on which C++ has a frame that must not be unwound.
    """
    queries.put(None)
    if thread is not current_thread():  # the last reference to a board may be in a question
        thread.join(PATIENCE)


def _find_keeper(processes: list[int], environment: Mapping[str, str]) -> int | None:
    """Return which of these processes keeps the store: the first of the job, unless its launcher does."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or 0 not in processes:
        return None
    return processes.index(0)
