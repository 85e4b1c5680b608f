# SPDX-License-Identifier: Apache-2.0
"""The rules on passes, for all ranks at once: who brings each unit of a stage from one state to the next.

Idea. A pass takes a unit from the state `before` to the state `after` (`KINDS`). Write its number into a table at both.
If no two passes write to the same place, and every pass finds the maker of its state before itself, then the passes of
a unit are a path that starts at nothing; if the unit is done, the path is complete, and nothing is left over. The
tables also say who makes what other stages use.

Invariant: what `find_lives` accepts, the rules of `schedules.checking` on one rank accept.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedules.arrays.codes import CODE_OF, PASSES, ROW_END, Codes, Numbers, encode
from schedules.language.actions import KINDS
from schedules.language.schedule import Schedule
from schedules.playing.costs import ROUNDING, UNITS

STATES = ("", *dict.fromkeys(KINDS[name].after for name in PASSES))
BACK = [CODE_OF[name] for name in PASSES if KINDS[name].crosses == "B"]


class Lives(NamedTuple):
    """Per stage and unit, the numbers of the passes that send values, send cotangents, and finish the unit."""

    values: NDArray[np.int32]
    cotangents: NDArray[np.int32]
    done: NDArray[np.int32]


class Same(NamedTuple):
    """A schedule that is the same only as itself: equal ones may print differently."""

    schedule: Schedule

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.schedule is other.schedule

    def __hash__(self) -> int:
        return id(self.schedule)


def read_lives(schedule: Schedule) -> tuple[Codes, Lives] | None:
    """Return the codes and lives of a schedule, or `None` if it breaks a rule, or has no codes. Keep those of one."""
    return _read(Same(schedule))


def list_kinds(schedule: Schedule) -> frozenset[str] | None:
    """Return the kinds of a schedule's actions, or `None` if it breaks a rule, or has no codes."""
    found = read_lives(schedule)
    return None if found is None else frozenset(name for name, code in CODE_OF.items() if code in found[0].kinds)


@lru_cache(maxsize=1)  # a schedule is mostly checked, lowered and simulated in a row
def _read(same: Same) -> tuple[Codes, Lives] | None:
    codes = encode(same.schedule)
    lives = None if codes is None else find_lives(same.schedule, codes)
    return None if codes is None or lives is None else (codes, lives)


def find_lives(schedule: Schedule, codes: Codes) -> Lives | None:
    """Return the lives of all units, or `None` if a rule is broken."""
    S, units, n = schedule.stages, schedule.microbatches * schedule.slices, len(codes.kinds)
    if not schedule.backward and not np.isin(codes.kinds, [CODE_OF["F"], CODE_OF["G"], ROW_END]).all():
        return None
    lives = Lives(*np.full((3, S, units), n, np.int32))
    states = [np.array([STATES.index(state) for state in one]) for one in _list_states(schedule.backward)]
    for rank in range(schedule.ranks):
        held = [*schedule.placement.stages_on(rank)]
        found = _find_on_rank(schedule, codes, rank, held, states)
        if found is None:
            return None
        for whole, part in zip(lives, found, strict=True):  # of a unit, one replica has the numbers
            whole[held] = np.minimum(whole[held], part)
    if (lives.done == n).any():
        return None  # something never comes
    is_right = _are_fused(schedule, codes) and _are_sliced(schedule, lives) and _are_summed(schedule, codes, lives)
    return lives if is_right and _fits(schedule, codes) else None


def _find_on_rank(
    schedule: Schedule, codes: Codes, rank: int, held: list[int], states: list[Numbers]
) -> list[Numbers] | None:
    """Return the lives of the stages that a rank holds, or `None` if something runs twice, or too early.

    `states`: of each kind of pass, the numbers of the states before and after.
    """
    n, units, first = len(codes.kinds), schedule.microbatches * schedule.slices, codes.firsts[rank]
    kinds, stages, numbers = (column[first : codes.ends[rank]] for column in codes[:3])
    passes = np.flatnonzero(kinds < len(PASSES))
    kinds, place = kinds[passes], np.searchsorted(held, stages[passes]) * units + numbers[passes]
    start, end = (one[kinds] * (len(held) * units) + place for one in states)
    used, made = (np.full(len(STATES) * len(held) * units, n) for _ in "ab")
    passes += first
    used[start] = made[end] = passes
    if (used[start] != passes).any() or (made[end] != passes).any():
        return None  # something runs twice
    made[: len(held) * units] = -1
    if (made[start] >= passes).any():
        return None  # something comes too early
    tables = ((used, ""), (used, "forward"), (made, "done"))
    return [table.reshape(len(STATES), len(held), units)[STATES.index(state)] for table, state in tables]


def _list_states(backward: bool) -> tuple[list[str], list[str]]:
    """Return, for each kind of pass, the states before and after; without backwards, forwards are all there is."""
    words = [KINDS[name] for name in PASSES]
    return [word.before for word in words], [word.after if backward else "done" for word in words]


def _are_fused(schedule: Schedule, codes: Codes) -> bool:
    """Return whether each fused forward is followed by what may overlap with it."""
    k = np.flatnonzero(codes.kinds == CODE_OF["OVERLAP_F"])
    same = codes.stages[k] == codes.stages[k + 1]
    same &= codes.units[k] // schedule.slices == codes.units[k + 1] // schedule.slices
    return bool((np.isin(codes.kinds[k + 1], BACK) & ~same).all())


def _are_sliced(schedule: Schedule, lives: Lives) -> bool:
    """Return whether the slices of each microbatch go forward in order, and backward in reverse."""
    if schedule.slices == 1:
        return True
    shape = (schedule.stages, schedule.microbatches, schedule.slices)
    is_right = (np.diff(lives.values.reshape(shape)) > 0).all()
    return bool(is_right and (not schedule.backward or (np.diff(lives.cotangents.reshape(shape)) < 0).all()))


def _are_summed(schedule: Schedule, codes: Codes, lives: Lives) -> bool:
    """Return whether each replica of a stage sums the gradients once, at the end of its backwards."""
    placement = schedule.placement
    expected = {
        (s, placement.last(s, rank, schedule.microbatches)): find_last(schedule, lives, s, rank)
        for s in range(placement.stages * schedule.backward)
        if len(placement.replicas(s)) > 1
        for rank in placement.replicas(s)
    }
    sums = np.flatnonzero(codes.kinds == CODE_OF["G"])
    found = [(int(codes.stages[k]), int(codes.units[k]) // schedule.slices) for k in sums]
    is_late = all(last < k for one, k in zip(found, sums, strict=True) if (last := expected.get(one)) is not None)
    return is_late and sorted(found) == sorted(expected)


def find_last(schedule: Schedule, lives: Lives, s: int, rank: int) -> int:
    """Return the number of the last action that adds to the gradient of a stage on a rank."""
    done = lives.done[s].reshape(-1, schedule.slices)
    homes = np.resize([route[s] for route in schedule.placement.routes], len(done))
    return int(done[homes == rank].max())


def _fits(schedule: Schedule, codes: Codes) -> bool:
    """Return whether every rank stays within the schedule's limit of memory. What one rank holds, it frees again."""
    if schedule.limits.memory is None:
        return True
    growth = np.array([*(int(UNITS.growth(name, 0, schedule.backward)) for name in CODE_OF), 0])
    most = np.maximum.reduceat(np.cumsum(growth[codes.kinds]), codes.firsts)
    unit = schedule.slices * schedule.stages / schedule.ranks
    return all(held <= schedule.memory(rank) * unit + ROUNDING for rank, held in enumerate(most.tolist()))
