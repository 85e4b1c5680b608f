# SPDX-License-Identifier: Apache-2.0
"""A constraint solver improves what a search found, and proves that nothing is better."""

import sys

import pytest
from hypothesis import assume, given

from schedules import Costs, Graph, Link, SolverError, check, cp_sat, linear, looped, search, simulate, v_min, vee
from tests.common.optimum import find_optimum
from tests.common.small_problems import cases, is_searchable

EQUAL = Costs(F=1, B=2, I=1, W=1)


def test_a_best_schedule_is_proved_where_the_bound_is_lower():
    found = search(EQUAL, vee(4), 8, memory=4 / 3 + 1, tries=20, solver=cp_sat)
    assert found.schedule == v_min(4, 8)
    assert found.gap == 0
    assert found.complete
    assert found.bound.because == "the solver proved that there is no faster schedule"
    assert found.bound.parts[1].makespan == 57


@given(cases())
def test_the_solver_agrees_with_exhaustive_search(case):
    best = find_optimum(case)
    assume(is_searchable(case) and best is not None and 0 < best.makespan < float("inf"))
    more = {"split": case.split, "backward": case.backward, "sizes": case.sizes, "memory": case.memory}
    found = search(case.costs, case.placement, case.microbatches, **more, tries=1, solver=cp_sat, seconds=20)
    assert found.bound.makespan <= best.makespan * (1 + 1e-9)
    assert best.makespan <= found.makespan * (1 + 1e-9)


def test_times_that_are_not_whole_are_rounded_down_for_the_bound():
    costs = Costs(F=0.1234567, B=0.3, I=0.1456789, W=0.1543211, comm=0.01)
    found = search(costs, linear(3), 6, memory=1.5, tries=20, solver=cp_sat)
    check(found.schedule)
    assert found.makespan == simulate(found.schedule, costs).makespan
    assert found.bound.makespan <= found.makespan * (1 + 1e-9)
    assert found.gap < 1e-3


def test_the_solver_begins_at_orders_that_fit():
    """It would stop the whole process if it began at a schedule that holds more than there is."""
    links, half = frozenset({(0, 1), (0, 2), (1, 2), (0, 3)}), (1.25, 0.5, 4, 4)
    link = Link(latency=4, bandwidth=2.35, bytes=(4.25, 3.75, 2, 2.25))
    costs = Costs(F=4.5, B=(3.25, 1, 3.25, 5), I=half, W=(1.5, 4, 0.25, 3.5), comm=link)
    more = {"graph": Graph(4, links, links), "tries": 30, "solver": cp_sat}
    found = search(costs, looped(2, 2), 2, memory=(2, 0.75), **more)
    assert max(simulate(found.schedule, costs).peak_memory) <= 2
    assert simulate(found.schedule, costs).peak_memory[1] <= 0.75


def test_a_solver_that_is_not_installed_is_refused_before_the_search(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools", None)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    calls = []
    with pytest.raises(SolverError, match=r"solver: got cp_sat, expected OR-Tools to be installed. Run pip install"):
        search(EQUAL, vee(4), 8, memory=4 / 3 + 1, tries=20, solver=cp_sat, progress=calls.append)
    assert not calls
