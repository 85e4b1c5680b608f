# SPDX-License-Identifier: Apache-2.0
"""A plan may get an order of its own, and where links differ, a placement: faster than those of the literature."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpipe.planning.floor import bound_plans
from fpipe.planning.ordering import find_islands, list_orderable, list_placements, place_on_islands, reorder
from fpipe.planning.plan import Plan
from schedules import Link, check, one_f_one_b, recompute, zb_h1, zb_v
from tests.common.chain_profiles import chain_profile, find_plan, problem_of
from tests.common.sizes import by_night

PROFILE = chain_profile([3, 1, 4, 1, 5, 9, 2, 6])


@by_night
def test_an_order_of_its_own_makes_a_plan_faster_and_is_saved_with_it(tmp_path):
    memory = max(find_plan(PROFILE, ranks=3, microbatches=6, caps=inf, ordered=False).predicted.memory)
    caps = (0.8 * memory,) * 3
    before, after = (
        find_plan(PROFILE, ranks=3, microbatches=6, caps=caps, ordered=False),
        find_plan(PROFILE, ranks=3, microbatches=6, caps=caps, ordered=True),
    )
    check(after.schedule)
    assert before.bound * (1 - 1e-9) <= after.predicted.seconds < before.predicted.seconds
    assert max(after.predicted.memory) <= caps[0]
    assert "a custom order (" in str(after)
    after.save(tmp_path / "plan.json")
    read = Plan.read(tmp_path / "plan.json")
    assert replace(read, schedule=after.schedule) == after
    assert all([*read.schedule.actions(rank)] == [*after.schedule.actions(rank)] for rank in range(3))


def test_candidates_that_recompute_keep_their_order():
    problem = problem_of(PROFILE, ranks=3, microbatches=6)
    plain = [problem.try_out(schedule, (4, 6)) for schedule in (one_f_one_b(3, 6), zb_h1(3, 6))]
    others = [
        problem.try_out(recompute(one_f_one_b(3, 6)), (4, 6)),
        problem.try_out(zb_v(3, 6), (1, 2, 4, 5, 6)),
    ]
    assert list(list_orderable([*plain, *others])) == [plain[0], others[1]]


def test_what_does_not_fit_or_has_no_time_keeps_its_order():
    problem = problem_of(PROFILE, ranks=3, microbatches=6)
    for one in (replace(problem, caps=(1.0,) * 3), replace(problem, end=0.0)):
        assert reorder(one.try_out(one_f_one_b(3, 6), (4, 6))) is None


MICROBATCHES = 8
ISLANDS = {"factories": (one_f_one_b, zb_h1, zb_v), "ranks": 4, "microbatches": MICROBATCHES, "caps": 150.0}


def link_of(islands, latency, slow):
    """Links that take `latency` within islands, and `slow` between them."""
    home = {rank: k for k, one in enumerate(islands) for rank in one}
    between = tuple(((a, b), slow / latency) for a, b in permutations(home, 2) if home[a] != home[b])
    return Link(latency=latency, slow=between)


@given(st.permutations(range(6)), st.sampled_from([(3, 3), (2, 4), (1, 5), (2, 2, 2)]), st.booleans())
def test_islands_are_found_whatever_their_ranks_and_whichever_links_are_noted(ranks, sizes, usual_is_slow):
    ends = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    islands = tuple(sorted(tuple(sorted(ranks[a:b])) for a, b in pairwise(ends)))
    link = link_of(islands, 1.0, 10.0)
    if usual_is_slow:
        noted = dict(link.slow)
        pairs = permutations(range(6), 2)
        link = Link(latency=10.0, slow=tuple((pair, 0.1) for pair in pairs if pair not in noted))
    assert find_islands(link, 6) == islands


def test_two_ranks_are_as_far_apart_as_their_slower_direction():
    one_way = tuple(((a, b), 9.0) for a, b in permutations(range(4), 2) if a % 2 > b % 2)
    assert find_islands(Link(latency=1, slow=one_way), 4) == ((0, 2), (1, 3))


@pytest.mark.parametrize("link", [Link(), Link(latency=1, slow=(((0, 1), 1.8), ((1, 0), 1.8)))])
def test_links_that_are_about_as_fast_make_no_islands(link):
    assert find_islands(link, 4) == ((0, 1, 2, 3),)
    assert not [*list_placements(find_islands(link, 4))]


def test_a_value_crosses_between_islands_once_in_each_direction():
    islands = ((0, 2), (1, 3))
    home = {0: 0, 2: 0, 1: 1, 3: 1}
    for placement in list_placements(islands):
        crossings = [a for a, b in pairwise(placement.homes) if home[a] != home[b]]
        assert len(crossings) == 1
        assert sorted(set(placement.homes)) == [0, 1, 2, 3]


@by_night
def test_a_plan_loops_inside_each_of_two_data_centers():
    profile = chain_profile([2.0] * 8, link=link_of(((0, 1), (2, 3)), 0.2, 18.0))
    found, before = find_plan(profile, **ISLANDS, ordered=True), find_plan(profile, **ISLANDS)
    check(found.schedule)
    assert found.schedule.placement.homes in [(0, 1, 0, 1, 2, 3, 2, 3), (0, 1, 1, 0, 2, 3, 3, 2)]
    assert found.bound <= found.predicted.seconds < 0.9 * before.predicted.seconds
    assert max(found.predicted.memory) <= 150


def test_ranks_that_alternate_between_data_centers_are_visited_one_data_center_after_the_other():
    profile = chain_profile([2.0] * 4, link=link_of(((0, 2), (1, 3)), 0.2, 18.0))
    found = find_plan(profile, **ISLANDS, ordered=True)
    assert found.schedule.placement.homes == (0, 2, 1, 3)
    assert found.predicted.seconds < 0.8 * find_plan(profile, **ISLANDS).predicted.seconds


def test_too_few_blocks_or_too_little_memory_leave_fewer_placements():
    profile = chain_profile([2.0] * 4, link=link_of(((0, 1), (2, 3)), 0.2, 18.0))
    for cap, count in ((150.0, 1), (9.0, 0)):
        assert len([*place_on_islands(problem_of(profile, 4, MICROBATCHES, cap))]) == count


def test_the_bound_counts_the_fastest_link():
    """The usual link may be the slow one: that of the median pair."""
    fast = tuple((pair, 0.01) for pair in [(0, 1), (1, 0)])
    profile = chain_profile([1.0] * 4, link=Link(latency=50.0, slow=fast))
    problem = problem_of(profile, 2, 1)
    least = bound_plans(problem, split=True, single=False).makespan
    assert least <= problem.try_out(zb_h1(2, 1), (2,)).predicted.seconds
