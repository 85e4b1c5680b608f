# SPDX-License-Identifier: Apache-2.0
"""What makes a schedule correct: the rules, one named function each, and `check`, which applies them all.

A rule is a generator that passes one rank's actions on and raises `ScheduleError` at the first that breaks it. Rules
are therefore stacked like filters: one pass over each rank's generator, nothing kept but what the rule itself counts.
The last rule, `ordered`, is `replay` itself: it looks at all ranks together.
"""

from __future__ import annotations

from collections.abc import Iterator

from schedules.actions import Action
from schedules.authoring import Schedule
from schedules.errors import ScheduleError
from schedules.graph import Graph
from schedules.replay import graph_of, replay

Actions = Iterator[Action]
_COMPUTE = frozenset("FBIW")


def compute_only(schedule: Schedule, rank: int, actions: Actions) -> Actions:
    """A schedule holds compute actions on its own stages and microbatches; transfers are inserted by `lower`."""
    for position, action in enumerate(actions):
        problem = None
        if not isinstance(action, Action) or action.kind not in _COMPUTE or action.peer is not None:
            problem, repair = "no compute action", "Yield only F, B, I and W; transfers are inserted by lower()."
        elif not 0 <= action.stage < schedule.stages:
            problem = f"stage {action.stage} does not exist"
            repair = f"Use stages 0 to {schedule.stages - 1}."
        elif not 0 <= action.microbatch < schedule.microbatches:
            problem = f"microbatch {action.microbatch} does not exist"
            repair = f"Use microbatches 0 to {schedule.microbatches - 1}."
        if problem:
            raise ScheduleError("compute_only", rank, position, action, problem, repair)
        yield action


def placed(schedule: Schedule, rank: int, actions: Actions) -> Actions:
    """Every action runs on the rank that holds its stage."""
    homes = schedule.placement.homes
    for position, action in enumerate(actions):
        home = homes[action.stage]
        if home != rank:
            problem = f"stage {action.stage} lives on rank {home}"
            raise ScheduleError("placed", rank, position, action, problem, f"Yield {action} on rank {home}.")
        yield action


def forward_before_backward(schedule: Schedule, rank: int, actions: Actions) -> Actions:
    """Per stage and microbatch: first `F`, then `B` or `I`, then, after an `I`, its `W`; nothing twice."""
    done: dict[tuple[int, int], str] = {}
    finished: dict[int, _Finished] = {stage: _Finished() for stage in schedule.placement.stages_on(rank)}
    for position, action in enumerate(actions):
        kind, stage, i, _, _ = action
        before = "B" if i in finished[stage] else done.get((stage, i), "")
        if _FOLLOWS[kind] != before:
            raise ScheduleError("forward_before_backward", rank, position, action, *_disorder(action, before))
        if kind in "BW":
            del done[stage, i]
            finished[stage].add(i)
        else:
            done[stage, i] = kind
        yield action


_FOLLOWS = {"F": "", "B": "F", "I": "F", "W": "I"}
_AGE = ("", "F", "I", "B")


def _disorder(action: Action, before: str) -> tuple[str, str]:
    kind, stage, i, _, _ = action
    needed = _FOLLOWS[kind]
    if _AGE.index(before) < _AGE.index(needed):
        return f"comes before {stage}{needed}{i}", f"Add {stage}{needed}{i} before it, or move it behind."
    return "has run already, or the backward has", f"Drop {action}: each runs once, as B or as I and W."


class _Finished:
    """A set of microbatches that stays small while they finish nearly in order: a full prefix, and what is ahead."""

    def __init__(self) -> None:
        self.prefix, self.ahead = 0, set[int]()

    def __contains__(self, i: int) -> bool:
        return i < self.prefix or i in self.ahead

    def add(self, i: int) -> None:
        self.ahead.add(i)
        while self.prefix in self.ahead:
            self.ahead.remove(self.prefix)
            self.prefix += 1


_MISSING = {"": "{0}F{1}, with its backward,", "F": "{0}B{1}, or {0}I{1} and {0}W{1},", "I": "{0}W{1}"}


def complete(schedule: Schedule, rank: int, actions: Actions) -> Actions:
    """Every stage sees every microbatch, forward and backward."""
    finished = {stage: _Finished() for stage in schedule.placement.stages_on(rank)}
    begun: dict[tuple[int, int], str] = {}
    length = 0
    for action in actions:
        length += 1
        kind, stage, i, _, _ = action
        if kind in "BW":
            begun.pop((stage, i), None)
            finished[stage].add(i)
        else:
            begun[stage, i] = kind
        yield action
    for stage, seen in finished.items():
        if (i := seen.prefix) < schedule.microbatches:
            problem = f"{_MISSING[begun.get((stage, i), '')].format(stage, i)} never runs"
            raise ScheduleError("complete", rank, length, None, problem, f"Add it to rank {rank}.")


RULES = (compute_only, placed, forward_before_backward, complete)


def check(schedule: Schedule, graph: Graph | None = None) -> None:
    """Raise `ScheduleError` unless the schedule is correct for the stage graph (by default the chain of its stages).

    Correct means: it has every compute action exactly once and on the right rank, and all ranks together can finish
    without waiting for each other in a circle. The error names rank, position, action, rule and repair. One pass over
    all actions; what is in flight is kept, nothing else.

    >>> from schedules import B, F, check, one_f_one_b, schedule
    >>> check(one_f_one_b(ranks=4, microbatches=8))
    >>> @schedule()
    ... def impatient(rank, ranks, microbatches):
    ...     for i in range(microbatches):
    ...         yield B(rank, i)
    ...         yield F(rank, i)
    >>> check(impatient(ranks=1, microbatches=1))
    Traceback (most recent call last):
    schedules.errors.ScheduleError: rank 0, position 0, 0B0: comes before 0F0 [rule: forward_before_backward]. \
Add 0F0 before it, or move it behind.
    """
    graph = graph_of(schedule, graph)
    streams = [schedule.actions(rank) for rank in range(schedule.ranks)]
    for rule in RULES:
        streams = [rule(schedule, rank, stream) for rank, stream in enumerate(streams)]
    for _ in replay(streams, graph, schedule.placement):
        pass
