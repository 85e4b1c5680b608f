# SPDX-License-Identifier: Apache-2.0
"""A search finds schedules that are correct, fit, beat the literature, and are often the best possible."""

import sys
from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from schedules import (
    Costs,
    Graph,
    Link,
    Placement,
    Problem,
    Schedule,
    SizeError,
    Sizes,
    SolverError,
    bidirectional,
    bound,
    check,
    cp_sat,
    dag,
    linear,
    looped,
    one_f_one_b,
    search,
    simulate,
    v_half,
    v_min,
    vee,
    wave,
    zb_auto,
    zb_h1,
    zb_h2,
)
from schedules.playing.instance import WEIGHT_HALF, make_instance
from schedules.searching.beam import Beam, Crowd
from schedules.searching.improving import Climb, shake
from schedules.searching.offsets import draw_rule, follow
from schedules.searching.partial import Brancher
from schedules.searching.queues import QueueTable
from schedules.searching.repairing import free_early, put_off, take_late, untangle
from schedules.searching.seeds import list_families, read_orders, read_seed, spell
from schedules.searching.timing import time_orders
from schedules.searching.units import find_unit, take_turns
from tests.common.optimum import Case, bound_case, cases, find_optimum, is_searchable
from tests.common.published_costs import MEASURED, SLOTS, read_measured, read_slots
from tests.common.sizes import NIGHTLY, by_night, sampled

# ---------------- A search finds schedules that are correct, fit, beat the literature, and are often the best possible

ROUNDING = 1 + 1e-9
TIMES = st.integers(1, 12).map(lambda quarters: quarters / 4)
PLACEMENTS = [linear(3), vee(2), looped(3, 2), linear(2, 2), wave(2, 2), bidirectional(4), Placement(3, (2, 0, 1, 1))]
EQUAL = Costs(F=1, B=2, I=1, W=1)


@st.composite
def questions(draw):
    """The arguments of a search, with memory for one microbatch at least."""
    placement = draw(st.sampled_from(PLACEMENTS))
    S = placement.stages
    each = TIMES | st.tuples(*[TIMES] * S)
    costs = draw(st.builds(Costs, **dict.fromkeys("FBIW", each), comm=st.just(0) | TIMES))
    sizes = draw(st.none() | st.builds(Sizes, activation=st.just(2), residual=st.integers(0, 2), weight=st.just(1)))
    least = 2.0 * S if sizes is None else 3.0 * S
    memory = draw(st.just(inf) | st.integers(2, 8).map(lambda more: least * more / 4))
    split, backward = draw(st.booleans()), draw(st.booleans())
    more = {"memory": memory, "sizes": sizes, "split": split, "backward": backward}
    return costs, placement, draw(st.sampled_from([2, 4, 6])), more


@given(questions(), st.integers(0, 3))
def test_what_is_found_is_correct_fits_and_takes_no_less_than_the_bound(question, seed):
    costs, placement, microbatches, more = question
    found = search(Problem(costs, placement, microbatches, **more), tries=20, seed=seed)
    check(found.schedule)
    timeline = simulate(found.schedule, costs, sizes=more["sizes"])
    assert timeline.makespan == found.makespan
    assert max(timeline.peak_memory) <= more["memory"] * ROUNDING
    least = bound(Problem(costs, placement, microbatches, **more))
    assert found.bound.parts[-len(least.parts) :] == least.parts
    assert found.bound.makespan <= found.makespan * ROUNDING
    assert (found.schedule.placement, found.schedule.microbatches) == (placement, microbatches)
    kinds = {action.kind for rank in range(placement.ranks) for action in found.schedule.actions(rank)}
    assert more["split"] or not kinds & {"I", "W"}
    assert found == search(Problem(costs, placement, microbatches, **more), tries=20, seed=seed)


@pytest.mark.parametrize("line", SLOTS)
def test_small_cases_with_known_best_values_are_solved(line):
    (costs, placement, microbatches, more), best = read_slots(line)
    assert search(Problem(costs, placement, microbatches, **more)).makespan == best


@given(cases())
def test_the_optimum_is_found(case):
    assume(is_searchable(case))
    more = {"split": case.split, "backward": case.backward, "sizes": case.sizes, "memory": case.memory}
    halves = [case.costs.time("I", s) + case.costs.time("W", s) for s in range(case.placement.stages)]
    whole = tuple(max(case.costs.time("B", s), half) for s, half in enumerate(halves))
    costs = replace(case.costs, B=whole) if case.split else case.costs  # mixing whole and split is left to chance
    case = replace(case, costs=costs)
    best = find_optimum(case)
    assume(best is not None and bound_case(case) < inf)
    assume(not case.placement.mirrors or not costs.comm)  # replicas exchange their gradients, too
    found = search(Problem(costs, case.placement, case.microbatches, **more), tries=4000)
    assert found.makespan <= best.makespan * ROUNDING


@sampled(1)
@pytest.mark.parametrize("line", MEASURED[:: 1 if NIGHTLY else 3])
@pytest.mark.parametrize("memory", [8, 16])
def test_published_costs_on_eight_ranks_are_solved(line, memory):
    """arXiv 2401.10241, table 5. Nothing of the literature is faster in the same memory, and nothing can be."""
    costs, M = read_measured(line)
    found = search(Problem(costs, linear(8), M, memory=memory), tries=500)
    literature = [zb_auto(8, M, memory=memory, costs=costs, residual=1), zb_h1(8, M) if memory == 8 else zb_h2(8, M)]
    assert found.makespan <= min(simulate(one, costs).makespan for one in literature) * ROUNDING
    assert found.gap <= 1e-4


def test_an_order_is_found_where_no_family_is_the_best():
    costs = Costs(F=(2, 1, 3, 1), B=(4, 2, 6, 2), I=(2, 1, 3, 1), W=(2, 1, 3, 1), comm=0.5)
    found = search(Problem(costs, vee(2), 8, memory=1.5))
    assert found.gap < 0.1
    assert found.origin in ("rules", "repeating unit", "partial orders")


def test_a_family_that_is_the_best_comes_back_itself():
    found = search(Problem(EQUAL, vee(4), 12, memory=3))
    assert found.schedule == v_half(4, 12, costs=EQUAL)
    assert str(found).startswith("makespan 77, at most 0.00 % above the best possible, from v_half")


def test_a_slow_link_is_planned_around():
    """arXiv 2507.00217, table 5: two data centers, 16 microbatches in the memory of 1F1B; 0.196 is the best there."""
    slow = tuple(((a, b), 4.0 if (a < 4) != (b < 4) else 0.0) for a in range(8) for b in range(8))
    costs = Costs(F=0.038, I=0.0465, W=0.0206, B=0.0671, comm=Link(latency=0.038, slow=slow))
    found = search(Problem(costs, linear(8), 16, memory=8), tries=500)
    assert found.makespan / 16 <= 0.18 < simulate(zb_h1(8, 16), costs).makespan / 16


def test_a_stage_graph_with_a_skip():
    graph = dag(3, {(0, 1), (1, 2), (0, 2)})
    found = search(Problem(EQUAL, linear(3), 4, graph=graph), tries=50)
    check(found.schedule)
    assert isinstance(found.schedule.graph, Graph)
    assert found.makespan == simulate(found.schedule, EQUAL, graph).makespan


def test_ranks_may_have_unequal_memory():
    found = search(Problem(EQUAL, linear(4), 8, memory=(2, 3, 4, 5)), tries=200)
    held = simulate(found.schedule, EQUAL).peak_memory
    assert all(most <= cap for most, cap in zip(held, (2, 3, 4, 5), strict=True))


def test_an_interrupted_search_returns_the_best_so_far():
    calls = []

    def stop(progress):
        calls.append(progress)
        if len(calls) == 5:
            raise KeyboardInterrupt

    found = search(Problem(EQUAL, vee(4), 8, memory=1.75), progress=stop)
    check(found.schedule)
    assert not found.complete
    assert "stopped early" in str(found)
    assert calls[-1].best >= found.makespan >= found.bound.makespan == calls[-1].bound
    assert 0 <= calls[0].share <= calls[-1].share <= 1


def test_a_search_that_runs_out_of_time_says_so():
    found = search(Problem(EQUAL, vee(4), 8, memory=1.75), seconds=1e-9)
    assert not found.complete
    check(found.schedule)


@pytest.mark.parametrize(("placement", "microbatches"), [(Placement(3, (2, 0)), 2), (bidirectional(2), 1)])
def test_every_rank_has_something_to_do(placement, microbatches):
    with pytest.raises(SizeError, match=r"Problem: got .*, expected a stage on every rank"):
        search(Problem(EQUAL, placement, microbatches))


def test_the_least_memory_is_asked_for():
    with pytest.raises(SizeError, match="at least the 1 that rank 0 needs for one microbatch"):
        search(Problem(EQUAL, vee(2), 2, memory=0.75))


def test_whole_backwards_are_found_where_an_input_half_keeps_more_than_its_forward():
    sizes = Sizes(activation=1, residual=3)
    found = search(Problem(EQUAL, linear(2), 4, memory=2, sizes=sizes), tries=50)
    assert max(simulate(found.schedule, EQUAL, sizes=sizes).peak_memory) <= 2
    assert "W" not in {action.kind for action in found.schedule.actions(0)}


def test_branches_of_a_graph_take_turns_in_little_memory():
    links = frozenset({(0, 1), (0, 2)})
    found = search(Problem(EQUAL, linear(1, 3), 4, memory=2, sizes=Sizes(), graph=Graph(3, links, links)), tries=50)
    assert simulate(found.schedule, EQUAL).peak_memory == (2 / 3,)


def test_memory_is_asked_for_if_no_order_is_found():
    links = frozenset({(0, 1), (0, 2), (1, 3), (2, 4)})
    problem = Problem(EQUAL, linear(1, 5), 4, memory=3, sizes=Sizes(), graph=Graph(5, links, links))
    with pytest.raises(
        SizeError, match=r"got memory=3, expected at least \(4\.0,\), which ranks hold with one microbatch"
    ):
        search(problem, tries=50)


# ------------------- A beam through partial orders finds the best orders if it is wide enough, and says whether it was

WIDE = 100_000


def split_only(case):
    """Return the case without whole backwards that take less time than their halves."""
    halves = (case.costs.time("I", s) + case.costs.time("W", s) for s in range(case.placement.stages))
    whole = tuple(max(case.costs.time("B", s), half) for s, half in enumerate(halves))
    return replace(case, costs=replace(case.costs, B=whole)) if case.split else case


def pose(case):
    """Return the instance of a case."""
    return make_instance(case.problem)


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


@sampled(2)
@pytest.mark.parametrize(("placement", "memory", "split", "costs", "best"), PROVED)
def test_a_search_proves_its_result_where_the_bound_is_lower(placement, memory, split, costs, best):
    found = search(Problem(costs, placement, 4, memory=memory, split=split))
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
    found = search(Problem(costs, vee(3), 4, memory=1), tries=500)
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


# --------------- Playing orders, by number or by priority, gives the times that `simulate` gives, and holds the memory

PLAYED = [linear(4), vee(3), looped(2, 2)]
WHOLE = st.integers(0, 8).map(float)


@st.composite
def instances(draw):
    placement = draw(st.sampled_from(PLAYED))
    each = WHOLE | st.tuples(*[WHOLE] * placement.stages)
    costs = draw(st.builds(Costs, **dict.fromkeys("FIW", each), B=st.just(100), comm=WHOLE))
    memory = draw(st.sampled_from([inf, 1.0, 1.5, 2.0, 3.0]))
    split = draw(st.booleans())
    return costs, make_instance(Problem(costs, placement, draw(st.integers(1, 6)), memory, split=split))


def times(instance, costs, orders) -> float:
    """The makespan of orders with all names written out, if halves are not joined."""
    schedule = spell(instance, orders, costs, None)
    assert isinstance(schedule, Schedule)
    return simulate(schedule, costs).makespan


FREE_FORWARDS = Costs(F=0.0, I=0.0, W=1.0, B=100, comm=1.0)
FULL_OF_FORWARDS = FREE_FORWARDS, make_instance(Problem(FREE_FORWARDS, vee(3), 5, 3.0, split=True))


@given(instances(), st.integers(0, 99))
@example(FULL_OF_FORWARDS, 3)  # a forward must not be put off behind a later one of its own stage
def test_every_way_to_orders_fits_and_takes_the_time_that_it_says(case, seed):
    (costs, instance), random = case, Random(seed)
    attempts = [take_turns(instance), find_unit(instance, random), follow(instance, draw_rule(random), random)]
    attempts += [read_seed(instance, schedule) for schedule in list_families(instance, costs, None)]
    for attempt in filter(None, attempts):
        climb = Climb(instance, attempt, random)
        climb.move(5, 0.5)
        for one in (attempt, climb.best, shake(instance, attempt, 2, random)):
            assert all(instance.is_possible(rank, order) for rank, order in enumerate(one.orders))
            assert one.makespan <= attempt.makespan
            assert abs(times(instance, costs, one.orders) - one.makespan) <= 1e-9 * one.makespan


@given(instances(), st.integers(0, 99))
def test_a_dispatch_never_gets_stuck(case, seed):
    _, instance = case
    random = Random(seed)
    assert follow(instance, draw_rule(random), random) is not None


@given(instances())
def test_no_family_begins_a_forward_for_which_there_is_no_room(case):
    """The rule that keeps ranks from getting stuck excludes no order that fits."""
    costs, instance = case
    seeds = [read_seed(instance, schedule) for schedule in list_families(instance, costs, None)]
    for order in (order for one in filter(None, seeds) for order in one.orders):
        assert put_off(instance, order) == order
        assert take_late(instance, order) == order
        assert free_early(instance, order, (WEIGHT_HALF, 0)) == order


@given(instances(), st.randoms(use_true_random=False))
def test_any_orders_can_be_repaired(case, random):
    _, instance = case
    orders = [[*order] for order in take_turns(instance).orders]
    for order in orders:
        random.shuffle(order)
        seen = dict.fromkeys(((kind, n) for kind, n, _ in order), -1)
        for at, (kind, n, _) in enumerate(order):
            seen[kind, n] += 1
            order[at] = kind, n, seen[kind, n]
    for repair in (take_late, lambda instance, order: free_early(instance, order, (WEIGHT_HALF, 0))):
        assert all(sorted(repair(instance, order)) == sorted(order) for order in orders)
    fitting = [put_off(instance, order) for order in orders]
    for attempt in (orders, fitting):
        found = untangle(instance, attempt, random.randrange(instance.ranks))
        assert [sorted(order) for order in found] == [sorted(order) for order in orders]
        assert all(instance.is_possible(rank, order) for rank, order in enumerate(found))
        assert time_orders(instance, found) is not None


FULL = [
    (vee(2), 2, 1.5, Costs(F=(8, 4, 7, 2), B=(7, 4, 10, 10), I=(6, 1, 8, 4), W=(1, 3, 2, 6), comm=1), 71),
    (vee(2), 3, 2, Costs(F=(5, 4, 4, 1), B=(12, 16, 6, 14), I=(8, 8, 5, 7), W=(4, 8, 1, 7), comm=2), 101),
]


@sampled(1)
@pytest.mark.parametrize(("placement", "microbatches", "memory", "costs", "best"), FULL)
def test_a_climb_gets_away_from_orders_that_fill_the_memory(placement, microbatches, memory, costs, best):
    """Where a rank is full, no pass can move alone. Dispatched orders leave no gaps, so they are like that."""
    instance = make_instance(Problem(costs, placement, microbatches, memory))
    for seed in range(4):
        random = Random(seed)
        climb = Climb(instance, shake(instance, take_turns(instance), 40, random), random)
        for cooled in range(40, 0, -1):
            climb.move(20, 0.3 * instance.period * cooled / 40)
        assert climb.best.makespan == best


def test_a_deadlock_has_no_times():
    instance = make_instance(Problem(Costs(), linear(2), 1))
    orders = read_orders(instance, one_f_one_b(2, 1))
    assert time_orders(instance, orders) is not None
    assert time_orders(instance, [[orders[0][1], orders[0][0], orders[0][2]], orders[1]]) is None


def test_a_pass_that_waits_says_for_which():
    instance = make_instance(Problem(Costs(comm=1), linear(2), 1))
    played = time_orders(instance, read_orders(instance, one_f_one_b(2, 1)))
    assert played.starts == [[0, 5, 6], [2, 3, 4]]
    assert played.awaited == [[None, (1, 1, 0), None], [(0, 0, 0), None, None]]
    assert (played.makespan, played.ends) == (7, [7, 5])


# --------------------------------- A constraint solver improves what a search found, and proves that nothing is better


@by_night
def test_a_best_schedule_is_proved_where_the_bound_is_lower():
    found = search(Problem(EQUAL, vee(4), 8, memory=4 / 3 + 1), tries=20, solver=cp_sat)
    assert found.schedule == v_min(4, 8, costs=EQUAL)
    assert found.gap == 0
    assert found.complete
    assert found.bound.because == "the solver proved that there is no faster schedule"
    assert found.bound.parts[1].makespan == 57


@given(cases())
def test_the_solver_agrees_with_exhaustive_search(case):
    best = find_optimum(case)
    assume(is_searchable(case) and best is not None and 0 < best.makespan < float("inf"))
    more = {"split": case.split, "backward": case.backward, "sizes": case.sizes, "memory": case.memory}
    found = search(Problem(case.costs, case.placement, case.microbatches, **more), tries=1, solver=cp_sat, seconds=20)
    assert found.bound.makespan <= best.makespan * (1 + 1e-9)
    assert best.makespan <= found.makespan * (1 + 1e-9)


def test_times_that_are_not_whole_are_rounded_down_for_the_bound():
    costs = Costs(F=0.1234567, B=0.3, I=0.1456789, W=0.1543211, comm=0.01)
    found = search(Problem(costs, linear(3), 6, memory=1.5), tries=20, solver=cp_sat)
    check(found.schedule)
    assert found.makespan == simulate(found.schedule, costs).makespan
    assert found.bound.makespan <= found.makespan * (1 + 1e-9)
    assert found.gap < 1e-3


@by_night
def test_the_solver_begins_at_orders_that_fit():
    """It would stop the whole process if it began at a schedule that holds more than there is."""
    links, half = frozenset({(0, 1), (0, 2), (1, 2), (0, 3)}), (1.25, 0.5, 4, 4)
    link = Link(latency=4, bandwidth=2.35, bytes=(4.25, 3.75, 2, 2.25))
    costs = Costs(F=4.5, B=(3.25, 1, 3.25, 5), I=half, W=(1.5, 4, 0.25, 3.5), comm=link)
    problem = Problem(costs, looped(2, 2), 2, memory=(2, 0.75), graph=Graph(4, links, links))
    found = search(problem, tries=30, solver=cp_sat)
    assert max(simulate(found.schedule, costs).peak_memory) <= 2
    assert simulate(found.schedule, costs).peak_memory[1] <= 0.75


def test_a_solver_that_is_not_installed_is_refused_before_the_search(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools", None)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    calls = []
    with pytest.raises(SolverError, match=r"solver: got cp_sat, expected OR-Tools to be installed. Run pip install"):
        search(Problem(EQUAL, vee(4), 8, memory=4 / 3 + 1), tries=20, solver=cp_sat, progress=calls.append)
    assert not calls
