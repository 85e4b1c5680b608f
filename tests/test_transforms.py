# SPDX-License-Identifier: Apache-2.0
"""The laws of transforms."""

import pickle

import pytest
from hypothesis import given, settings

from schedules import (
    B,
    F,
    I,
    ScheduleError,
    W,
    check,
    forwards,
    gpipe,
    merge_backward,
    one_f_one_b,
    simulate,
    split_backward,
    transform,
)
from schedules.interpreter import ideal, prove
from schedules.testing import conformance, orders, require_round_trip, schedules

both = schedules([gpipe, one_f_one_b])
test_split_schedules_conform = conformance(lambda ranks, microbatches: split_backward(one_f_one_b(ranks, microbatches)))
test_merged_schedules_conform = conformance(lambda ranks, microbatches: merge_backward(gpipe(ranks, microbatches)))


def rows(schedule):
    return [list(schedule.actions(rank)) for rank in range(schedule.ranks)]


@given(both)
def test_merging_undoes_splitting(s):
    assert rows(merge_backward(split_backward(s))) == rows(s)


@settings(deadline=None)
@given(orders())
def test_both_are_done_when_done_once(case):
    s, _ = case
    assert rows(split_backward(split_backward(s))) == rows(split_backward(s))
    assert rows(merge_backward(merge_backward(s))) == rows(merge_backward(s))
    assert rows(merge_backward(split_backward(s))) == rows(merge_backward(s))


@settings(deadline=None)
@given(orders())
def test_what_was_correct_stays_correct(case):
    s, graph = case
    for changed in (split_backward(s), merge_backward(s)):
        check(changed, graph)
        prove(changed, graph)


@settings(deadline=None)
@given(orders())
def test_splitting_keeps_the_order_of_the_gradients(case):
    s, graph = case
    assert ideal(split_backward(s), graph) == ideal(s, graph)


@settings(deadline=None)
@given(orders())
def test_forwards_are_the_forwards(case):
    s, _ = case
    assert rows(forwards(s)) == [[action for action in row if action.kind == "F"] for row in rows(s)]
    assert rows(forwards(split_backward(s))) == rows(forwards(forwards(s))) == rows(forwards(s))


def test_evaluation_fills_and_drains():
    assert simulate(forwards(one_f_one_b(ranks=4, microbatches=8))).makespan == 8 + 4 - 1


@given(both)
def test_the_result_is_an_ordinary_schedule(s):
    for made in (split_backward(s), forwards(merge_backward(schedule=s))):
        require_round_trip(made)
        assert hash(pickle.loads(pickle.dumps(made))) == hash(made)
        assert (made.ranks, made.microbatches, made.placement) == (s.ranks, s.microbatches, s.placement)


def test_it_prints_as_the_calls_that_make_it():
    s = merge_backward(split_backward(gpipe(2, 3)))
    assert repr(s) == "merge_backward(schedule=split_backward(schedule=gpipe(ranks=2, microbatches=3)))"
    assert s != merge_backward(split_backward(gpipe(2, 4)))
    assert split_backward(gpipe(2, 3)) != merge_backward(gpipe(2, 3))


@transform
def edited(rank, schedule, rows):
    yield from rows[rank]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([F(0, 0), W(0, 0)], "rank 0, position 1, 0W0: comes before 0I0 [rule: forward_before_backward]."),
        ([F(0, 0), B(0, 0), W(0, 0)], "rank 0, position 2, 0W0: comes before 0I0 [rule: forward_before_backward]."),
        ([I(0, 0), W(0, 0), W(0, 0)], "rank 0, position 2, 0W0: comes before 0I0 [rule: forward_before_backward]."),
        ([F(0, 0), I(0, 0)], "rank 0, position 2, end of its actions: 0W0 never runs [rule: complete]."),
    ],
)
def test_merging_does_not_hide_a_broken_rule(row, message):
    with pytest.raises(ScheduleError) as caught:
        list(merge_backward(edited(gpipe(1, 1), (tuple(row),))).actions(0))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("other", [one_f_one_b, None, "gpipe(ranks=1, microbatches=1)"])
def test_what_is_no_schedule_is_refused(other):
    with pytest.raises(TypeError, match=r"split_backward: got .*, expected a Schedule. Call the factory first"):
        split_backward(other)


def test_a_transform_of_something_else_is_refused():
    with pytest.raises(TypeError, match=r"got parameters \['rank', 'plan'\].*begin with rank, schedule"):

        @transform
        def mine(rank, plan):
            yield from plan.actions(rank)
