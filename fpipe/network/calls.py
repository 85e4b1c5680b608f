# SPDX-License-Identifier: Apache-2.0
"""The calls that processes make together: they agree before they act, and hear of it if one of them fails.

Problem. A function that all ranks call may fail on one of them: before all have agreed on it, in the middle, or
silently, because the process dies.

Idea. What is raised before all have agreed is announced in place of this process's agreement, so that all raise at once
(`fpipe.network.agreement`). What is raised later is published on the board, and the groups on which the others wait are
broken. When a connection ends, the board is read: another rank may know why.

An agreement may be posted, and settled later: before anything else is posted, and before an error is shared. So ranks
that differ raise the same, whatever this process has tried meanwhile.

What an error here means to the others is a state of this process (`fpipe.network.standing`).

Runs when a pipeline is built and in every step, if ranks are separate processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from time import monotonic

import torch.distributed as dist
from torch import Tensor

from fpipe.errors import Cause, RankError, TransportError
from fpipe.network.agreement import AgreementRow, announce_refusal, exchange_texts, post_agreement
from fpipe.network.board import Board
from fpipe.network.groups import Control, Slate, World
from fpipe.network.lookout import Lookout
from fpipe.network.ranks import Fields
from fpipe.network.standing import Standing
from fpipe.network.trail import Trail
from fpipe.network.waiting import Awaited, BrokenWaitError, destroy_groups, is_on_host
from schedules.errors import describe_error


class SharedCalls:
    """The calls of one pipeline, or of a build, as this process makes them.

    - `owned`: returns the groups that nobody else uses, which are broken and destroyed if a call fails.
    - `count`: the number of calls so far; `situation`: what this process is doing.
    - `idle`: the seconds that the first agreement took since it was set to `None`.
    - `pending`: settles the agreement that is posted, if one is.
    """

    pending: Callable[[], object] | None = None

    def __init__(
        self,
        table: Control | World,
        timeout: timedelta,
        release: Callable[[], None],
        owned: Callable[[], Iterable[dist.ProcessGroup]],
        trail: Trail | None = None,
    ) -> None:
        self.table, self.owned, self.count = table, owned, 0
        self.idle: float | None = 0.0
        self.slate = Slate(len(table.processes))
        self.lookout = Lookout(Board.of(table.group), table.processes, table.group, timeout, release, trail)
        self.situation = self.lookout.situation

    @contextmanager
    def enter(self, call: str) -> Iterator[None]:
        """Return the context of a function that all processes call; an error before all have agreed is raised on all.

        Raise `RankError` if another rank fails, dies or falls silent.
        """
        self.count += 1
        with self.lookout.on_duty(f"{call} (call {self.count})"):
            try:
                self.lookout.require_uncut()
                with self._settling():
                    yield
                self.lookout.require_uncut()
            except BrokenWaitError as error:
                if (own := self._find_own(error)) is None:
                    raise self._learn(error.awaited) from error.__cause__
                self._tell(own)
                raise own from None
            except BaseException as error:
                self._share(error)
                if isinstance(error, SystemExit) and not error.code:
                    raise self._refuse_exit() from error
                raise

    def agree(self, fields: Fields = tuple, about: str = "", note: int = 0) -> list[int]:
        """Raise `TransportError` on every rank unless all have called the same function with the same fields.

        `about` distinguishes several agreements within one call. Return the `note` that each rank passed.
        """
        self.settle()
        return self._post(fields, about, note)()

    def post_agreement(self, fields: Fields, then: Callable[[], object]) -> None:
        """Post an agreement, which is to be settled before anything else is posted; once it is, call `then`."""
        finish = self._post(fields)

        def settle() -> None:
            execution, self.situation.execution = self.situation.execution, None  # to the others, nothing runs yet
            finish()
            self.situation.execution = execution
            then()

        self.pending = settle

    def settle(self) -> None:
        """Wait for the answer of the agreement that is posted, if one is; raise what `agree` raises."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending()

    def _post(self, fields: Fields, about: str = "", note: int = 0) -> Callable[[], list[int]]:
        """Post an agreement; return the function that settles it."""
        call = f"{self.situation.call}, {about}" if about else self.situation.call
        known, start = fields(), monotonic()
        finish = post_agreement(self.table.rank, self, call, known, note)

        def settle() -> list[int]:
            try:
                return finish()
            except TransportError:
                self.situation.move(Standing.CONCLUDED)  # the others raise it too
                raise
            finally:
                self.idle = monotonic() - start if self.idle is None else self.idle

        return settle

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """Return a context at whose end no agreement is pending; if ranks differ, an error within is due to that."""
        try:
            yield
        except Exception:
            if self.pending is not None:
                self.begin()  # as the others do, unless they differ
            raise
        self.settle()

    def gather(self, mine: Tensor) -> Sequence[Tensor]:
        """Return the tensors that all processes pass, of the same shape and dtype."""
        return self.table.gather(mine, self.lookout.wait, self.situation.call)

    def post(self, mine: AgreementRow) -> Callable[[], Sequence[Tensor] | int]:
        """Return the function that returns the number of processes if all pass the same row, else those of all."""
        self.slate.write(mine)
        return self.table.post(self.slate, self.lookout.wait, self.situation.call)

    def exchange_text(self, text: str, about: str) -> list[str]:
        """Return the texts of all processes, in order; every one must call this."""
        self.agree(about=about)
        return exchange_texts(self.gather, text)

    def begin(self) -> None:
        """Declare that the others wait for what this process does next: an error is theirs, too."""
        self.settle()
        self.situation.move(Standing.MIDWAY)

    def decide(self) -> None:
        """Declare that the others wait for this process only to agree on what follows."""
        self.situation.move(Standing.DECIDING)

    def conclude(self) -> None:
        """Declare that no other process waits any more for what this one does."""
        self.situation.move(Standing.CONCLUDED)

    def refuse(self, error: TransportError, why: str) -> None:
        """Announce an error to the others, and refuse later calls."""
        with suppress(RuntimeError):  # no other rank is left
            announce_refusal(self, self.situation.call, error)
        self.situation.fail(why)

    def _share(self, error: BaseException) -> None:
        """Let the other ranks know of an error, if they wait for this one."""
        # Who is interrupted while it decides can't wait for the others to hear of it, as an announcement does.
        standing = self.situation.standing
        is_deciding = standing is Standing.DECIDING
        if standing is Standing.MIDWAY or (is_deciding and not isinstance(error, Exception)):
            self._tell(error)
        elif is_deciding:
            with suppress(RuntimeError):  # no other rank is left
                announce_refusal(self, self.situation.call, error)

    def _tell(self, error: BaseException) -> None:
        """Tell the other ranks of an error midway in a call, and end their waits for this one."""
        said = describe_error(error)
        mine = Cause(self.table.rank, self.situation.place, said)
        first = self.lookout.board.publish(mine)
        self._end(said)
        order = "the first failure; the other ranks were told" if first == mine else f"after the first failure: {first}"
        error.add_note(f"rank {mine.rank}, {mine.place}: {order}")

    def _find_own(self, error: BrokenWaitError) -> BaseException | None:
        """Return the transport's own error, if that is the first failure, and nobody else's.

        NCCL raises only where something is posted: it does not notice that another process is gone. Gloo does.
        """
        lookout, awaited = self.lookout, error.awaited
        is_told = lookout.cut is not None or lookout.board.read() is not None or lookout.board.is_lost
        is_told = is_told or isinstance(error.__cause__, TransportError)  # of a creation that was given up
        is_others = is_told or is_on_host(awaited.group) or lookout.list_gone(awaited)
        return None if is_others else error.__cause__

    def _learn(self, awaited: Awaited) -> RankError:
        """Return the error of this rank, for which something did not come; find out why, and tell the others."""
        lookout, board = self.lookout, self.lookout.board
        cause = board.read() or board.lost_cause or lookout.blame(awaited, lookout.list_gone(awaited))
        place = self.situation.place
        self._end(str(cause))
        return RankError(self.table.rank, place, lookout.name(awaited), cause)

    def _end(self, why: str) -> None:
        """Refuse later calls, end all waits of this process, and wait until all ranks that are left know why."""
        self.situation.fail(why)
        self.lookout.break_all()
        self.lookout.board.linger()
        with self.situation.looking:  # the lookout may be about to break them, too
            destroy_groups(self.owned())

    def _refuse_exit(self) -> TransportError:
        return TransportError(
            f"rank {self.table.rank}, {self.situation.call}: got sys.exit() in the middle of a call, expected its end: "
            "other ranks wait for this one. Exit between calls, on every rank; or with a code other than 0, if this "
            "failed."
        )
