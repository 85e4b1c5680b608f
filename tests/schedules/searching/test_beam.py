# SPDX-License-Identifier: Apache-2.0
"""A beam through partial orders finds the best orders if it is wide enough, and says whether it was."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from schedules import Costs, Sizes, bidirectional, linear, looped, search, simulate, vee
from schedules.searching.beam import Beam, Crowd
from schedules.searching.instance import make_instance
from schedules.searching.partial import Brancher
from schedules.searching.queues import QueueTable
from schedules.searching.units import take_turns
from tests.common.optimum import Case, find_optimum
from tests.common.small_problems import bound_case, cases, is_searchable

ROUNDING = 1 + 1e-9
WIDE = 100_000


def split_only(case):
    """Return the case without whole backwards that take less time than their halves."""
    halves = (case.costs.time("I", s) + case.costs.time("W", s) for s in range(case.placement.stages))
    whole = tuple(max(case.costs.time("B", s), half) for s, half in enumerate(halves))
    return replace(case, costs=replace(case.costs, B=whole)) if case.split else case


def pose(case):
    """Return the instance of a case."""
    how = case.split, case.backward, case.links
    return make_instance(case.costs, case.placement, case.microbatches, case.memory, case.sizes, *how)


def sweep(case, width=WIDE, is_late=lambda: False):
    """Return what a beam finds that knows no good orders."""
    instance = pose(case)
    return Beam(instance, bound_case(case)).sweep(take_turns(instance), width, is_late)


@given(cases())
def test_a_wide_beam_finds_the_optimum_and_says_so(case):
    assume(is_searchable(case) and bound_case(case) < inf)
    case = split_only(case)
    best = find_optimum(case)
    assume(best is not None)
    swept = sweep(case)
    assert swept.complete
    assert swept.best.makespan == pytest.approx(best.makespan, rel=1e-9)


@given(cases(), st.sampled_from([1, 2, 4]))
def test_a_narrow_beam_never_says_so_if_it_did_not_find_it(case, width):
    assume(is_searchable(case) and bound_case(case) < inf)
    case = split_only(case)
    best = find_optimum(case)
    assume(best is not None)
    swept = sweep(case, width)
    assert swept.best.makespan >= best.makespan / ROUNDING
    assert not swept.complete or swept.best.makespan <= best.makespan * ROUNDING


CROWDED = [
    Case(Costs(F=(8, 3, 8, 1), B=14, I=6, W=(8, 3, 3, 6), comm=2), looped(2, 2), 2, (3, 6), Sizes(residual=0.5)),
    Case(Costs(F=2, B=15, I=(8, 5, 5, 5), W=(7, 6, 3, 8)), vee(2), 2, (inf, 2)),
    Case(Costs(F=(5, 1), B=9, I=1, W=4, comm=1), bidirectional(2), 3, (3, 3)),
    Case(Costs(F=(1, 6, 2), B=20, I=(7, 1, 3), W=(2, 5, 8)), linear(3), 3, (2, 3, 1), Sizes(residual=0.5)),
]


@pytest.mark.parametrize("case", CROWDED)
def test_cases_in_little_memory(case):
    swept = sweep(case)
    assert swept.complete
    assert swept.best.makespan == find_optimum(case, 200_000).makespan


def test_passes_that_take_no_time_still_have_to_run():
    case = Case(Costs(F=(0, 0, 3), B=(0, 9, 9), I=(0, 5, 2), W=(0, 1, 3), comm=1), linear(3), 3, (2, 2, 1))
    swept = sweep(case)
    assert (swept.best.makespan, swept.complete) == (30, True)  # CP-SAT proves it, too


def test_a_beam_without_any_orders_to_try_is_complete():
    case = Case(Costs(F=0, B=0, I=0, W=0), linear(2), 2, (inf, inf))
    assert sweep(case) == (take_turns(pose(case)), True, 0)


def test_a_beam_that_gets_late_returns_what_was_known():
    calls = iter([False] * 3)
    swept = sweep(CROWDED[0], is_late=lambda: next(calls, True))
    assert (swept.best, swept.complete) == (take_turns(pose(CROWDED[0])), False)


def test_times_that_are_not_whole():
    costs = Costs(F=(1 / 3, 1 / 7), B=(1, 0.7), I=(1 / 9, 1 / 11), W=(0.1, 2 / 13), comm=1 / 17)
    case = split_only(Case(costs, linear(2), 3, (2, 2)))
    assert pose(case).factor is None
    swept = sweep(case)
    assert swept.complete
    assert swept.best.makespan == pytest.approx(find_optimum(case, 200_000).makespan, rel=1e-9)


PROVED = [
    (vee(3), 1.5, False, Costs(F=(1, 6, 8, 2, 6, 1), B=(11, 4, 10, 10, 5, 10)), 192),
    (looped(3, 2), 2, False, Costs(F=(4, 5, 2, 4, 1, 4), B=(2, 12, 9, 10, 10, 6), comm=1), 164),
    (vee(3), 1.5, True, Costs(F=(7, 5, 4, 4, 1, 5), B=99, I=(5, 6, 3, 5, 1, 4), W=(5, 1, 3, 1, 8, 8), comm=4), 215),
]


@pytest.mark.parametrize(("placement", "memory", "split", "costs", "best"), PROVED)
def test_a_search_proves_its_result_where_the_bound_is_lower(placement, memory, split, costs, best):
    found = search(costs, placement, 4, memory=memory, split=split)
    assert (found.makespan, found.gap, found.complete) == (best, 0, True)
    assert found.bound.because == "every order was tried"
    assert found.bound.parts[1].makespan < best
    assert simulate(found.schedule, costs).makespan == best


def survivors(*partials):
    """Return those of some partial orders that are kept."""
    crowd = Crowd()
    for one in partials:
        crowd.add(one)
    return crowd.survivors()


UNPROVED = [
    Costs(F=(1, 6, 8, 2, 6, 1), B=(11, 4, 10, 10, 5, 10), I=6, W=6),  # orders with halves and whole ones are not tried
    Costs(F=(1, 6, 8, 2, 6, 1), B=12, I=6, W=6, jitter=0.1),  # times may be shorter
]


@pytest.mark.parametrize("costs", UNPROVED)
def test_nothing_is_proved_of_schedules_that_are_not_tried(costs):
    found = search(costs, vee(3), 4, memory=1, tries=500)
    assert found.bound.because != "every order was tried"
    assert found.gap > 0


def test_of_partial_orders_one_that_may_go_on_in_fewer_ways_replaces_none():
    case = CROWDED[0]
    first = Brancher(QueueTable(pose(case)), 0.0, 1000.0).begin()
    barred = first._replace(clock=first.clock._replace(barred=1))
    late = first._replace(outlook=first.outlook._replace(free=(1, *first.outlook.free[1:])))
    assert survivors(first, barred) == survivors(barred, first) == [first]
    assert survivors(first, late) == survivors(late, first) == [first]
    assert survivors(barred, late) == [barred, late]
    assert survivors(late, barred) == [late, barred]
