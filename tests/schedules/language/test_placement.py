# SPDX-License-Identifier: Apache-2.0
"""Where stages live."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import Placement, SizeError, bidirectional, linear, looped, vee

places = st.sampled_from([linear, looped, vee])
counts = st.integers(1, 9)


@given(places, counts, counts)
def test_every_rank_holds_equally_many_stages_and_each_stage_once(place, ranks, chunks):
    placement = place(ranks, chunks)
    held = [placement.stages_on(rank) for rank in range(ranks)]
    assert {len(stages) for stages in held} == {chunks}
    assert sorted(stage for stages in held for stage in stages) == list(range(placement.stages))
    assert all(placement.homes[stage] == rank for rank, stages in enumerate(held) for stage in stages)
    assert all(list(stages) == sorted(stages) for stages in held)


@given(counts, counts)
def test_a_vee_turns_without_a_transfer(ranks, chunks):
    homes = vee(ranks, chunks).homes
    assert all(abs(a - b) == 1 or (a == b and a in (0, ranks - 1)) for a, b in pairwise(homes))


@given(counts)
def test_with_one_chunk_all_placements_are_the_same(ranks):
    assert linear(ranks) == looped(ranks) == vee(ranks, chunks=1) == Placement(ranks, tuple(range(ranks)))


@pytest.mark.parametrize(
    ("placement", "homes"),
    [
        (linear(3, 2), (0, 0, 1, 1, 2, 2)),
        (looped(3, 2), (0, 1, 2, 0, 1, 2)),
        (vee(3), (0, 1, 2, 2, 1, 0)),
        (vee(2, 3), (0, 1, 1, 0, 0, 1)),
    ],
)
def test_homes_are_the_ranks_of_stages(placement, homes):
    assert placement.homes == homes


def test_a_rank_may_hold_nothing_and_placements_are_values():
    placement = Placement(3, (0, 2, 2))
    assert placement.stages_on(1) == ()
    assert placement == Placement(3, (0, 2, 2))
    assert len({placement, Placement(3, (0, 2, 2))}) == 1


@pytest.mark.parametrize(
    ("homes", "mirrors", "why"),
    [
        ((0, 2), (), r"got homes=\(0, 2\), expected a rank from 0 to 1 for each of 2 stages"),
        ((0, 1), ((1,),), r"got homes=\(1,\)"),
        ((0, 1), ((1, 0), (0, 1)), "expected at most one"),
    ],
)
def test_an_invalid_placement_is_refused(homes, mirrors, why):
    with pytest.raises(SizeError, match=why):
        Placement(2, homes, mirrors)


def test_microbatches_take_turns_on_the_routes():
    both = bidirectional(ranks=5, chunks=2)
    assert [both.home(3, i) for i in range(3)] == [1, 3, 1]
    assert [both.replicas(stage) for stage in (0, 4, 5, 9)] == [(0, 4), (2,), (2,), (4, 0)]
    assert all(both.routes[both.route(s, rank)][s] == rank for s in range(both.stages) for rank in both.replicas(s))
    assert [both.stages_on(rank) for rank in (0, 2)] == [(0, 1, 8, 9), (4, 5)]
