# SPDX-License-Identifier: Apache-2.0
"""Where one rank stands: what each microbatch has been through on each of its stages.

The rules of `check` share this book, so that every action is written down once. It stays small while microbatches
finish nearly in order: what is in flight, and how many have finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from schedules.actions import KINDS, Action
from schedules.authoring import Schedule
from schedules.errors import ScheduleError
from schedules.graph import Graph

Life = Mapping[str, tuple[str, str]]


class Finished:
    """A set of numbers that stays small while they come nearly in order: a full prefix, and what is ahead."""

    def __init__(self) -> None:
        self.prefix, self.ahead = 0, set[int]()

    def __contains__(self, number: int) -> bool:
        return number < self.prefix or number in self.ahead

    def __len__(self) -> int:
        return self.prefix + len(self.ahead)

    def add(self, number: int) -> None:
        """Put a number in."""
        if number == self.prefix:
            self.prefix += 1
            while self.prefix in self.ahead:
                self.ahead.remove(self.prefix)
                self.prefix += 1
        else:
            self.ahead.add(number)


class Work:
    """One stage on one rank: `lives` of what is in flight, by unit, and which units have `finished`.

    A unit is a microbatch, or a slice of one, numbered among those whose route brings them here: `count` of them.
    `versions` counts the updates of the weights, the last of them with gradients up to microbatch `applied`; `began` is
    the version with which units in flight began, where it is not the newest; `kept`, the most that were kept at once.
    `summed` says whether the gradients of the stage's replicas have been added up; `tied`, whether another stage has
    parameters of this one.
    """

    def __init__(self, schedule: Schedule, rank: int, stage: int, tied: bool) -> None:
        routes = schedule.placement.routes
        mine = [route for route, homes in enumerate(routes) if homes[stage] == rank]
        self.first, self.stride = (0, 1) if len(mine) == len(routes) else (mine[0], len(routes))
        self.slices = schedule.slices
        self.count = len(range(self.first, schedule.microbatches, self.stride)) * schedule.slices
        self.replicated, self.tied = self.stride > 1, tied
        self.lives: dict[int, str] = {}
        self.finished = Finished()
        self.versions, self.kept, self.applied = 0, 1, -1
        self.began: dict[int, int] = {}
        self.summed = False

    def unit(self, action: Action) -> int:
        """The number of the action's unit."""
        return action.microbatch // self.stride * self.slices + (action.slice or 0)

    def microbatch(self, unit: int) -> int:
        """The microbatch of a unit."""
        return self.first + unit // self.slices * self.stride

    @property
    def last(self) -> int:
        """The last microbatch."""
        return self.microbatch(self.count - 1)

    def parted(self) -> int | None:
        """Return the first microbatch of which some slices have gone forward and others have not, if there is one."""
        for i in sorted({unit // self.slices for unit in self.lives}):
            units = range(i * self.slices, (i + 1) * self.slices)
            if not all(unit in self.lives or unit in self.finished for unit in units):
                return self.microbatch(units[0])
        return None

    def name(self, kind: str, unit: int) -> str:
        """The text of the action on a unit, without its stage."""
        return f"{kind}{self.microbatch(unit)}" + (f".{unit % self.slices}" if self.slices > 1 else "")


class Progress:
    """The book of one rank: the `work` on each of its stages; `graph` says which of them share parameters."""

    def __init__(self, schedule: Schedule, rank: int, graph: Graph | None = None) -> None:
        self.schedule, self.rank = schedule, rank
        tied = {stage for edge in graph.gradients for stage in edge} if graph else set[int]()
        stages = schedule.placement.stages_on(rank)
        self.work = {stage: Work(schedule, rank, stage, stage in tied) for stage in stages}

    @cached_property
    def life(self) -> Life:
        """Per kind, where a unit stands before and after; where nothing comes back, it is done with its forward."""
        if not self.schedule.backward:
            return {"F": ("", "done")}
        return {kind: (word.before, word.after) for kind, word in KINDS.items() if word.after}


def violation(
    rule: str, progress: Progress, position: int, action: Action | None, problem: str, repair: str
) -> ScheduleError:
    """Return the error of a rule that the rank of this book breaks."""
    return ScheduleError(rule, progress.rank, position, action, problem, repair)
