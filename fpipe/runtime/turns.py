# SPDX-License-Identifier: Apache-2.0
"""Let only one thread at a time into fpipe.

All threads of a process share torch's default generator of each device, which a step seeds; and both steps and captures
put tensors into the pipeline's only skeleton. So while one thread is inside, all others wait. A call that communicates
with other processes must not wait, since the thread inside might itself be waiting for it through another process; it
raises instead.

Runs when a pipeline is built and in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, current_thread
from typing import Final

from fpipe.errors import TransportError

TURN: Final = RLock()  # one per process, like the state that it guards


@contextmanager
def wait_for_turn() -> Iterator[None]:
    """Wait until no other thread is inside."""
    with TURN:
        yield


@contextmanager
def claim_turn(what: str) -> Iterator[None]:
    """Raise `TransportError` if another thread is inside; `what` names this thread's call in the error."""
    if not TURN.acquire(blocking=False):
        raise TransportError(
            f"{what}, in thread {current_thread().name!r}: got another thread that is inside fpipe, expected one "
            "thread at a time: ranks are processes, and the messages of two threads would mix. Call all functions of a "
            "pipeline from one thread, or take turns in the same order on every rank."
        )
    try:
        yield
    finally:
        TURN.release()
