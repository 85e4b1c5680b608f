# SPDX-License-Identifier: Apache-2.0
"""Measured timelines, in the same form as simulated ones.

Problem. Measuring inside the executor's loop slows down every step, recorded or not; and on an accelerator, the host's
clock times launches, not computations.

Idea. The loop contains no clock. A recorded execution runs the same loop over a program with wrapped handlers. It sits
between the loop and the driver, so every wait passes through it. Times are read from a `Stopwatch`: the host's clock,
or events on the device's current stream, which are read after the step. Nothing is synchronized within the step.

The span of a compute action is the time during which it ran. The span of a transfer is the time during which the rank
waited for it: `RECV_F`, `RECV_B`, `RECV_G` for a payload, `WAIT_F`, `WAIT_B`, `WAIT_G` for a send to finish. Transfers
that were already done have no span. The time between spans was spent on posting.

Not run on an accelerator yet.

Runs in every step that is recorded; timers are added once per plan.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cache, partial
from time import perf_counter
from typing import Any, Protocol, TypeAlias, cast

import torch

from fpipe.network.ranks import Ranks
from fpipe.network.waiting import has_streams
from fpipe.runtime.contract import StageLike
from fpipe.runtime.executor import ActionHandler, Execution, Inputs, LinkedProgram, Outcome
from fpipe.runtime.handlers import TAKERS
from fpipe.runtime.transport import Payload, Transport, posted_action
from schedules import Action, Span
from schedules.language.actions import wait_of

RecordSpan: TypeAlias = Callable[[Span], None]
"""The user's function, which is called with each span; times are in seconds of `time.perf_counter`."""
TimeMark: TypeAlias = Any
"""A point in time that a `Stopwatch` can read."""


class Stopwatch(Protocol):
    """The interface of a clock that marks points in time, and records the spans between them."""

    def mark(self) -> TimeMark:
        """Return a mark of the current time."""

    def lap(self, rank: int, action: Action, start: TimeMark, end: TimeMark) -> None:
        """Record, now or in `read`, that `rank` ran or waited for `action` between two marks."""

    def read(self) -> None:
        """Record the remaining spans, after the step."""


class HostStopwatch:
    """The host's clock; spans are recorded immediately."""

    def __init__(self, record: RecordSpan) -> None:
        self.record, self.mark = record, perf_counter

    def lap(self, rank: int, action: Action, start: float, end: float) -> None:
        """Record the span."""
        self.record(Span(rank, action, start, end))

    def read(self) -> None:
        """Do nothing: every span is recorded already."""


class StreamEvent(Protocol):
    """An event on an accelerator's stream, reached once all earlier work is done: `torch.Event`, with timing."""

    def synchronize(self) -> None:
        """Block until the event is reached."""

    def elapsed_time(self, other: Any) -> float:
        """Return the milliseconds from this event to `other`."""


class DeviceStopwatch:
    """Events on the current stream of a device; spans are recorded after the step.

    Two events only give the time between them. So after the step, the host waits for a last event and reads its own
    clock right then; the other times are counted back from it. The host notices the event some microseconds late.

    - `mark()` records an event on the stream; `clock()` reads the host's clock.
    - `laps`: rank, action, start event and end event.
    """

    def __init__(
        self, record: RecordSpan, mark: Callable[[], StreamEvent], clock: Callable[[], float] = perf_counter
    ) -> None:
        self.record, self.mark, self.clock = record, mark, clock
        self.laps: list[tuple[int, Action, StreamEvent, StreamEvent]] = []

    def lap(self, rank: int, action: Action, start: StreamEvent, end: StreamEvent) -> None:
        """Keep the events until they can be read."""
        self.laps.append((rank, action, start, end))

    def read(self) -> None:
        """Wait for the device, then record all spans in the order of the calls of `lap`."""
        last = self.mark()
        last.synchronize()
        now = self.clock()
        for rank, action, start, end in self.laps:
            began, ended = (now - mark.elapsed_time(last) / 1000 for mark in (start, end))
            self.record(Span(rank, action, began, max(began, ended)))


def stopwatch(device: torch.device, record: RecordSpan) -> Stopwatch:
    """Return the stopwatch for computations on `device`."""
    if not has_streams(device):
        return HostStopwatch(record)

    def mark() -> StreamEvent:
        event = torch.Event(device, enable_timing=True)
        event.record(torch.accelerator.current_stream(device))
        return event

    return DeviceStopwatch(record, mark)


class RecordedExecution(Execution):
    """An execution whose waits are timed, and, if its program comes from `add_timers`, its compute actions too."""

    def __init__(
        self, watch: Stopwatch, rank: int, program: LinkedProgram, transport: Transport, inputs: Inputs
    ) -> None:
        super().__init__(rank, program, transport, inputs)
        self.watch = watch

    def run(self) -> Generator[Any, None, Outcome]:
        """Interpret the program and time its waits: each lasts from yielding a handle until the driver resumes."""
        running = super().run()
        mark, lap, rank = self.watch.mark, self.watch.lap, self.rank
        while True:
            try:
                handle = next(running)
            except StopIteration as stop:
                outcome: Outcome = stop.value
                return outcome
            start = mark()
            yield handle
            end, message = handle.end, handle.message
            lap(rank, wait_of(message) if end == "SEND" else posted_action(end, message), start, mark())


def run_recorded(
    ranks: Ranks,
    copies: Sequence[tuple[Mapping[int, LinkedProgram], Inputs]],
    device: torch.device,
    record: RecordSpan,
) -> list[dict[int, Outcome]]:
    """Run each copy's programs, from `add_timers`; return the outcomes. `record` gets the spans of actions and waits.

    Only the spans of the first copy in this process are recorded: those of others would be under the same ranks.
    """
    watch, silent = stopwatch(device, record), stopwatch(device, _ignore)

    def execution(k: int, rank: int, transport: Transport) -> Execution:
        programs, inputs = copies[k]
        return RecordedExecution(silent if k else watch, rank, programs[rank], transport, inputs)

    outcomes = ranks.run([partial(execution, k) for k in range(len(copies))])
    watch.read()
    return outcomes


def _ignore(span: Span) -> None:
    """Drop a span."""


def add_timers(program: LinkedProgram) -> LinkedProgram:
    """Return the program with timed handlers of compute actions, for a `RecordedExecution`; reuse it in every step.

    Transfers aren't timed: they only post, which takes negligible time. Nor is what takes the result of an action that
    posts something: the action is recorded once, when it posts.
    """
    wrapped, takers = cache(_add_timer), frozenset(TAKERS.values())
    instructions = (
        one if one.action.peer is not None or one.handler in takers else one._replace(handler=wrapped(one.handler))
        for one in program.instructions
    )
    return program._replace(instructions=tuple(instructions))


def _add_timer(handler: ActionHandler) -> ActionHandler:
    """Return the handler, timed by the stopwatch of the execution that calls it."""

    def timed(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
        execution = cast(RecordedExecution, run)
        watch = execution.watch
        start = watch.mark()
        values = handler(run, action, stage, arrived)
        watch.lap(execution.rank, action, start, watch.mark())
        return values

    return timed
