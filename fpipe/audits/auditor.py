# SPDX-License-Identifier: Apache-2.0
"""Audit the steps of one function: note drawn actions as they run, and run them again where the rank is idle.

Problem. To find a wrong result, everything must be computed twice, which nobody can pay for. But a pipeline leaves
every rank idle for a part of each step.

Idea. The executor yields the handles that it must wait for, and an audited execution sits between it and its driver,
as a recorded one does. Before the rank waits, drawn actions that take less time than it will wait are run again
(`fpipe.audits.idle`). So are they before it waits for the results of other ranks. What is left when it has them is run
again then: for free if the other ranks are still busy, as the next agreement shows, or else as far as the allowance
goes. If all ranks are in this process, none is ever idle.

Only handlers of drawn actions are wrapped, in the program of one step. All others cost nothing.

Runs in every step that is audited.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from fpipe.audits.audit import Audit, Rerun, find_chain, list_drawable
from fpipe.audits.idle import SLOWER, Allowance, IdleTimes
from fpipe.audits.replay import NotedCall, Replay
from fpipe.network.ranks import Ranks
from fpipe.runtime.contract import StageLike
from fpipe.runtime.executor import ActionHandler, Execution, Inputs, LinkedProgram, Outcome
from fpipe.runtime.transport import Payload, Transport
from schedules import Action

RESULTS, AFTER = "the results of a step", "the next agreement"


class HasPrograms(Protocol):
    """The plan of a copy of the pipeline."""

    @property
    def programs(self) -> Mapping[int, LinkedProgram]:
        """The program of each rank of this process."""


class Timetable:
    """The instructions of one rank's program that can be drawn, and where the rank is idle."""

    def __init__(self, program: LinkedProgram) -> None:
        self.drawable = list_drawable(program)
        self.idle = IdleTimes()


class Auditor:
    """The audit of the steps that one function runs.

    - `noting`, `running`: the time that may be added, to note actions and to run them again.
    - `tables`: by plan and rank. `replays`: the drawn actions of this step, with their ranks.
    - `idle`: how long this process waited at the end of its steps, for `RESULTS` and `AFTER` them; `used`: how much of
      that was used last.
    """

    def __init__(self, audit: Audit, ranks: Ranks) -> None:
        self.audit, self.ranks = audit, ranks
        share = audit.allowance / max(1, len(ranks.ranks_of)) / 2
        self.noting, self.running = Allowance(share), Allowance(share)
        self.numbers = count()
        self.tables: WeakKeyDictionary[HasPrograms, dict[int, Timetable]] = WeakKeyDictionary()
        self.idle, self.used = IdleTimes(), dict[str, float]()

    def run(self, parts: Mapping[int, HasPrograms], inputs: Mapping[int, Inputs]) -> list[dict[int, Outcome]]:
        """Run a step of each copy of the pipeline that this process plays; return their outcomes."""
        if AFTER in self.used:
            self.idle.add(AFTER, self.used[AFTER], self.ranks.idle)
        self.number, self.start = next(self.numbers), perf_counter()
        self.replays: list[tuple[int, Replay]] = []

        def execution(copy: int, rank: int, transport: Transport) -> Execution:
            part = parts[copy]
            tables = self.tables.setdefault(part, {})
            if rank not in tables:
                tables[rank] = Timetable(part.programs[rank])
            return self._prepare(copy, rank, part.programs[rank], tables[rank], transport, inputs[copy])

        outcomes = self.ranks.run([partial(execution, copy) for copy in inputs])
        self.used[RESULTS] = run_again([one for _, one in self.replays], self._predict(RESULTS))
        return outcomes

    def _predict(self, place: str) -> float:
        """Return for how many seconds this process will be idle at the end of a step."""
        return self.idle.predict(place) if self.ranks.processes else 0.0

    @contextmanager
    def watch_results(self) -> Iterator[None]:
        """Return the context in which this process waits for the results of other ranks."""
        start = perf_counter()
        yield
        self.idle.add(RESULTS, self.used[RESULTS], perf_counter() - start)

    def _prepare(
        self, copy: int, rank: int, program: LinkedProgram, table: Timetable, transport: Transport, inputs: Inputs
    ) -> Execution:
        """Return the execution of a rank, whose drawn actions are noted."""
        replays, around = [], defaultdict[int, list[Replay]](list)
        # A step without an allowance to note anything still learns how long the rank is idle.
        drawn = self.audit.draw(self.number, copy, rank, table.drawable) if self.noting.allows() else []
        for position in drawn:
            replays.append(Replay(program.instructions[position].action))
            for k in find_chain(program, position):
                around[k].append(replays[-1])
        self.replays += [(rank, one) for one in replays]
        idle = table.idle if self.ranks.processes else None
        return AuditedExecution(replays, idle, rank, add_notes(program, around), transport, inputs)

    def finish(self) -> None:
        """Run again what is left, and report; raise `CorruptionError` if other bits are made.

        Call it when the other ranks wait for nothing of this step any more from this one.
        """
        replays, free = [one for _, one in self.replays], self._predict(AFTER)
        used = run_again(replays, free)
        for one in replays:
            if one.is_ready and self.running.allows(one.seconds):
                used += one.compare(free - used)
                self.running.spend(one.paid)
        self.used[AFTER] = used
        passed = perf_counter() - self.start
        self.noting.spend(sum(one.noting for one in replays))
        self.noting.earn(passed)
        self.running.earn(passed)
        for rank, one in self.replays:
            one.drop()
            if self.audit.report is not None:
                self.audit.report(Rerun(self.number, rank, one.drawn, one.took, one.noting + one.paid))
        self.replays = []
        self.ranks.watch_idle()


class AuditedExecution(Execution):
    """An execution that runs noted actions again before it waits; `idle` is `None` if its waits are never idle."""

    def __init__(
        self,
        replays: Sequence[Replay],
        idle: IdleTimes | None,
        rank: int,
        program: LinkedProgram,
        transport: Transport,
        inputs: Inputs,
    ) -> None:
        super().__init__(rank, program, transport, inputs)
        self.replays, self.idle = replays, idle

    def run(self) -> Generator[Any, None, Outcome]:
        """Interpret the program, and use the time for which it would wait."""
        running, idle = super().run(), self.idle
        if idle is None:
            return (yield from running)
        while True:
            try:
                handle = next(running)
            except StopIteration as stop:
                outcome: Outcome = stop.value
                return outcome
            place = handle.end, handle.message
            used = run_again(self.replays, idle.predict(place))
            start = perf_counter()
            yield handle
            idle.add(place, used, perf_counter() - start)


def run_again(replays: Sequence[Replay], free: float) -> float:
    """Run those actions again that take less than `free` seconds together; return how many they took."""
    used = 0.0
    for one in replays:
        if one.is_ready and one.seconds * SLOWER <= free - used:
            used += one.compare(free - used)
    return used


def add_notes(program: LinkedProgram, around: Mapping[int, Sequence[Replay]]) -> LinkedProgram:
    """Return the program with handlers that note their calls, at the positions of the chains of these replays."""
    instructions = list(program.instructions)
    for k, replays in around.items():
        instructions[k] = instructions[k]._replace(handler=_add_note(instructions[k].handler, replays))
    return program._replace(instructions=tuple(instructions))


def _add_note(handler: ActionHandler, replays: Sequence[Replay]) -> ActionHandler:
    def noted(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
        for one in replays:
            one.before(run, NotedCall(handler, action, stage, arrived))
        start = perf_counter()
        values = handler(run, action, stage, arrived)
        seconds = perf_counter() - start
        for one in replays:
            one.after(run, action, values, seconds)
        return values

    return noted
