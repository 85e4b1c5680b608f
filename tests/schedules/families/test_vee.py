# SPDX-License-Identifier: Apache-2.0
"""V placement: published figures, the least waiting known at each memory, memory at every size."""

import tracemalloc
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    Costs,
    SizeError,
    check,
    forwards,
    simulate,
    v_1f1b,
    v_half,
    v_min,
    v_schedule,
    zb_v,
)
from schedules.families.vee import least_memory
from schedules.proof.interpreter import prove
from tests.common.rows import rows

SLOTS = Costs(F=1, B=2, I=1, W=1)


def waiting(schedule, times=SLOTS):
    """The longest time that a rank waits, after its first action and before its last; the same from start to end."""
    timeline = simulate(schedule, times)
    return timeline.span - max(timeline.busy), timeline.makespan - max(timeline.busy)


@pytest.mark.parametrize(
    ("schedule", "makespan", "idle", "stall", "peak"),
    [
        (v_1f1b(4, 8), 31.5, 7.5, 7.5, 3),
        (v_min(4, 8), 29.5, 5.5, 5.5, 2),
        (v_half(4, 8), 26.5, 2.5, 2.5, 3),
        (zb_v(4, 8), 25.5, 1.5, 0, 4),
        (v_min(6, 18), 62.5, 8.5, 8.5, 3),
        (v_half(6, 18), 59.5, 5.5, 5.5, 4),
        (zb_v(6, 18), 56.5, 2.5, 0, 6),
    ],
    ids=repr,
)
def test_published_figures(schedule, makespan, idle, stall, peak):
    times = Costs(F=0.5, B=1, I=0.5, W=0.5)
    timeline = simulate(schedule, times)
    assert (timeline.makespan, timeline.peak_memory) == (makespan, (peak,) * schedule.ranks)
    assert waiting(schedule, times) == (stall, idle)


@pytest.mark.parametrize(("memory", "slots"), [(4, 11), (5, 8), (6, 5), (7, 3), (8, 0)])
def test_the_least_known_waiting_on_four_ranks(memory, slots):
    for M in (8, 9, 40):
        assert waiting(v_schedule(4, M, memory=memory))[0] == slots


@st.composite
def sized(draw):
    """Ranks, memory from the least to some of no use, and any number of microbatches."""
    P = draw(st.integers(1, 12))
    return P, draw(st.integers(least_memory(P), 2 * P + 2)), draw(st.integers(1, 4 * P))


@given(sized())
def test_any_size_is_correct_within_memory_and_waits_no_longer_than_the_docstring_says(size):
    P, memory, M = size
    schedule, m = v_schedule(P, M, memory=memory), min(memory, 2 * P)
    check(schedule)
    stall, idle = waiting(schedule)
    if m <= M:
        assert simulate(schedule).peak_memory == (m / 2,) * P
        assert stall == (0 if m == 2 * P else 3 if m == 2 * P - 1 else 6 * P - 1 - 3 * m)
        assert idle <= stall + P - 1
    if m <= M and m == 2 * P:
        assert idle == P - 1


@given(P=st.integers(1, 12), more=st.integers(0, 12))
def test_v_min_v_half_and_zb_v_are_v_schedule_at_their_memory(P, more):
    M = 2 * P + more
    for factory, m in ((v_min, 2 * ((P + 4) // 3)), (v_half, 2 * ((P + 2) // 2)), (zb_v, 2 * P)):
        assert rows(factory(P, M)) == rows(v_schedule(P, M, memory=m))
        assert factory(P, M).memory(0) == m / 2
        if factory is not zb_v:
            stall, idle = waiting(factory(P, M))
            assert stall == (6 * P - 1 - 3 * m if P >= 3 else 0)
            assert idle == stall or P == 2


@given(P=st.integers(1, 12), M=st.integers(1, 40), F=st.integers(1, 8))
def test_v_1f1b_takes_the_memory_and_time_of_its_docstring(P, M, F):
    schedule, most = v_1f1b(P, M), 2 * P // 3 + 1
    check(schedule)
    timeline = simulate(schedule, Costs(F=F, B=2 * F))
    assert all(peak <= min(most, M) for peak in timeline.peak_memory)
    if 2 * most <= M:
        assert timeline.peak_memory == (most,) * P
        assert timeline.makespan - max(timeline.busy) == (5 * (P - 1) - (P - 1) % 3) * F


@settings(max_examples=20, deadline=None)
@given(P=st.integers(20, 48), data=st.data())
def test_large_schedules_are_correct(P, data):
    m, M = data.draw(st.integers(least_memory(P), 2 * P)), data.draw(st.integers(1, 3 * P))
    for schedule in (v_schedule(P, M, memory=m), v_1f1b(P, M)):
        check(schedule)


@given(sized())
def test_forwards_and_gradients_are_in_ascending_order(size):
    P, memory, M = size
    for schedule in (v_schedule(P, M, memory=memory), v_1f1b(P, M)):
        for row in rows(schedule):
            for kind in "FBIW":
                for stage in {action.stage for action in row}:
                    order = [action.microbatch for action in row if action[:2] == (kind, stage)]
                    assert order == sorted(order)
        check(forwards(schedule))


def test_schedules_compute_the_whole_model():
    for schedule in (v_schedule(3, 4, memory=5), v_1f1b(3, 4)):
        prove(schedule)


@pytest.mark.parametrize("memory", [0, 5, True, 6.5, "8"])
def test_a_memory_limit_below_the_least_is_refused(memory):
    with pytest.raises(SizeError, match=rf"v_schedule: got memory={memory!r}, expected an integer of at least 6, .*=6"):
        v_schedule(ranks=6, microbatches=8, memory=memory)


@pytest.mark.parametrize("make", [zb_v, v_half, v_min, v_1f1b])
def test_actions_are_generated_lazily_and_not_kept(make):
    actions = make(8, 10**9).actions(3)
    list(islice(actions, 1000))
    tracemalloc.start()
    list(islice(actions, 0, 20_000, 10_000))
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 20_000
