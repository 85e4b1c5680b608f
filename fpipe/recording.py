# SPDX-License-Identifier: Apache-2.0
"""Measured timelines, in the form of the simulated ones.

Problem. What is measured inside the executor's loop costs every step, also where nobody asks; and on an accelerator the
host's clock sees launches, not computations.

Idea. The loop knows nothing of clocks. A recorded execution runs the same loop over a program whose handlers are
wrapped, and stands between it and the driver, where every wait passes. Times are read from a `Stopwatch`: the host's
clock, or events on the device's current stream, which are read when the step is over. Nothing is synchronised within
the step.

A span of a compute action is the time in which it ran. A span of a transfer is the time for which the rank waited for
it: `RECV_F`, `RECV_B`, `RECV_G` for what it needed, `WAIT_F`, `WAIT_B`, `WAIT_G` for a send to be done. Transfers that
were done when they were asked for have none. What is between spans went into posting.

Not yet run on an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from functools import cache
from time import perf_counter
from typing import Any, Protocol, TypeAlias, cast

import torch

from fpipe.executor import Execution, Handler, Inputs, Linked, Outcome, StageLike
from fpipe.transport.contract import Handle, Payload, Ranks, Transport, awaited
from schedules import Action, Span

Record: TypeAlias = Callable[[Span], None]
"""What users pass: it is called with each span, in seconds of `time.perf_counter`."""
Mark: TypeAlias = Any
"""A point in time that a `Stopwatch` knows how to read."""


class Stopwatch(Protocol):
    """Marks points in time, and makes spans of them."""

    def mark(self) -> Mark:
        """Now."""

    def lap(self, rank: int, action: Action, start: Mark, end: Mark) -> None:
        """`rank` was in `action` between two marks; its span is recorded now, or by `read`."""

    def read(self) -> None:
        """Record what is left, after the step."""


class HostStopwatch:
    """The host's clock; spans are recorded at once."""

    def __init__(self, record: Record) -> None:
        self.record, self.mark = record, perf_counter

    def lap(self, rank: int, action: Action, start: float, end: float) -> None:
        """Record the span."""
        self.record(Span(rank, action, start, end))

    def read(self) -> None:
        """Nothing is left."""


class Event(Protocol):
    """What an accelerator's stream passes after all that it was given before: `torch.Event`, with timing."""

    def synchronize(self) -> None:
        """Block until it has been passed."""

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds until `other` is passed."""


class DeviceStopwatch:
    """Events on the current stream of a device; spans are recorded when the step is over.

    They know the time between each other only. So a last event is waited for after the step, and the host's clock read
    right then; all others are counted back from it. That is as late as the host is told, some microseconds.

    - `mark()` makes an event and gives it to the stream; `clock()` is the host's.
    - `laps`: rank, action, and the events at its two ends.
    """

    def __init__(self, record: Record, mark: Callable[[], Event], clock: Callable[[], float] = perf_counter) -> None:
        self.record, self.mark, self.clock = record, mark, clock
        self.laps: list[tuple[int, Action, Event, Event]] = []

    def lap(self, rank: int, action: Action, start: Event, end: Event) -> None:
        """Keep the events until they can be read."""
        self.laps.append((rank, action, start, end))

    def read(self) -> None:
        """Wait for the device, and record all spans in the order in which they ended here."""
        last = self.mark()
        last.synchronize()
        now = self.clock()
        for rank, action, start, end in self.laps:
            began, ended = (now - mark.elapsed_time(last) / 1000 for mark in (start, end))
            self.record(Span(rank, action, began, max(began, ended)))


def stopwatch(device: torch.device, record: Record) -> Stopwatch:
    """The one for what is computed on `device`."""
    if device.type == "cpu":
        return HostStopwatch(record)

    def mark() -> Event:
        event = torch.Event(device, enable_timing=True)
        event.record(torch.accelerator.current_stream(device))
        return event

    return DeviceStopwatch(record, mark)


class RecordedExecution(Execution):
    """An execution whose waits are timed, and, if its program comes from `timed`, its compute actions."""

    def __init__(self, rank: int, watch: Stopwatch, program: Linked, transport: Transport, inputs: Inputs) -> None:
        super().__init__(program, transport, inputs)
        self.rank, self.watch = rank, watch

    def run(self) -> Generator[Handle, None, Outcome]:
        """Interpret the program; from handing over a handle to being called again is a wait."""
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
            lap(rank, awaited(handle), start, mark())


def recorded(
    ranks: Ranks, programs: Mapping[int, Linked], inputs: Inputs, device: torch.device, record: Record
) -> dict[int, Outcome]:
    """Run each rank's program, from `timed`, as `Ranks.run` does; `record` gets spans of actions and of waits."""
    watch = stopwatch(device, record)
    outcomes = ranks.run(lambda rank, transport: RecordedExecution(rank, watch, programs[rank], transport, inputs))
    watch.read()
    return outcomes


def timed(program: Linked) -> Linked:
    """The program for a `RecordedExecution`, the same in every step: handlers of compute actions are wrapped.

    Transfers only post, and take no time to speak of.
    """
    wrapped = cache(_wrapped)
    instructions = (
        one._replace(handler=wrapped(one.handler)) if one.action.peer is None else one for one in program.instructions
    )
    return program._replace(instructions=tuple(instructions))


def _wrapped(handler: Handler) -> Handler:
    """The handler, timed by the stopwatch of the execution that it is called for."""

    def timed(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
        recorded = cast(RecordedExecution, run)
        watch = recorded.watch
        start = watch.mark()
        values = handler(run, action, stage, arrived)
        watch.lap(recorded.rank, action, start, watch.mark())
        return values

    return timed
