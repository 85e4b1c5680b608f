# SPDX-License-Identifier: Apache-2.0
"""Hand-written and found orders with little waiting: published rates, formulas, memory at every prefix."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import (
    Costs,
    SizeError,
    Sizes,
    check,
    defer_weights,
    eager_1f1b,
    interleaved_zero_bubble,
    merge_backward,
    one_f_one_b,
    simulate,
    split_backward,
    zb_auto,
    zb_h1,
    zb_h2,
)
from schedules.testing import costs
from tests.common.rows import rows

QUARTERS = st.integers(1, 40).map(lambda quarters: quarters / 4)
RATES = """
24 18.522 18.086  9.337 0.601 0.1585 0.1083 0.1585 0.0433
32 18.513 18.086  9.331 0.626 0.1242 0.0837 0.1242 0.0039
64 18.546 18.097  9.321 0.762 0.0674 0.0444 0.0674 0.0026
24 29.718 29.444 19.927 0.527 0.1323 0.0698 0.1323 0.0029
32 29.802 29.428 19.530 0.577 0.1045 0.0559 0.1045 0.0022
64 29.935 29.621 19.388 0.535 0.0554 0.0294 0.0554 0.0010
"""


@pytest.mark.parametrize("line", RATES.strip().splitlines())
def test_bubble_rates_on_eight_ranks(line):
    """arXiv 2401.10241, table 5: measured times of the 1.5B and the 6.2B model."""
    M, F, I, W, comm, *rates = map(float, line.split())  # noqa: E741 - the action's name
    times, M = Costs(F=F, I=I, W=W, comm=comm), int(M)
    each = zb_h1(8, M), zb_h2(8, M), zb_auto(8, M, memory=8, costs=times), zb_auto(8, M, memory=16, costs=times)
    assert [round(simulate(schedule, times).bubble, 4) for schedule in each] == rates


def waiting(schedule, times):
    """The longest time that a rank waits, after its first action and before its last; the same from start to end."""
    timeline = simulate(schedule, times)
    return timeline.span - max(timeline.busy), timeline.makespan - max(timeline.busy)


@given(P=st.integers(1, 7), more=st.integers(0, 12), F=QUARTERS, I=QUARTERS, W=QUARTERS)
def test_waiting_matches_the_docstrings(P, more, F, I, W):  # noqa: E741 - the action's name
    if min(I, W) > F:
        F, I = I, F  # noqa: E741
    times, half = Costs(F=F, I=I, W=W), min(I, W)
    assert waiting(zb_h1(P, P + more), times)[1] == pytest.approx((P - 1) * (F + I - half))
    assert waiting(zb_h2(P, 2 * P - 1 + more), times)[0] == pytest.approx((P - 1) * max(0, F + I - 2 * W))


@given(P=st.integers(1, 8), M=st.integers(1, 24))
def test_zb_h1_and_zb_h2_are_1f1b_and_eager_1f1b_with_deferred_weight_gradients(P, M):
    assert rows(merge_backward(zb_h1(P, M))) == rows(one_f_one_b(P, M))
    assert rows(merge_backward(zb_h2(P, M))) == rows(eager_1f1b(P, M))
    once, twice = min(P, M), min(2 * P - 1, M)
    assert rows(zb_h1(P, M)) == rows(defer_weights(split_backward(one_f_one_b(P, M)), memory=once))
    assert rows(zb_h2(P, M)) == rows(defer_weights(split_backward(eager_1f1b(P, M)), memory=twice))
    if M >= P:
        assert rows(zb_h1(P, M)) == rows(interleaved_zero_bubble(P, M, chunks=1))


@given(P=st.integers(1, 8), M=st.integers(1, 24))
def test_every_rank_holds_as_much_as_the_first(P, M):
    for schedule, most in ((zb_h1(P, M), P), (zb_h2(P, M), 2 * P - 1)):
        peaks = simulate(schedule).peak_memory
        assert all(peak <= min(most, M) for peak in peaks)
        assert most > M or peaks == (most,) * P
        assert {schedule.memory(rank) for rank in range(P)} == {min(most, M)}


AUTO = st.builds(
    zb_auto,
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 14),
    costs(),
    st.sampled_from([0.25, 0.5, 1.0]),
)


@given(AUTO)
def test_zb_auto_stays_within_memory_at_every_prefix(schedule):
    _, _, memory, _, residual = (value for _, value in schedule.arguments)
    check(schedule)
    for row in rows(schedule):
        held = accumulate(Sizes(residual=residual).growth(action.kind, action.stage) for action in row)
        assert max(held) <= memory + 1e-9


@given(AUTO)
def test_zb_auto_with_memory_for_all_is_at_least_as_fast_as_1f1b(schedule):
    P, M, _, times, residual = (value for _, value in schedule.arguments)
    found = simulate(zb_auto(P, M, memory=M, costs=times, residual=residual), times).span
    assert found <= simulate(split_backward(one_f_one_b(P, M)), times).span + 1e-9


@pytest.mark.parametrize(
    ("P", "M", "memory", "F", "I", "W", "comm", "span"),
    [
        (2, 9, 7, 3, 2, 4, 1, 81),
        (4, 3, 8, 3, 2, 6, 0, 42),
        (3, 8, 4, 5, 1, 5, 1, 91),
        (4, 7, 9, 6, 1, 2, 1, 78),
        (3, 8, 6, 5, 5, 3, 1, 107),
        (4, 6, 4, 2, 6, 4, 1, 96),
    ],
)
def test_zb_auto_needs_both_settings_of_each_heuristic(P, M, memory, F, I, W, comm, span):  # noqa: E741 - the action's name
    """The spans are those of the published scheduler; each is reached by one answer to one of the three only."""
    times = Costs(F=F, I=I, W=W, comm=comm)
    assert simulate(zb_auto(P, M, memory=memory, costs=times), times).span == span


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory": 0.5}, r"zb_auto: got memory=0.5, expected at least 1: one microbatch. Choose memory >= 1."),
        ({"residual": 0}, r"zb_auto: got residual=0, expected a share above 0, at most 1. Choose residual=1 for all."),
        ({"residual": 1.5}, r"zb_auto: got residual=1.5"),
        ({"costs": 3}, r"zb_auto: got costs=3, expected Costs to find an order for. Pass Costs\("),
    ],
)
def test_invalid_arguments_of_zb_auto_are_refused(given, message):
    with pytest.raises(SizeError, match=message):
        zb_auto(ranks=4, microbatches=8, **given)


@given(st.data())
def test_zb_auto_takes_costs_that_differ_from_stage_to_stage(data):
    ranks = data.draw(st.integers(1, 8))
    times = st.tuples(*[st.sampled_from((0, 1, 2, 10, 100))] * ranks)
    costs = Costs(F=data.draw(times), I=data.draw(times), W=data.draw(times), comm=data.draw(st.sampled_from((0, 7))))
    memory, microbatches = data.draw(st.sampled_from((1, 2, 3, 8))), data.draw(st.integers(1, 6))
    check(zb_auto(ranks, microbatches, memory=memory, costs=costs))


def test_zb_auto_refuses_costs_of_another_number_of_stages():
    with pytest.raises(SizeError, match=r"Costs: got F=\(1, 2\), expected a number, or a tuple of 3"):
        zb_auto(3, 4, costs=Costs(F=(1, 2)))
