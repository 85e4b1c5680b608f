# SPDX-License-Identifier: Apache-2.0
"""Play all ranks abreast: in each round, every rank that can runs its next action.

Problem. `replay` plays one action at a time, and most of its time goes into Python.

Idea. Rounds: look at the next action of every rank, and let those run whose inputs are there. There are about as many
rounds as actions on one rank, and each is a few operations on arrays over ranks. The times are the same to the last
bit, since they come from the same sums in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedules.arrays.codes import CODE_OF, PASSES, ROW_END, Codes, Numbers
from schedules.arrays.lives import Lives, Same, find_last, read_lives
from schedules.arrays.ticks import place_actions
from schedules.language.graph import Graph
from schedules.language.schedule import Schedule
from schedules.playing.costs import NO_COSTS, UNITS, Costs
from schedules.playing.dependencies import Wire, Wires, wires

Floats = NDArray[np.float64]


class Totals(NamedTuple):
    """Per rank, when its first action begins and its last one ends, the time in actions, and the peak memory."""

    begin: list[float]
    clock: list[float]
    busy: list[float]
    peak: list[float]


class Needs(NamedTuple):
    """Makers that actions wait for: per number, the number of one maker, and the time of the transfer."""

    makers: Numbers
    delays: Floats


def can_be_played(schedule: Schedule, graph: Graph) -> bool:
    """Return whether a schedule obeys all rules. Keep the answer for one: whoever simulates it checks it, too.

    If ticks ascend on each rank, and from what actions need to the actions, no ranks wait for each other.
    """
    return _can_be_played(Same(schedule), graph)


@lru_cache(maxsize=1)
def _can_be_played(same: Same, graph: Graph) -> bool:
    schedule, found = same.schedule, read_lives(same.schedule)
    if found is None:
        return False
    wired = wires(schedule, graph, NO_COSTS, UNITS)
    if schedule.ticks is None:
        return play_all(schedule, *found, wired, NO_COSTS) is not None
    places = place_actions(schedule)
    if places is None:
        return False
    makers = np.append(places, [-1, -1])
    return all((makers[needs.makers] < places).all() for needs in _list_needs(schedule, *found, wired))


class Played(NamedTuple):
    """A play of all actions: by number, when they end, what they wait for, their times, and the growth of memory.

    `ends` has two places more. `clock` is when each rank ends.
    """

    ends: Floats
    needs: list[Needs]
    times: Floats
    growth: Floats
    clock: Floats


def play_all(schedule: Schedule, codes: Codes, lives: Lives, wires: Wires, costs: Costs) -> Played | None:
    """Play a schedule without jitter; `None` if ranks wait for each other."""
    n = len(codes.kinds)
    times, growth = _read_costs(schedule, codes, wires, costs)
    needs = _list_needs(schedule, codes, lives, wires)
    ends = np.full(n + 2, np.inf)  # one more for what nobody waits for, and one for what never comes
    ends[n] = -np.inf
    heads, now = codes.firsts.copy(), np.zeros(schedule.ranks)
    while True:
        ready = now
        for makers, delays in needs:
            ready = np.maximum(ready, ends[makers[heads]] + delays[heads])
        ready += times[heads]
        ends[heads] = ready
        runs = ready < np.inf
        if not runs.any():
            break
        now = np.where(runs, ready, now)
        heads += runs
    return None if (heads < codes.ends).any() else Played(ends, needs, times, growth, now)


def play_abreast(schedule: Schedule, codes: Codes, lives: Lives, wires: Wires, costs: Costs) -> Totals | None:
    """Return the totals of a schedule without jitter, or `None` if ranks wait for each other."""
    played = play_all(schedule, codes, lives, wires, costs)
    if played is None:
        return None
    begin = np.zeros(schedule.ranks)
    for makers, delays in played.needs:
        begin = np.maximum(begin, played.ends[makers[codes.firsts]] + delays[codes.firsts])
    rows = [slice(*ends) for ends in zip(codes.firsts, codes.ends + 1, strict=True)]
    busy = [float(np.cumsum(played.times[row])[-1]) for row in rows]
    peak = [max(0.0, float(np.cumsum(played.growth[row]).max())) for row in rows]
    return Totals(begin.tolist(), played.clock.tolist(), busy, peak)


def _number_wires(schedule: Schedule, codes: Codes) -> Numbers:
    """Return, for each number, the place of its wire in a table by code, stage and route."""
    R = len(schedule.placement.routes)
    route = codes.units // schedule.slices % R if R > 1 else 0
    return (codes.kinds * np.intp(schedule.stages) + codes.stages) * R + route


def _list_wires(schedule: Schedule, wires: Wires) -> Iterator[tuple[int, Wire]]:
    """Yield every wire with its place in such a table."""
    width = schedule.stages * len(schedule.placement.routes)
    for rows in wires:
        for name, code in CODE_OF.items():
            yield from ((code * width + key, wire) for key, wire in rows[name].items())


def _read_costs(schedule: Schedule, codes: Codes, wires: Wires, costs: Costs) -> tuple[Floats, Floats]:
    """Return the time and the growth of memory of each number."""
    times, growth = np.zeros((2, (ROW_END + 1) * schedule.stages * len(schedule.placement.routes)))
    for place, wire in _list_wires(schedule, wires):
        times[place], growth[place] = wire.time, wire.grows
    places = _number_wires(schedule, codes)
    found, factors = times[places], costs.factors(schedule.microbatches, schedule.slices)
    if factors:
        found *= np.where(codes.kinds < len(PASSES), np.array(factors)[codes.units], 1.0)
    return found, growth[places]


def _list_needs(schedule: Schedule, codes: Codes, lives: Lives, wires: Wires) -> list[Needs]:
    """Return all that actions wait for, as many arrays as the neediest has makers."""
    S, units, n = schedule.stages, lives.done.shape[1], len(codes.kinds)
    delay_of = {id(one): delay for _, wire in _list_wires(schedule, wires) for one, delay in wire.gives}
    fused = np.append(codes.kinds == CODE_OF["OVERLAP_F"], False)  # what a fused forward makes leaves with its partner
    makers = np.concatenate([(lives.values + fused[lives.values]).ravel(), lives.cotangents.ravel(), np.full(units, n)])
    columns = max(1, *(len(wire.takes) for _, wire in _list_wires(schedule, wires)))
    sources = np.full((columns, (ROW_END + 1) * S * len(schedule.placement.routes)), 2 * S * units)
    delays = np.zeros(sources.shape)
    for place, wire in _list_wires(schedule, wires):
        for column, one in enumerate(wire.takes):
            delays[column, place] = delay_of[id(one)]
            if one.what != "G":
                sources[column, place] = ((one.what == "B") * S + one.source) * units
    places = _number_wires(schedule, codes)
    needs = [Needs(makers[one[places] + codes.units], late[places]) for one, late in zip(sources, delays, strict=True)]
    _add_sums(schedule, codes, lives, wires, needs)
    needs[0].makers[codes.ends] = n + 1
    opener = np.flatnonzero(fused[:n])
    for seconds in needs[: len(needs) * bool(len(opener))]:
        needs.append(Needs(np.full(n, n), np.zeros(n)))
        needs[-1].makers[opener] = seconds.makers[opener + 1]
        needs[-1].delays[opener] = seconds.delays[opener + 1]
    return needs


def _add_sums(schedule: Schedule, codes: Codes, lives: Lives, wires: Wires, needs: list[Needs]) -> None:
    """Let sums of gradients wait for the last backward of every other replica."""
    placement, R = schedule.placement, len(schedule.placement.routes)
    for k in np.flatnonzero(codes.kinds == CODE_OF["G"]).tolist():
        s, i = int(codes.stages[k]), int(codes.units[k]) // schedule.slices
        for column, one in enumerate(wires[placement.home(s, i)]["G"][s * R + i % R].takes):
            needs[column].makers[k] = find_last(schedule, lives, s, one.producer)
