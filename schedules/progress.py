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
    `summed` says whether the gradients of the stage's replicas have been added up.
    """

    def __init__(self, schedule: Schedule, rank: int, stage: int) -> None:
        routes = schedule.placement.routes
        mine = [route for route, homes in enumerate(routes) if homes[stage] == rank]
        self.first, self.stride = (0, 1) if len(mine) == len(routes) else (mine[0], len(routes))
        self.slices = schedule.slices
        self.count = len(range(self.first, schedule.microbatches, self.stride)) * schedule.slices
        self.replicated = self.stride > 1
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

    def name(self, kind: str, unit: int) -> str:
        """The text of the action on a unit, without its stage."""
        return f"{kind}{self.microbatch(unit)}" + (f".{unit % self.slices}" if self.slices > 1 else "")


class Progress:
    """The book of one rank: the `work` on each of its stages."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        self.work = {stage: Work(schedule, rank, stage) for stage in schedule.placement.stages_on(rank)}

    @cached_property
    def life(self) -> Life:
        """Per kind, where a unit stands before and after; where nothing comes back, it is done with its forward."""
        if not self.schedule.backward:
            return {"F": ("", "done")}
        return {kind: (word.before, word.after) for kind, word in KINDS.items() if word.after}
