# SPDX-License-Identifier: Apache-2.0
"""The progress of one rank: how far each microbatch has come on each of its stages.

The rules of `check` share this record, so every action is recorded once. It stays small if microbatches finish nearly
in order: it holds what is in flight, and how many have finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from schedules.errors import ScheduleError
from schedules.language.actions import KINDS, Action
from schedules.language.graph import Graph
from schedules.language.schedule import Schedule, graph_of

Life = Mapping[str, tuple[str, str]]


class FinishedUnits:
    """A set of numbers that stays small if they come nearly in order: a full prefix, and those ahead of it."""

    def __init__(self) -> None:
        self.prefix, self.ahead = 0, set[int]()

    def __contains__(self, number: int) -> bool:
        return number < self.prefix or number in self.ahead

    def __len__(self) -> int:
        return self.prefix + len(self.ahead)

    def add(self, number: int) -> None:
        """Add a number."""
        if number == self.prefix:
            self.prefix += 1
            while self.prefix in self.ahead:
                self.ahead.remove(self.prefix)
                self.prefix += 1
        else:
            self.ahead.add(number)


class Work:
    """One stage on one rank: the state (`lives`) of each unit in flight, and the units that have `finished`.

    A unit is a microbatch or a slice of one, numbered among the `count` units whose route leads to this rank.
    `versions` counts the weight updates, the last with gradients up to microbatch `applied`; `began` maps units in
    flight to the version they began with, unless it is the newest; `kept` is the most versions kept at once. `summed`
    is true once the gradients of the stage's replicas are summed, `tied` if another stage shares parameters. `gathered`
    is true while the weights are, for the last of so far `gatherings`; `reduced` is true once the gradient is reduced.
    """

    def __init__(self, schedule: Schedule, rank: int, stage: int, tied: bool) -> None:
        routes = schedule.placement.routes
        self.routes, self.slices = len(routes), schedule.slices
        self.mine = [route for route, homes in enumerate(routes) if homes[stage] == rank]
        self.count = sum(len(range(route, schedule.microbatches, len(routes))) for route in self.mine) * self.slices
        self.replicated, self.tied = len(self.mine) < len(routes), tied
        self.lives: dict[int, str] = {}
        self.finished = FinishedUnits()
        self.versions, self.kept, self.applied = 0, 1, -1
        self.began: dict[int, int] = {}
        self.summed = self.reduced = self.gathered = False
        self.gatherings = 0

    def unit(self, action: Action) -> int:
        """Return the number of the action's unit."""
        turn, route = divmod(action.microbatch, self.routes)
        return (turn * len(self.mine) + self.mine.index(route)) * self.slices + (action.slice or 0)

    def microbatch(self, unit: int) -> int:
        """Return the microbatch of a unit."""
        return self.number_gathering(unit // self.slices)

    def own(self) -> Iterator[int]:
        """Yield the microbatch of each unit on this rank."""
        return map(self.microbatch, range(self.count))

    @property
    def last(self) -> int:
        """The last microbatch on this rank."""
        return self.microbatch(self.count - 1)

    @property
    def first_unfinished(self) -> int:
        """The first microbatch that is not finished."""
        return self.microbatch(self.finished.prefix)

    def number_gathering(self, count: int) -> int:
        """Return the number of the gathering that comes after `count` others."""
        turn, place = divmod(count, len(self.mine))
        return turn * self.routes + self.mine[place]

    def first_partial_microbatch(self) -> int | None:
        """Return the first microbatch with only some slices forwarded, or `None`."""
        for i in sorted({unit // self.slices for unit in self.lives}):
            units = range(i * self.slices, (i + 1) * self.slices)
            if not all(unit in self.lives or unit in self.finished for unit in units):
                return self.microbatch(units[0])
        return None

    def name_action(self, kind: str, unit: int) -> str:
        """Return the text of an action on a unit, without its stage."""
        return f"{kind}{self.microbatch(unit)}" + (f".{unit % self.slices}" if self.slices > 1 else "")


class Progress:
    """The record of one rank: the `work` on each of its stages; `graph` says which stages share parameters."""

    def __init__(self, schedule: Schedule, rank: int, graph: Graph | None = None) -> None:
        self.schedule, self.rank, self.graph = schedule, rank, graph_of(schedule, graph)
        tied = {stage for edge in graph.gradients for stage in edge} if graph else set[int]()
        stages = schedule.placement.stages_on(rank)
        self.work = {stage: Work(schedule, rank, stage, stage in tied) for stage in stages}

    @cached_property
    def life(self) -> Life:
        """For each kind, the state of a unit before and after; without backwards, a forward leaves it done."""
        if not self.schedule.backward:
            return {"F": ("", "done")}
        return {kind: (word.before, word.after) for kind, word in KINDS.items() if word.after}


def violation(
    rule: str, progress: Progress, position: int, action: Action | None, problem: str, repair: str
) -> ScheduleError:
    """Return the error for a rule that the rank of `progress` breaks."""
    return ScheduleError(rule, progress.rank, position, action, problem, repair)
