# SPDX-License-Identifier: Apache-2.0
"""Idle time is predicted from the shortest of the last waits, and an allowance is a share of the time."""

from hypothesis import given
from hypothesis import strategies as st

from fpipe.audits.auditor import run_again
from fpipe.audits.idle import REMEMBERED, Allowance, IdleTimes

waits = st.lists(st.floats(0, 1), min_size=1, max_size=12)


@given(waits)
def test_a_wait_is_predicted_only_after_several_that_were_as_long(found):
    times = IdleTimes()
    for k, wait in enumerate(found):
        assert times.predict("here") == (min(found[k - REMEMBERED : k]) if k >= REMEMBERED else 0.0)
        times.add("here", 0.0, wait)
    assert times.predict("elsewhere") == 0.0


@given(st.floats(0.01, 1), st.floats(0.01, 1))
def test_whoever_is_late_does_not_use_the_place_again_for_a_while(used, waited):
    times = IdleTimes()
    for _ in range(REMEMBERED):
        times.add("here", used, waited * used)
    assert times.predict("here") == (used + waited * used if waited >= 0.05 and waited * used >= 5e-4 else 0.0)
    times.add("here", used, 0.0)
    assert times.predict("here") == 0.0


@given(st.floats(1e-3, 1), st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1)), max_size=20))
def test_an_allowance_never_spends_more_than_its_share(share, steps):
    allowance, spent, passed = Allowance(share), 0.0, 0.0
    for seconds, cost in steps:
        allowance.earn(seconds)
        passed += seconds
        if allowance.allows(cost):
            allowance.spend(cost)
            spent += cost
        assert spent <= share * passed + 1e-9


def test_cheap_actions_leave_enough_for_expensive_ones():
    allowance, spent = Allowance(0.01), []
    for k in range(1000):
        allowance.earn(1.0)
        cost = 2.0 if k % 2 else 0.01
        if allowance.allows(cost):
            allowance.spend(cost)
            spent.append(cost)
    assert 3 <= spent.count(2.0) <= 5


def test_nothing_is_left_at_first_and_everything_without_a_limit():
    assert not Allowance(0.5).allows()
    endless = Allowance(float("inf"))
    endless.earn(0.1)
    endless.spend(1e9)
    assert endless.allows(1e9)


class Ready:
    """An action to run again, which takes as long as it did."""

    is_ready, seconds = True, 1.0

    def compare(self, free):
        return self.seconds


def test_what_runs_again_fits_into_the_free_time_together():
    actions = [Ready() for _ in range(3)]
    assert [run_again(actions, free) for free in (1.0, 1.5, 2.5, 9.0)] == [0.0, 1.0, 2.0, 3.0]
