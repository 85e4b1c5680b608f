# SPDX-License-Identifier: Apache-2.0
"""A search finds schedules that are correct, fit, beat the literature, and are often the best possible."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from schedules import (
    Costs,
    Graph,
    Link,
    Placement,
    SizeError,
    Sizes,
    bidirectional,
    bound,
    check,
    dag,
    linear,
    looped,
    search,
    simulate,
    v_half,
    vee,
    wave,
    zb_auto,
    zb_h1,
    zb_h2,
)
from tests.common.optimum import find_optimum
from tests.common.published_costs import MEASURED, SLOTS, read_measured, read_slots
from tests.common.sizes import NIGHTLY
from tests.common.small_problems import bound_case, cases, is_searchable

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
    found = search(costs, placement, microbatches, **more, tries=20, seed=seed)
    check(found.schedule)
    timeline = simulate(found.schedule, costs, sizes=more["sizes"])
    assert timeline.makespan == found.makespan
    assert max(timeline.peak_memory) <= more["memory"] * ROUNDING
    least = bound(costs, placement, microbatches, **more)
    assert found.bound.parts[-len(least.parts) :] == least.parts
    assert found.bound.makespan <= found.makespan * ROUNDING
    assert (found.schedule.placement, found.schedule.microbatches) == (placement, microbatches)
    kinds = {action.kind for rank in range(placement.ranks) for action in found.schedule.actions(rank)}
    assert more["split"] or not kinds & {"I", "W"}
    assert found == search(costs, placement, microbatches, **more, tries=20, seed=seed)


@pytest.mark.parametrize("line", SLOTS)
def test_small_cases_with_known_best_values_are_solved(line):
    (costs, placement, microbatches, more), best = read_slots(line)
    assert search(costs, placement, microbatches, **more).makespan == best


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
    found = search(costs, case.placement, case.microbatches, **more, tries=4000)
    assert found.makespan <= best.makespan * ROUNDING


PROVED = [
    (vee(3), 1.5, False, Costs(F=(1, 6, 8, 2, 6, 1), B=(11, 4, 10, 10, 5, 10)), 192),
    (looped(3, 2), 2, False, Costs(F=(4, 5, 2, 4, 1, 4), B=(2, 12, 9, 10, 10, 6), comm=1), 164),
    (vee(3), 1.5, True, Costs(F=(7, 5, 4, 4, 1, 5), B=99, I=(5, 6, 3, 5, 1, 4), W=(5, 1, 3, 1, 8, 8), comm=4), 215),
]


@pytest.mark.parametrize(("placement", "memory", "split", "costs", "best"), PROVED)
def test_best_orders_in_little_memory_are_found(placement, memory, split, costs, best):
    """CP-SAT proved these; the bound is up to 9 % below."""
    assert search(costs, placement, 4, memory=memory, split=split, tries=1500).makespan == best


@pytest.mark.parametrize("line", MEASURED[:: 1 if NIGHTLY else 3])
@pytest.mark.parametrize("memory", [8, 16])
def test_published_costs_on_eight_ranks_are_solved(line, memory):
    """arXiv 2401.10241, table 5. Nothing of the literature is faster in the same memory, and nothing can be."""
    costs, M = read_measured(line)
    found = search(costs, linear(8), M, memory=memory, tries=500)
    literature = [zb_auto(8, M, memory=memory, costs=costs, residual=1), zb_h1(8, M) if memory == 8 else zb_h2(8, M)]
    assert found.makespan <= min(simulate(one, costs).makespan for one in literature) * ROUNDING
    assert found.gap <= 1e-4


def test_an_order_is_found_where_no_family_is_the_best():
    costs = Costs(F=(2, 1, 3, 1), B=(4, 2, 6, 2), I=(2, 1, 3, 1), W=(2, 1, 3, 1), comm=0.5)
    found = search(costs, linear(4), 8, memory=3)
    assert found.makespan < simulate(zb_auto(4, 8, memory=3, costs=costs, residual=1), costs).makespan
    assert found.origin in ("rules", "repeating unit", "partial orders")


def test_a_family_that_is_the_best_comes_back_itself():
    found = search(EQUAL, vee(4), 12, memory=3)
    assert found.schedule == v_half(4, 12)
    assert str(found).startswith("makespan 77, at most 0.00 % above the best possible, from v_half")


def test_a_slow_link_is_planned_around():
    """arXiv 2507.00217, table 5: two data centers, 16 microbatches in the memory of 1F1B; 0.196 is the best there."""
    slow = tuple(((a, b), 4.0 if (a < 4) != (b < 4) else 0.0) for a in range(8) for b in range(8))
    costs = Costs(F=0.038, I=0.0465, W=0.0206, B=0.0671, comm=Link(latency=0.038, slow=slow))
    found = search(costs, linear(8), 16, memory=8, tries=500)
    assert found.makespan / 16 <= 0.18 < simulate(zb_h1(8, 16), costs).makespan / 16


def test_a_stage_graph_with_a_skip():
    graph = dag(3, {(0, 1), (1, 2), (0, 2)})
    found = search(EQUAL, linear(3), 4, graph=graph, tries=50)
    check(found.schedule)
    assert isinstance(found.schedule.graph, Graph)
    assert found.makespan == simulate(found.schedule, EQUAL, graph).makespan


def test_ranks_may_have_unequal_memory():
    found = search(EQUAL, linear(4), 8, memory=(2, 3, 4, 5), tries=200)
    held = simulate(found.schedule, EQUAL).peak_memory
    assert all(most <= cap for most, cap in zip(held, (2, 3, 4, 5), strict=True))


def test_an_interrupted_search_returns_the_best_so_far():
    calls = []

    def stop(progress):
        calls.append(progress)
        if len(calls) == 5:
            raise KeyboardInterrupt

    found = search(EQUAL, vee(4), 8, memory=1.75, progress=stop)
    check(found.schedule)
    assert not found.complete
    assert "stopped early" in str(found)
    assert calls[-1].best >= found.makespan >= found.bound.makespan == calls[-1].bound
    assert 0 <= calls[0].share <= calls[-1].share <= 1


def test_a_search_that_runs_out_of_time_says_so():
    found = search(EQUAL, vee(4), 8, memory=1.75, seconds=1e-9)
    assert not found.complete
    check(found.schedule)


@pytest.mark.parametrize("name", ["seconds", "tries"])
@pytest.mark.parametrize("value", [0, -1])
def test_limits_are_above_0(name, value):
    with pytest.raises(SizeError, match=rf"search: got {name}=.*, expected a number above 0"):
        search(EQUAL, linear(2), 2, **{name: value})


@pytest.mark.parametrize(("placement", "microbatches"), [(Placement(3, (2, 0)), 2), (bidirectional(2), 1)])
def test_every_rank_has_something_to_do(placement, microbatches):
    with pytest.raises(SizeError, match=r"search: got .*, expected a stage on every rank"):
        search(EQUAL, placement, microbatches)


def test_the_least_memory_is_asked_for():
    with pytest.raises(SizeError, match="at least the 1 that rank 0 needs for one microbatch"):
        search(EQUAL, vee(2), 2, memory=0.75)


def test_whole_backwards_are_found_where_an_input_half_keeps_more_than_its_forward():
    sizes = Sizes(activation=1, residual=3)
    found = search(EQUAL, linear(2), 4, memory=2, sizes=sizes, tries=50)
    assert max(simulate(found.schedule, EQUAL, sizes=sizes).peak_memory) <= 2
    assert "W" not in {action.kind for action in found.schedule.actions(0)}


def test_branches_of_a_graph_take_turns_in_little_memory():
    links = frozenset({(0, 1), (0, 2)})
    found = search(EQUAL, linear(1, 3), 4, memory=2, sizes=Sizes(), graph=Graph(3, links, links), tries=50)
    assert simulate(found.schedule, EQUAL).peak_memory == (2 / 3,)


def test_memory_is_asked_for_if_no_order_is_found():
    links = frozenset({(0, 1), (0, 2), (1, 3), (2, 4)})
    more = {"sizes": Sizes(), "graph": Graph(5, links, links), "tries": 50}
    with pytest.raises(
        SizeError, match=r"got memory=3, expected at least \(4\.0,\), what ranks hold with one microbatch"
    ):
        search(EQUAL, linear(1, 5), 4, memory=3, **more)
