# SPDX-License-Identifier: Apache-2.0
"""The status of a long call: on a line of the terminal, and in the log.

Idea. Whoever takes long opens `showing(call)`; the code below it says what it does by `say`, wherever it is. After
`UNSEEN` seconds the line appears on standard error, if that is a terminal and this is the first process of its job,
and it is erased at the end. The logger `schedules.status` gets the same, at level INFO, at most every `LOG_EVERY`
seconds.

Invariant: a call that is inside of another has no line of its own.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from shutil import get_terminal_size
from time import monotonic
from typing import Final

from schedules.errors import printable

UNSEEN: Final = 2.0  # seconds
REDRAW_EVERY: Final = 0.1
LOG_EVERY: Final = 10.0
LINE_WIDTH: Final = 100  # characters at most
BAR_WIDTH: Final = 10
STATUS_LOG = logging.getLogger(__name__)


class StatusLine:
    """The line of one call: since when it runs, and when the line is due to be drawn and to be logged."""

    def __init__(self, call: str) -> None:
        self.call, self.start = call, monotonic()
        self.due, self.logged = self.start + UNSEEN, self.start + LOG_EVERY
        self.is_drawn = False
        self.is_shown = os.environ.get("RANK", "0") == "0" and sys.stderr is not None and sys.stderr.isatty()

    def say(self, doing: str, share: float | None = None) -> None:
        """Say what the call does, and the share of it that is done, if that is known."""
        now = monotonic()
        if self.is_shown and now >= self.due:
            self.due, self.is_drawn = now + REDRAW_EVERY, True
            self._write(self._describe(doing, share, now))
        if now >= self.logged:
            self.logged = now + LOG_EVERY
            STATUS_LOG.info("%s", self._describe(doing, share, now))

    def end(self) -> None:
        """Erase the line."""
        if self.is_drawn:
            self._write("")
            print("\r", end="", file=sys.stderr, flush=True)

    def _describe(self, doing: str, share: float | None, now: float) -> str:
        bar = "" if share is None else f"[{'#' * round(BAR_WIDTH * min(1.0, share)):<{BAR_WIDTH}}] "
        return printable(f"{self.call}: {bar}{now - self.start:.0f} s, {doing}")

    def _write(self, text: str) -> None:
        width = min(LINE_WIDTH, max(1, get_terminal_size().columns - 1))
        print(f"\r{text[:width]:<{width}}", end="", file=sys.stderr, flush=True)


_LINE: ContextVar[StatusLine | None] = ContextVar("line", default=None)


@contextmanager
def showing(call: str) -> Iterator[None]:
    """Return the context of a call that may take long.

    >>> with showing("plan"):
    ...     say("trying schedules", 0.5)
    """
    if _LINE.get() is not None:
        yield
        return
    line = StatusLine(call)
    token = _LINE.set(line)
    try:
        yield
    finally:
        _LINE.reset(token)
        line.end()


def say(doing: str, share: float | None = None) -> None:
    """Say what the call around does, and the share of it that is done; do nothing outside of one."""
    line = _LINE.get()
    if line is not None:
        line.say(doing, share)
