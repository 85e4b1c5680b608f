# SPDX-License-Identifier: Apache-2.0
"""Signals that ask a job to end, so that it saves and stops, on every rank after the same step.

Problem. A scheduler that takes a machine back sends a signal, and kills the job some time later. The signal ends a
process wherever it is; it may reach one process only, and the others at other times, while they wait for each other.

Idea. Inside a `with`, a signal is only noted. Between two steps all ranks ask each other whether any has one.

Invariants. Nothing outlives the `with`: the handlers from before are there again. A signal that nobody was told of is
then sent again, to them.

Runs between steps.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fpipe.errors import InputError
from fpipe.pipelines.handshake import agree_on_arguments, call_together
from fpipe.pipelines.pipeline import Pipeline


@contextmanager
def catch_signals(pipe: Pipeline, signals: Sequence[int] = (signal.SIGTERM,)) -> Iterator[Callable[[], bool]]:
    """Catch these signals inside a `with`, and yield a function that returns whether any rank has received one.

    Every rank enters the `with`, in its main thread, and calls the function after the same steps: it returns the same
    on all of them, and costs one small message. So all save after the same step, and stop:

        with fpipe.catch_signals(pipe) as is_caught:
            for i in range(done, steps):
                ...
                if is_caught():
                    fpipe.save(pipe, path, params=params, buffers=buffers, state=state, step=i + 1)
                    break

    At the end, the previous handlers are restored. If a signal came that the function has not reported, it is then sent
    again, unless an exception ends the `with`.

    Raise `InputError`, on every rank, outside the main thread, and for a signal that can't be caught.

    >>> import signal, torch, fpipe
    >>> from schedules import gpipe
    >>> pipe = fpipe.pipeline(
    ...     torch.nn.Linear(2, 1), example=(torch.ones(2, 2),), loss=torch.mean, schedule=gpipe(1, 2)
    ... )
    >>> with fpipe.catch_signals(pipe) as is_caught:
    ...     before = is_caught()
    ...     signal.raise_signal(signal.SIGTERM)
    ...     before, is_caught()
    (False, True)
    """
    with call_together(catch_signals, {"pipe": pipe, "signals": signals}):
        _require_main_thread()
        numbers = sorted({*map(int, signals)})
        handlers = {number: _handler(number) for number in numbers}
        agree_on_arguments(pipe, signals=numbers)
    caught: list[int] = []
    told = False

    def is_caught() -> bool:
        nonlocal told
        with pipe.ranks.enter_call("a question about signals"):
            told = pipe.ranks.agree_if_any(bool(caught))
        return told

    try:
        for number in numbers:
            signal.signal(number, lambda number, _: caught.append(number))
        yield is_caught
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if caught and not told:
        signal.raise_signal(caught[0])


def _require_main_thread() -> None:
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        raise InputError(
            f"catch_signals: got the thread {thread.name!r}, expected the main thread: Python delivers signals only to "
            "that one. Enter the with statement there, around the loop."
        )


def _handler(number: int) -> Any:
    """Return what handles a signal now; raise `InputError` if nothing else can."""
    try:
        before = signal.getsignal(number)
        signal.signal(number, before)
    except (ValueError, OSError, TypeError) as error:
        raise InputError(
            f"signals: got {number}, expected numbers of signals that Python can catch ({error}). Pass, for example, "
            "[signal.SIGTERM, signal.SIGUSR1]."
        ) from error
    return before
