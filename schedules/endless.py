# SPDX-License-Identifier: Apache-2.0
"""A program without an end: what each rank does between its updates, for as many batches as come.

Problem. A schedule that updates weights in flight never drains between batches. It is a generator for a given number of
microbatches, and nobody knows how many will come.

Idea. A window is what a rank does up to the update of a batch. Windows are all alike but for the first ones, which fill
the pipeline, and the last ones, which drain it. So programs of some batches, and of one and two more, tell all windows
of any number: those that they begin with alike, the one that repeats, and those that they end with alike.

Invariant: the windows of a rank, put together, are its lowered program for that number of batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from schedules.arguments import is_size
from schedules.checking.rules import check
from schedules.errors import ScheduleError, SizeError
from schedules.language.actions import KINDS, Action
from schedules.language.graph import Graph
from schedules.language.schedule import Schedule
from schedules.lowering.program import Program, lower

Window = tuple[Action, ...]


def lengthen(schedule: Schedule, batches: int) -> Schedule:
    """Return the schedule for so many times as many microbatches, made by the same factories from the same arguments.

    Raise `SizeError` for a schedule that is not made from a number of microbatches, as by `from_rows`.

    >>> from schedules import pipedream, split_backward
    >>> lengthen(split_backward(pipedream(ranks=2, microbatches=1)), batches=3)
    split_backward(schedule=pipedream(ranks=2, microbatches=3))
    """
    given = dict(schedule.arguments)
    inner = given.get("schedule")
    if isinstance(inner, Schedule):
        given["schedule"] = lengthen(inner, batches)
    elif "rows" not in given and is_size(given.get("microbatches")):
        given["microbatches"] = batches * schedule.microbatches
    made = schedule.factory.make(tuple(given.items()))
    if made.microbatches != batches * schedule.microbatches:
        expected = "one whose factory takes the number of microbatches"
        raise SizeError.of("lengthen", "schedule", schedule, expected, "Write it as a generator, with @schedule.")
    return made


@dataclass(frozen=True)
class EndlessProgram:
    """The windows of every rank, for a schedule of one batch, repeated without a flush.

    - `schedule`: of one batch; every stage updates once, after its last microbatch. `graph`: the stage graph.

    >>> from schedules import chain, pipedream
    >>> program = EndlessProgram(pipedream(ranks=2, microbatches=1), chain(2))
    >>> [" ".join(map(str, program.window(1, k))) for k in (2, 7)]
    ['1F2 1WAIT_B0>0 1B2 1SEND_B2>0 1RECV_F3<0 1U2', '1F7 1WAIT_B5>0 1B7 1SEND_B7>0 1RECV_F8<0 1U7']
    >>> program.reach
    (2, 1)
    """

    schedule: Schedule
    graph: Graph

    @cached_property
    def known(self) -> int:
        """The number of batches whose windows tell all others.

        Raise `ScheduleError` for an incorrect schedule, and for one whose windows do not repeat.
        """
        check(lengthen(self.schedule, 2), self.graph)
        most = 4 * self.schedule.stages + 8
        count = 2
        while count <= most:
            if all(self._repeats(rank, count) for rank in range(self.schedule.ranks)):
                longest = lengthen(self.schedule, count + 2)
                check(longest, self.graph)
                _require_ascending(longest)
                return count
            count *= 2
        check(lengthen(self.schedule, most), self.graph)
        problem = f"is not the same for every batch, in {most} batches"
        repair = "With more microbatches, a rank's order must begin with its order for fewer."
        raise ScheduleError("repeating", 0, 0, None, problem, repair)

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """Per rank, how many batches after its own a window touches: if one of them does not exist, it is another."""
        return tuple(self.known - self._count_alike(rank, self.known) for rank in range(self.schedule.ranks))

    @cached_property
    def program(self) -> Program:
        """The program for the known number of batches."""
        return self._program(self.known)

    def window(self, rank: int, k: int, batches: int | None = None) -> Window:
        """Return what `rank` does after update `k - 1`, up to update `k`, of so many batches.

        Without `batches`, there are more than the window touches.
        """
        known, alike = self.known, self.known - self.reach[rank]
        if batches is not None and batches < known:
            return self._windows(batches)[rank][k]
        if batches is not None and k >= batches - self.reach[rank]:
            return self._shift(self._windows(known)[rank][k - (batches - known)], batches - known)
        last = min(k, alike - 1)
        return self._shift(self._windows(known)[rank][last], k - last)

    def _repeats(self, rank: int, count: int) -> bool:
        """Return whether one batch more adds one window to the program of so many batches, and again."""
        alike = self._count_alike(rank, count)
        return alike > 0 and all(self._grows(rank, more, alike + more - count) for more in (count, count + 1))

    def _grows(self, rank: int, count: int, alike: int) -> bool:
        """Return whether the program of one batch more has a repeated window after those that are alike."""
        shorter, longer = (self._windows(batches)[rank] for batches in (count, count + 1))
        repeated = [self._shift(window, 1) for window in shorter[alike - 1 :]]
        return longer[:alike] == shorter[:alike] and list(longer[alike:]) == repeated

    def _count_alike(self, rank: int, count: int) -> int:
        """Return how many windows the programs of so many batches, and of one more, begin with alike."""
        pairs = zip(self._windows(count)[rank], self._windows(count + 1)[rank], strict=False)
        return next((k for k, (one, other) in enumerate(pairs) if one != other), count)

    def _windows(self, batches: int) -> tuple[tuple[Window, ...], ...]:
        return _list_windows(self._program(batches), self.schedule.microbatches)

    def _program(self, batches: int) -> Program:
        return lower(lengthen(self.schedule, batches), self.graph)

    def _shift(self, window: Window, batches: int) -> Window:
        by = batches * self.schedule.microbatches
        return tuple([action._replace(microbatch=action.microbatch + by) for action in window]) if by else window


def _require_ascending(schedule: Schedule) -> None:
    """Raise `ScheduleError` if a microbatch uses an older version of the weights than one before it."""
    versions = [] if schedule.version is None else [schedule.version(i) for i in range(schedule.microbatches)]
    for i, (before, version) in enumerate(pairwise(versions), 1):
        if version < before:
            problem = f"declares version {version} for microbatch {i} after {before}, so no version could ever be freed"
            raise ScheduleError("repeating", 0, 0, None, problem, "Declare versions that do not descend.")


@lru_cache(maxsize=64)
def _list_windows(program: Program, each: int) -> tuple[tuple[Window, ...], ...]:
    """Return the windows of all ranks; `each` is the number of microbatches of a batch."""
    ranks, batches = range(program.schedule.ranks), program.schedule.microbatches // each
    return tuple(
        _split(rank, stream, batches, each, program.schedule)
        for rank, stream in zip(ranks, program.streams(ranks), strict=True)
    )


def _split(rank: int, actions: Iterable[Action], batches: int, each: int, schedule: Schedule) -> tuple[Window, ...]:
    """Return the windows of one rank. Raise `ScheduleError` unless every stage updates once per batch, at its end."""
    stages = schedule.placement.stages_on(rank)
    windows, window, position, updated = list[Window](), list[Action](), -1, set[int]()
    for position, action in enumerate(actions):
        if len(updated) == len(stages) and KINDS[action.kind].does != "SEND" and len(windows) < batches - 1:
            windows.append(tuple(window))
            window, updated = [], set()
        window.append(action)
        if action.kind == "U":
            expected = (len(windows) + 1) * each - 1
            if action.microbatch != expected or action.stage in updated:
                problem = f"is not the one update of a batch of {each} microbatches, after microbatch {expected}"
                repair = "Each update must apply one batch: choose as many microbatches as come before it."
                raise ScheduleError("repeating", rank, position, action, problem, repair)
            updated.add(action.stage)
    windows.append(tuple(window))
    if len(windows) != batches or len(updated) != len(stages):
        problem = (
            f"ends in window {len(windows)} of {batches}, with updates of {len(updated)} of its {len(stages)} stages"
        )
        repair = "Update every stage once per batch, after its last backward."
        raise ScheduleError("repeating", rank, position, None, problem, repair)
    return tuple(windows)
