# SPDX-License-Identifier: Apache-2.0
"""Run the script of a case in a simulated world, and let faults strike."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any, NamedTuple

from tests.common.world.drawing import RAISED, TIMEOUT, Fault
from tests.common.world.fibers import Process, World
from tests.common.world.network import Network
from tests.common.world.patches import inhabit
from tests.common.world.scripts import Script

PROMPT = 8.0  # simulated seconds within which ranks that are alive learn of what is not silent


NAP = TIMEOUT / 4


class InjectedError(ValueError):
    """The fault of a case."""


class Finding(AssertionError):  # noqa: N818 - what the simulation looks for
    """A case did not end as promised."""


class Verdict(NamedTuple):
    """How a case ended, and what it took: `exact`, or the kinds of the faults, or that the model was refused."""

    ended: str
    runs: int
    switches: int
    seconds: float


@dataclass
class Strike:
    """A fault, how many of its steps have passed, and when and where it struck."""

    fault: Fault
    count: int = 0
    time: float | None = None
    place: str = ""

    def is_due(self) -> bool:
        """Count a step; return whether the fault strikes at it."""
        self.count += 1
        return self.count == self.fault.count + 1


class Trial:
    """One run of a script in a world, and the faults in it."""

    def __init__(self, script: Script, random: Random, faults: tuple[Fault, ...]) -> None:
        self.script, self.case, self.random = script, script.case, random
        self.strikes = [Strike(fault) for fault in faults]
        self.world = World(random)
        processes = self.case.setup.processes
        limit = timedelta(seconds=TIMEOUT)
        self.network = Network(self.world, processes, limit, self.case.is_kept, self.delay)
        self.world.on_step = self.on_step
        self.armed = [False] * processes
        self.ended: dict[int, float] = {}

    @property
    def struck(self) -> list[Strike]:
        """The faults that have struck and that others notice."""
        return [one for one in self.strikes if one.time is not None and one.fault.kind != "nap"]

    def delay(self, ends: tuple[int, int], tag: Any) -> float | None:
        """Return how long a message takes; lose those that a fault names."""
        for one in self.strikes:
            if one.fault.kind == "lose" and one.fault.builds != all(self.armed) and one.is_due():
                self.strike(one, f"message of {ends[0]} to {ends[1]}")
                return None
        return self.random.expovariate(1) * self.case.delay

    def strike(self, one: Strike, place: str) -> None:
        """Note that a fault strikes now."""
        one.time, one.place = self.world.now, place

    def on_step(self, process: Process, what: str) -> None:
        """Let computing take time, and let faults strike if it is time for them."""
        if what == "compute":
            self.world.sleep(self.random.random() * self.case.delay)
        for one in self.strikes:
            fault = one.fault
            if fault.kind in ("lose", "leave") or fault.rank != process.rank or fault.what not in ("any", what):
                continue
            if fault.builds == self.armed[process.rank] or (fault.kind in RAISED and not self.world.is_main):
                continue
            if one.is_due():
                self.strike(one, process.place)
                self.afflict(process, fault.kind)

    def afflict(self, process: Process, kind: str) -> None:
        """Let a fault happen to the process that runs."""
        world = self.world
        if kind in ("die", "disk"):
            world.kill(process)
        elif kind in ("stop", "nap"):
            process.is_stopped = True
            pause = NAP if kind == "nap" else 6 * TIMEOUT
            world.at(world.now + pause, partial(setattr, process, "is_stopped", False))
        else:
            raise {"raise": InjectedError("injected"), "interrupt": KeyboardInterrupt(), "exit": SystemExit(0)}[kind]

    def between(self, rank: int, i: int) -> bool:
        """Return whether a rank's script goes on after a step."""
        for one in self.strikes:
            if one.fault.kind == "leave" and one.fault.rank == rank and one.fault.count % self.case.steps == i:
                self.strike(one, "between calls")
                return False
        return True

    def run(self) -> list[BaseException | None]:
        """Run it; return how each rank's script ended."""

        def main(rank: int) -> None:
            try:
                self.script.train(rank, lambda: self.arm(rank), partial(self.between, rank))
            finally:
                self.ended[rank] = self.world.now

        with inhabit(self.network):
            mains = [
                self.world.start(process, "script", partial(main, process.rank)) for process in self.world.processes
            ]
            self.world.run(mains)
        return [fiber.error for fiber in mains]

    def arm(self, rank: int) -> None:
        """Note that a rank has built its pipeline."""
        self.armed[rank] = True
