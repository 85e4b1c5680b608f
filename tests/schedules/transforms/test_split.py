# SPDX-License-Identifier: Apache-2.0
"""The laws of transforms."""

import pickle
from contextlib import suppress
from itertools import accumulate
from math import isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    KINDS,
    B,
    C,
    F,
    I,
    R,
    ScheduleError,
    SizeError,
    Sizes,
    U,
    W,
    check,
    defer_weights,
    eager_1f1b,
    forwards,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    merge_backward,
    mirror,
    one_f_one_b,
    overlap,
    parse,
    pipedream,
    recompute,
    seq_1f1b,
    simulate,
    split_backward,
    transform,
)
from schedules.proof.interpreter import ideal, prove
from schedules.testing import conformance, orders, require_round_trip, schedules
from tests.common.rows import edit, rows

both = schedules([gpipe, one_f_one_b])
test_split_schedules_conform = conformance(lambda ranks, microbatches: split_backward(one_f_one_b(ranks, microbatches)))
test_merged_schedules_conform = conformance(lambda ranks, microbatches: merge_backward(gpipe(ranks, microbatches)))


@given(both)
def test_merging_undoes_splitting(s):
    assert rows(merge_backward(split_backward(s))) == rows(s)


@settings(deadline=None)
@given(orders())
def test_splitting_or_merging_twice_is_the_same_as_once(case):
    s, _ = case
    assert rows(split_backward(split_backward(s))) == rows(split_backward(s))
    assert rows(merge_backward(merge_backward(s))) == rows(merge_backward(s))
    assert rows(merge_backward(split_backward(s))) == rows(merge_backward(s))


def peak(schedule, rank):
    """The most activations, in units of the rank's share of one microbatch, counted at every prefix."""
    growth = [Sizes().growth(action.kind, 0) for action in schedule.actions(rank)]
    return max(accumulate(growth), default=0) * schedule.ranks / schedule.stages / schedule.slices


def defer(schedule, room):
    """As far as a limit allows that has room for so many activations more than the fullest rank needs."""
    limits = [(schedule.memory(rank), peak(schedule, rank)) for rank in range(schedule.ranks)]
    most = max(declared if isfinite(declared) else counted for declared, counted in limits)
    return defer_weights(schedule, memory=most + room * schedule.ranks / schedule.stages / schedule.slices)


@settings(deadline=None)
@given(orders(), st.integers(0, 6), st.data())
def test_correct_schedules_stay_correct(case, room, data):
    s, graph = case
    some = data.draw(st.sets(st.integers(0, s.stages - 1)))
    for changed in (
        split_backward(s),
        merge_backward(s),
        defer(s, room),
        defer(split_backward(s), room),
        recompute(s),
        recompute(defer(split_backward(s), room), stages=tuple(some)),
    ):
        check(changed, graph)
        prove(changed, graph)
    check(forwards(s), graph)


FAMILIES = [one_f_one_b, gpipe, eager_1f1b, interleaved_1f1b, interleaved_zero_bubble, seq_1f1b, pipedream]
TRANSFORMS = [split_backward, merge_backward, recompute, overlap, mirror, lambda s: defer(s, 3)]


@settings(deadline=None)
@given(schedules(FAMILIES), st.lists(st.sampled_from(TRANSFORMS), max_size=4))
def test_families_stay_correct_under_several_transforms(s, several):
    for change in several:
        with suppress(SizeError):  # what cannot be mirrored
            s = change(s)
    check(s)
    require_round_trip(s)


def test_overlapping_keeps_the_limits():
    s = pipedream(ranks=3, microbatches=4)
    assert [(overlap(s).memory(rank), overlap(s).versions(rank)) for rank in range(3)] == [(3, 3), (2, 2), (1, 1)]
    with pytest.raises(SizeError, match="the two copies would drift apart"):
        mirror(overlap(s))


@pytest.mark.parametrize("stages", [0, [0], (0, 2), (-1,), "0"])
def test_recompute_takes_a_tuple_of_stages(stages):
    with pytest.raises(SizeError, match=r"recompute: got stages=.*expected a tuple of stages from 0 to 1"):
        recompute(one_f_one_b(ranks=2, microbatches=3), stages=stages)


def test_stages_without_a_backward_are_not_recomputed():
    s = forwards(one_f_one_b(ranks=2, microbatches=3))
    check(recompute(s))
    assert rows(recompute(s)) == rows(s)


@settings(deadline=None)
@given(orders(), st.integers(0, 6))
def test_transforms_leave_other_actions_alone(case, room):
    s, _ = case
    assert rows(split_backward(s), without="IW") == rows(s, without="BIW")
    assert rows(merge_backward(s), without="B") == rows(s, without="BIW")
    assert rows(defer(s, room), without="W") == rows(s, without="W")
    assert rows(recompute(s), without=("C", "R")) == rows(s, without=("C", "R", "F", "OVERLAP_F"))


@settings(deadline=None)
@given(orders(), st.integers(0, 6))
def test_weight_gradients_move_to_the_place_of_a_later_one_and_stay_in_order(case, room):
    s, _ = case
    s = split_backward(s)
    for before, after in zip(rows(s), rows(defer(s, room)), strict=True):
        for stage in range(s.stages):
            assert [a for a in after if a[:2] == ("W", stage)] == [a for a in before if a[:2] == ("W", stage)]
        late, due = (
            {a: sum(b.kind != "W" for b in row[: row.index(a)]) for a in row if a.kind == "W"}
            for row in (after, before)
        )
        assert all(late[action] >= due[action] for action in due)
    if room == 0:
        fullest = max(range(s.ranks), key=lambda rank: peak(s, rank))
        assert rows(defer(s, 0))[fullest] == rows(s)[fullest]


@settings(deadline=None)
@given(orders(), st.integers(0, 6))
def test_memory_stays_within_the_limit_at_every_prefix(case, room):
    s, _ = case
    for changed in (defer(s, room), defer(split_backward(s), room)):
        limit = dict(changed.arguments)["memory"]
        assert all(peak(changed, rank) <= limit + 1e-9 for rank in range(s.ranks))
    for changed in (split_backward(s), merge_backward(s), recompute(s)):
        assert all(peak(changed, rank) <= peak(s, rank) for rank in range(s.ranks))


@given(schedules(FAMILIES))
def test_limits_are_kept(s):
    for changed in (split_backward(s), merge_backward(s), recompute(s)):
        assert [changed.memory(rank) for rank in range(s.ranks)] == [s.memory(rank) for rank in range(s.ranks)]
        assert [changed.versions(rank) for rank in range(s.ranks)] == [s.versions(rank) for rank in range(s.ranks)]


def test_a_weight_gradient_never_passes_the_sum_or_the_update_that_uses_it():
    row = (F(0, 0), I(0, 0), W(0, 0), U(0, 0), F(0, 1), I(0, 1), W(0, 1), U(0, 1))
    s = edit(gpipe(1, 2), (row,))
    assert rows(defer_weights(s, memory=2)) == [list(row)]
    free = tuple(action for action in row if action.kind != "U")
    late = [F(0, 0), I(0, 0), F(0, 1), I(0, 1), W(0, 0), W(0, 1)]
    assert rows(defer_weights(edit(gpipe(1, 2), (free,)), memory=2)) == [late]


def test_a_limit_below_what_the_schedule_needs_is_refused():
    s = split_backward(one_f_one_b(ranks=4, microbatches=8))
    with pytest.raises(SizeError, match=r"defer_weights: got memory=3, expected at least the 4 that rank 0 .*>= 4"):
        check(defer_weights(s, memory=3))
    assert rows(defer_weights(s, memory=4))[0] == rows(s)[0]


@settings(deadline=None)
@given(orders(), st.data())
def test_recomputation_comes_directly_before_the_backward_on_the_named_stages(case, data):
    s, _ = case
    stages = tuple(sorted(data.draw(st.sets(st.integers(0, s.stages - 1)))))
    for before, after in zip(rows(s), rows(recompute(s, stages=stages)), strict=True):
        fresh = {action[1:] for action in after if action.kind == "R"} - {a[1:] for a in before if a.kind == "R"}
        forwards_of = {a[1:] for a in before if a.kind in ("F", "OVERLAP_F") and a.stage in stages}
        assert fresh == forwards_of
        for unit in fresh:
            at = after.index(R(unit[0], unit[1], unit[3]))
            assert C(unit[0], unit[1], unit[3]) in after[:at]
            behind = [a for a in after[at + 1 : at + 3] if a.kind != "OVERLAP_F"]
            assert behind[0] in (B(unit[0], unit[1], unit[3]), I(unit[0], unit[1], unit[3]))


def test_recomputing_splits_fused_pairs_of_its_own_stages_only():
    text = "0F0 1F0 0F1 1F1 1B0 0OVERLAP_F2 1B1 0B0 1F2 1B2 0B1 0B2"
    s = edit(interleaved_1f1b(1, 3, chunks=2), (tuple(map(parse, text.split())),))
    check(s)
    texts = [" ".join(map(str, rows(recompute(s, stages=stages))[0])) for stages in ((1,), (0,))]
    assert texts[0] == "0F0 1C0 0F1 1C1 1R0 1B0 1R1 0OVERLAP_F2 1B1 0B0 1C2 1R2 1B2 0B1 0B2"
    assert texts[1] == "0C0 1F0 0C1 1F1 1B0 0C2 1B1 0R0 0B0 1F2 1B2 0R1 0B1 0R2 0B2"


def test_recomputed_activations_are_held_from_the_recomputation_on():
    assert simulate(recompute(gpipe(ranks=4, microbatches=8))).peak_memory == (1, 1, 1, 1)


@settings(deadline=None)
@given(orders(), st.integers(0, 6))
def test_the_order_of_the_gradients_is_kept(case, room):
    s, graph = case
    for changed in (split_backward(s), defer(split_backward(s), room), recompute(s)):
        before, after = ideal(s, graph), ideal(changed, graph)  # outputs come in the order in which replicas make them
        assert (after.gradients, after.sums, after.copies) == (before.gradients, before.sums, before.copies)


@settings(deadline=None)
@given(orders())
def test_forwards_keeps_the_forwards_only(case):
    s, _ = case
    units = [[action[1:] for action in row if KINDS[action.kind].crosses == "F"] for row in rows(s)]
    assert [[action[1:] for action in row] for row in rows(forwards(s))] == units
    assert {action.kind for row in rows(forwards(s)) for action in row} == {"F"}
    assert rows(forwards(split_backward(s))) == rows(forwards(forwards(s))) == rows(forwards(s))


def test_evaluation_fills_and_drains():
    assert simulate(forwards(one_f_one_b(ranks=4, microbatches=8))).makespan == 8 + 4 - 1


@given(both)
def test_a_transformed_schedule_is_an_ordinary_schedule(s):
    for made in (split_backward(s), forwards(merge_backward(schedule=s))):
        require_round_trip(made)
        assert hash(pickle.loads(pickle.dumps(made))) == hash(made)
        assert (made.ranks, made.microbatches, made.placement) == (s.ranks, s.microbatches, s.placement)


def test_a_transformed_schedule_prints_as_the_calls_that_make_it():
    s = merge_backward(split_backward(gpipe(2, 3)))
    assert repr(s) == "merge_backward(schedule=split_backward(schedule=gpipe(ranks=2, microbatches=3)))"
    assert s != merge_backward(split_backward(gpipe(2, 4)))
    assert split_backward(gpipe(2, 3)) != merge_backward(gpipe(2, 3))


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
        list(merge_backward(edit(gpipe(1, 1), (tuple(row),))).actions(0))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("other", [one_f_one_b, None, "gpipe(ranks=1, microbatches=1)"])
def test_transforming_something_that_is_not_a_schedule_is_refused(other):
    with pytest.raises(TypeError, match=r"split_backward: got .*, expected a Schedule. Call the factory first"):
        split_backward(other)


def test_a_transform_of_something_else_is_refused():
    with pytest.raises(TypeError, match=r"got parameters \['rank', 'plan'\].*begin with rank, schedule"):

        @transform
        def mine(rank, plan):
            yield from plan.actions(rank)
