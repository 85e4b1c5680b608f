# SPDX-License-Identifier: Apache-2.0
"""A thread that looks around while this rank waits for others.

Problem. A rank that waits hears only from the rank it waits for. It hears nothing of a failure elsewhere, or of a peer
that is stopped, and a signal such as Ctrl-C has to wait with it.

Idea. A rank only notes what it waits for. Twice a second, this thread checks whether the same wait is still on. If so,
it looks at the board for the cause of a failure, gives a sign of life there, and reports a slow peer. Once the timeout
of the process group is over, it finds out who keeps all others waiting: it follows who waits for whom, to a rank that
gives no sign of life, or that waits for nobody. To end a wait, it breaks the groups.

An accelerator waits in place of the host, which goes on, and may leave the call. What the device has not passed yet is
then a wait like any other (`fpipe.network.trail`). A device does not notice that a peer is gone. But the connections
over which the ranks agree end with a process, so this thread checks them if the device stays long at one place. Once
its groups are broken, the device goes on, with garbage: from then on, whatever the host does in a call raises.

Invariant: the thread asks the store only while a call is running, or while the device still works on one, so that a
process can end at any time between calls.

Runs in every step, if ranks are separate processes; the thread does something only in calls that take long.
"""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread, current_thread, main_thread
from time import monotonic
from typing import Final

import torch.distributed as dist

from fpipe.errors import Cause
from fpipe.network.board import PATIENCE, Board, Sign
from fpipe.network.standing import Situation
from fpipe.network.trail import Trail
from fpipe.network.waiting import Awaited, BrokenWaitError, Waitable, break_group, is_on_host, list_closed
from fpipe.tensors.torch_private import process_groups

SLICE: Final = 0.5  # seconds between two looks
SILENCE: Final = 4 * SLICE  # a rank without a new sign of life for so long is silent
FIRST_REPORT: Final = 30.0  # seconds until a slow peer is reported; then after twice as long, and so on
LONG: Final = 10 * SLICE  # seconds that a device is at one place until this thread looks whether a peer is gone
DIED: Final = (
    "it died, or left: its connection ended, and it left no failure record. Look at the last lines that it printed"
)
LOG = logging.getLogger(__name__)


@dataclass
class Vigil:
    """A wait that the thread has seen: what for, since when, and when to report it next.

    - `signs`: the signs of life of those who keep the rank waiting, as they were shortly before the timeout.
    """

    posted: Waitable | None
    since: float
    report: float
    signs: dict[int, Sign | None] | None = None


class Lookout:
    """The lookout of one rank.

    - `processes`: the numbers in the job of the ranks. `group`: their Gloo group, whose connections end if one is gone.
    - `release`: breaks the groups of the pipeline. `trail`: what its device has to do, if it has one.
    - `situation`: what the rank is doing. `vigil`: the wait that the thread has seen last.
    - `latest`: what the rank waited for last in its call. `cut`: what was awaited when the groups were broken.
    - `stalled`: what the device has not passed, and since when; the host may wait for something else meanwhile.
    - `alone`: since when the board is lost, as far as the thread has seen; `None` while it answers.
    """

    def __init__(
        self,
        board: Board,
        processes: Sequence[int],
        group: dist.ProcessGroup,
        timeout: timedelta,
        release: Callable[[], None],
        trail: Trail | None,
    ) -> None:
        self.board, self.processes, self.group, self.timeout = board, processes, group, timeout.total_seconds()
        self.release, self.trail, self.situation = release, trail, Situation()
        self.latest: Waitable | None = None
        self.cut: Awaited | None = None
        self.vigil = Vigil(None, 0.0, FIRST_REPORT)
        self.stalled: tuple[Waitable | None, float] = (None, 0.0)
        self.alone: float | None = None
        self.is_over = False
        self.bell, self.string = socket.socketpair()
        self.bell.settimeout(SLICE)
        self.string.setblocking(False)
        self.thread = Thread(target=self._look_around, name="fpipe lookout", daemon=True)
        self.thread.start()

    def wait(self, posted: Waitable) -> None:
        """Wait for it, in sight of the thread; raise `BrokenWaitError` if it will not come."""
        self.situation.posted = self.latest = posted
        try:
            posted.wait()
        finally:
            self.situation.posted = None
        if self.trail is not None:
            self.trail.follow(posted)
        self.require_uncut()

    def break_all(self) -> None:
        """Break the groups of the pipeline, and all others on which its device may wait, such as those of a mesh."""
        if self.trail is not None:
            for group in self.trail.groups & {*process_groups()}:
                break_group(group)
        self.release()

    def require_uncut(self) -> None:
        """Raise `BrokenWaitError` if the thread has broken the groups: what a device received since is garbage."""
        if self.cut is not None:
            raise BrokenWaitError(self.cut)

    @contextmanager
    def on_duty(self, call: str) -> Iterator[None]:
        """Return the context of a call: the thread looks around, and Ctrl-C ends a wait."""
        self.situation.enter(call)
        self.latest = None
        try:
            with _ringing(self.string):
                yield
                self._close_lap()
        finally:
            self.situation.leave()

    def _close_lap(self) -> None:
        """Mark on the device the end of what a call has posted."""
        if self.trail is not None and self.latest is not None:
            self.trail.close_lap(self.latest.awaited)

    def stop(self) -> None:
        """End the thread.

        Wait for it: it may be the last to hold process groups. If it dropped them while Python ends, torch would abort
        the process (see `fpipe.network.board`).
        """
        self.is_over = True
        self.string.close()  # wakes it
        if self.thread is not current_thread():  # the last reference to the ranks may be in a wait that it looks at
            self.thread.join(PATIENCE)

    def _look_around(self) -> None:
        while not self.is_over:
            try:
                rung = self.bell.recv(64)
            except TimeoutError:
                rung = b""
            with self.situation.looking:
                if self.situation.is_running or self._find_unfinished() is not None:
                    self._look(signal.SIGINT in rung and signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        self.bell.close()

    def _find_unfinished(self) -> Waitable | None:
        """Return what the device has not passed; `None` once the groups are broken, after which it passes anything."""
        is_broken = self.cut is not None or bool(self.situation.failure)
        return None if self.trail is None or is_broken else self.trail.find_unfinished()

    def _look(self, is_interrupted: bool) -> None:
        """Look whether the rank waits, and for how long; let the others know that it is alive."""
        unfinished, now = self._find_unfinished(), monotonic()
        posted = self.situation.posted or unfinished
        if posted is not self.vigil.posted or posted is None:
            self.vigil = Vigil(posted, now, FIRST_REPORT)
        if unfinished is not self.stalled[0]:  # the device may wait for one rank, and the host for another
            self.stalled = unfinished, now
        is_failed = self.board.read() is not None
        if posted is None and is_failed and self.trail is not None:
            posted = self.latest  # wherever the host waits for the device: here, in a loss, in torch
        awaited = None if posted is None else posted.awaited
        self.board.give_sign(self.situation.place, () if awaited is None else self.ranks_of(awaited))
        if not self.board.is_lost:  # or it answers again
            self.alone = None
        elif self.alone is None:
            self.alone = now
        if posted is None or awaited is None:
            return
        if is_interrupted:  # others must not take it for a death
            self.board.publish(Cause(self.board.rank, self.situation.place, KeyboardInterrupt.__name__))
        waits: list[tuple[Waitable | None, float]] = [(posted, self.vigil.since), self.stalled]
        is_over = (
            is_failed
            or is_interrupted
            or any(self._is_left_alone(one.awaited, now - since) for one, since in waits if one is not None)
        )
        if is_over or self._is_too_long(awaited, now - self.vigil.since):
            self.cut = awaited  # before it breaks: who sees garbage must see this
            posted.give_up()
            self.break_all()

    def list_gone(self, awaited: Awaited) -> list[int]:
        """Return which of the awaited processes have ended their connection, there or in the group of all ranks."""
        peers = tuple(peer for peer in awaited.peers if peer in self.processes)
        return list_closed(awaited) or list_closed(awaited._replace(peers=peers, group=self.group))

    def blame(self, awaited: Awaited, gone: Sequence[int]) -> Cause:
        """Publish that one of the awaited processes is gone, the first of those if any is known; return the cause."""
        first = self.ranks_of(awaited._replace(peers=tuple(gone) or awaited.peers))[:1]
        others = [peer for rank, peer in enumerate(self.processes) if rank != self.board.rank]
        known = awaited._replace(peers=tuple(others), group=self.group)
        lost = {*gone, *list_closed(known)} if gone else ()  # nobody lingers for these
        cause = Cause(next(iter(first), None), f"before {awaited.what}", DIED)
        return self.board.publish(cause, self.ranks_of(awaited._replace(peers=tuple(lost))))

    def _is_left_alone(self, awaited: Awaited, waited: float) -> bool:
        """Return true, once published, if a device is long at one place, and a process that it awaits is gone.

        Without the board, nobody hears of a failure: each rank frees those that wait for it. So what counts then is how
        long the board is lost, or ranks in a row would each be long at one place, one after the other.
        """
        lost = 0.0 if self.alone is None else monotonic() - self.alone
        if max(waited, lost) < LONG or is_on_host(awaited.group):
            return False
        gone = self.list_gone(awaited)
        if gone:
            self.blame(awaited, gone)
        return bool(gone)

    def _is_too_long(self, awaited: Awaited, waited: float) -> bool:
        """Report a wait that is long; once it is too long, publish why, and return true."""
        vigil = self.vigil
        if waited >= vigil.report:
            where = f"rank {self.board.rank}, {self.situation.place}"
            LOG.warning("%s: still waiting for %s, %d s", where, self.name(awaited), waited)
            vigil.report *= 2
        if vigil.signs is None:
            is_near = waited >= max(self.timeout - SILENCE, self.timeout / 2)
            vigil.signs = self._collect_signs(awaited) if is_near else None
        elif waited >= self.timeout:
            signs = self._collect_signs(awaited)
            cause = find_cause(vigil.signs, signs, f"{self.timeout:g} s")
            self.board.publish(self.board.lost_cause or cause, find_silent(vigil.signs, signs))
            return True
        return False

    def ranks_of(self, awaited: Awaited) -> tuple[int, ...]:
        """Return the ranks that are awaited; of a group that holds other processes, too, those that are ranks."""
        return tuple(self.processes.index(peer) for peer in awaited.peers if peer in self.processes)

    def name(self, awaited: Awaited) -> str:
        """Return what is awaited, and from whom."""
        ranks = self.ranks_of(awaited)
        return f"{awaited.what} from rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

    def _collect_signs(self, awaited: Awaited) -> dict[int, Sign | None]:
        """Return the last signs of life of who is awaited, of those they wait for, and so on, nearest first."""
        found: dict[int, Sign | None] = {}
        left = list(self.ranks_of(awaited))
        while left:
            rank = left.pop(0)
            if rank not in found and rank != self.board.rank:
                found[rank] = sign = self.board.last_sign(rank)
                left += () if sign is None else sign.peers
        return found


def find_silent(before: Mapping[int, Sign | None], now: Mapping[int, Sign | None]) -> list[int]:
    """Return the ranks that have given no sign of life since.

    >>> find_silent({1: Sign(3.0, "a step", ()), 2: None}, {1: Sign(3.5, "a step", ()), 2: None})
    [2]
    """
    return [rank for rank, sign in now.items() if sign == before.get(rank)]


def find_cause(before: Mapping[int, Sign | None], now: Mapping[int, Sign | None], timeout: str) -> Cause:
    """Return who keeps a rank waiting, given the signs of life of the others, nearest first, and those shortly before.

    That is a rank without a new sign, or else one that waits for nobody, or else a circle of ranks.

    >>> waits, works = Sign(3.0, "a step (call 2), position 4, 1B0", (2,)), Sign(3.0, "a step (call 2)", ())
    >>> print(find_cause({1: None, 2: works}, {1: waits, 2: works}, "4 s"))
    rank 2, a step (call 2): no sign of life from it since, within the timeout of 4 s
    >>> print(find_cause({1: None, 2: None}, {1: waits, 2: works}, "4 s"))
    rank 2, a step (call 2): it is alive, but was not done within the timeout of 4 s
    >>> print(find_cause({}, {2: None}, "4 s"))
    rank 2, outside fpipe, or stopped: no sign of life from it since, within the timeout of 4 s
    """
    silent = find_silent(before, now)
    busy = [rank for rank, sign in now.items() if sign is not None and not sign.peers]
    rank = next(iter([*silent, *busy, *now]), None)
    sign = None if rank is None else now[rank]
    place = "outside fpipe, or stopped" if sign is None else sign.doing
    if rank in silent or rank is None:
        return Cause(rank, place, f"no sign of life from it since, within the timeout of {timeout}")
    if rank in busy:
        return Cause(rank, place, f"it is alive, but was not done within the timeout of {timeout}")
    return Cause(rank, place, f"it and others waited for each other until the timeout of {timeout}")


@contextmanager
def _ringing(string: socket.socket) -> Iterator[None]:
    """Return a context in which signals wake the thread; not if somebody else listens to them."""
    if current_thread() is not main_thread():
        yield
        return
    other = signal.set_wakeup_fd(string.fileno(), warn_on_full_buffer=False)
    if other != -1:
        signal.set_wakeup_fd(other)
    try:
        yield
    finally:
        if other == -1:
            signal.set_wakeup_fd(-1)
