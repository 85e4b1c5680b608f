# SPDX-License-Identifier: Apache-2.0
"""Fibers: threads of which one runs at a time, in an order drawn from a seed, under a clock that is simulated.

A fiber runs until it pauses, sleeps, or waits for a signal. Then one of those that can go on is drawn. If there is
none, the clock jumps to the next event.

Invariant: whatever happens is determined by the seed; no fiber ever waits for real time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from random import Random
from threading import Lock as RealLock
from threading import Thread as RealThread
from typing import Any

LIMIT = 200_000  # switches after which a world counts as stuck


class Killed(BaseException):
    """The process of this fiber is dead."""


class StuckError(AssertionError):
    """Some fibers have not ended, and nothing will ever happen."""


class Process:
    """A simulated process: its fibers share its fate. `groups` counts the process groups that it has created."""

    def __init__(self, rank: int) -> None:
        self.rank, self.groups = rank, 0
        self.is_dead = self.is_stopped = False
        self.steps = self.computed = 0
        self.open: list[Any] = []
        self.place = "before its first action"


class Fiber:
    """A thread that runs only when it is given the turn."""

    def __init__(self, world: World, process: Process, name: str, target: Callable[[], Any]) -> None:
        self.world, self.process, self.name, self.target = world, process, name, target
        self.turn = RealLock()
        self.turn.acquire()
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_over = False
        self.alarm = 0  # the number of the wait: a timer of an earlier one is void
        self.thread = RealThread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.turn.acquire()
        try:
            if not self.process.is_dead:
                self.result = self.target()
        except BaseException as error:
            self.error = error
        self.is_over = True
        self.world.leave(self)

    @property
    def can_run(self) -> bool:
        """False while its process is stopped, which does not stop its device."""
        return not self.process.is_stopped or self.process.is_dead or self.name == "device"


class World:
    """Processes, fibers, clock, and the random numbers that decide everything."""

    def __init__(self, random: Random) -> None:
        self.random, self.now, self.switches = random, 0.0, 0
        self.ready: list[Fiber] = []
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.fibers: list[Fiber] = []
        self.processes: list[Process] = []
        self.main = RealLock()
        self.main.acquire()
        self.current: Fiber | None = None
        self.left = set[Fiber]()
        self.failure: BaseException | None = None
        self.log: list[str] = []
        self.on_death: list[Callable[[Process], None]] = []
        self.on_step: Callable[[Process, str], None] = lambda process, what: None
        self.numbers = 0

    def start(self, process: Process, name: str, target: Callable[[], Any]) -> Fiber:
        """Start a fiber of a process."""
        fiber = Fiber(self, process, name, target)
        self.fibers.append(fiber)
        self.ready.append(fiber)
        return fiber

    def run(self, mains: list[Fiber]) -> None:
        """Run until these fibers are over; then kill every process, and end what is left of all fibers."""
        self.left = set(mains)
        try:
            self._pass_on(None)
            self.main.acquire()
            if self.failure is not None:
                raise self.failure
        finally:
            self.left.clear()
            for process in self.processes:
                self.kill(process)
            self._bury()

    def _pass_on(self, giver: Fiber | None) -> bool:
        """Give the turn to a fiber that can run, or back to `run` if that fails; return whether it is the giver."""
        self.current = None
        try:
            fiber = self._choose()
        except BaseException as error:
            self.failure = error
            self.main.release()
            return False
        self.current = fiber
        if fiber is not giver:
            fiber.turn.release()
        return fiber is giver

    def _choose(self) -> Fiber:
        """Return one of the fibers that can run; while there is none, let time pass until the next event."""
        while True:
            able = [fiber for fiber in self.ready if fiber.can_run]
            if able:
                self.switches += 1
                if self.switches > LIMIT:
                    raise StuckError(f"got {LIMIT} switches, expected an end: {self._report()}")
                fiber = self.random.choice(able)
                self.ready.remove(fiber)
                if not fiber.is_over:
                    return fiber
            elif self.events:
                self.now, _, event = heapq.heappop(self.events)
                event()
            else:
                raise StuckError(f"got no event, expected all ranks to end: {self._report()}")

    def leave(self, fiber: Fiber) -> None:
        """Pass the turn on from a fiber that is over, and whose process ends with it if it is the main one."""
        self.current = None
        if fiber in self.left:
            self.left.remove(fiber)
            self.kill(fiber.process)
        if self.left:
            self._pass_on(fiber)
        else:
            self.main.release()

    def _bury(self) -> None:
        """End all fibers: each raises `Killed` wherever it is, as often as it takes."""
        for fiber in self.fibers:
            while not fiber.is_over:
                self.current = fiber
                fiber.turn.release()
                self.main.acquire()
            fiber.thread.join()
        self._forget()

    def _forget(self) -> None:
        """Drop what refers to the processes' objects, which would else live as long as the world."""
        for fiber in self.fibers:
            fiber.target = fiber.process.open.clear
        for rows in (self.fibers, self.ready, self.events, self.on_death):
            rows.clear()
        self.on_step = lambda process, what: None

    def _report(self) -> str:
        return "; ".join(f"{one.name} of rank {one.process.rank}" for one in self.fibers if not one.is_over)

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Let something happen at a time."""
        self.numbers += 1
        heapq.heappush(self.events, (max(time, self.now), self.numbers, event))

    def wake(self, fiber: Fiber) -> None:
        """Let a fiber go on, unless it can already."""
        if fiber not in self.ready and not fiber.is_over:
            self.ready.append(fiber)

    def fiber(self) -> Fiber:
        """Return the fiber that runs; raise `Killed` if its process is dead."""
        fiber = self.current
        assert fiber is not None, "a fiber runs"
        if fiber.process.is_dead:
            raise Killed
        return fiber

    @property
    def process(self) -> Process:
        """The process that runs."""
        return self.fiber().process

    @property
    def is_main(self) -> bool:
        """True if the main thread of its process runs."""
        return self.fiber().name == "script"

    def block(self) -> None:
        """Give the turn away until somebody wakes this fiber."""
        fiber = self.fiber()
        if not self._pass_on(fiber):
            fiber.turn.acquire()
        if fiber.process.is_dead:
            raise Killed

    def pause(self) -> None:
        """Let others run first, or not."""
        self.wake(self.fiber())
        self.block()

    def sleep(self, seconds: float) -> None:
        """Return after so many simulated seconds."""
        Signal(self).wait(seconds)

    def step(self, what: str) -> None:
        """Count a step of the running process, at which a fault may strike it, and let others run."""
        process = self.process
        process.steps += 1
        self.on_step(process, what)
        self.pause()

    def kill(self, process: Process) -> None:
        """End a process: its fibers raise `Killed` once they run, and its connections close."""
        if process.is_dead:
            return
        process.is_dead = True
        for fiber in self.fibers:
            if fiber.process is process and fiber is not self.current:
                self.wake(fiber)
        for listener in self.on_death:
            listener(process)


class Signal:
    """Something that happens once, for which fibers wait; also a `threading.Event`."""

    def __init__(self, world: World) -> None:
        self.world, self.is_given = world, False
        self.waiting: list[Fiber] = []

    def set(self) -> None:
        """Let it happen."""
        self.is_given = True
        for fiber in self.waiting:
            self.world.wake(fiber)
        self.waiting.clear()

    def is_set(self) -> bool:
        """Return whether it has happened."""
        return self.is_given

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it happens, at most so many seconds; return whether it has."""
        world, fiber = self.world, self.world.fiber()
        fiber.alarm += 1
        number, over = fiber.alarm, []

        def ring() -> None:
            if fiber.alarm == number:
                over.append(True)
                world.wake(fiber)

        if timeout is not None:
            world.at(world.now + timeout, ring)
        while not self.is_given and not over:
            if fiber not in self.waiting:
                self.waiting.append(fiber)
            world.block()
        fiber.alarm += 1
        if fiber in self.waiting:
            self.waiting.remove(fiber)
        return self.is_given


class Lock:
    """A `threading.Lock` between fibers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.holder: Fiber | None = None
        self.freed = Signal(world)

    def __enter__(self) -> Lock:
        fiber = self.world.fiber()
        while self.holder is not None and not self.holder.is_over:
            self.freed.wait()
        self.holder, self.freed = fiber, Signal(self.world)
        return self

    def __exit__(self, *_: object) -> None:
        self.holder = None
        self.freed.set()


class Queue:
    """A `queue.SimpleQueue` between fibers."""

    def __init__(self, world: World) -> None:
        self.world, self.items, self.arrived = world, deque[Any](), Signal(world)

    def put(self, item: Any) -> None:
        """Append an item."""
        self.items.append(item)
        self.arrived.set()

    def get(self) -> Any:
        """Return the first item; wait for one if there is none."""
        while not self.items:
            self.arrived = Signal(self.world)
            self.arrived.wait()
        return self.items.popleft()
