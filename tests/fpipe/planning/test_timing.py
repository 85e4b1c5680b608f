# SPDX-License-Identifier: Apache-2.0
"""Times of blocks from samples of stages. Nothing here looks at a clock."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fpipe.planning.ranges import TIMED
from fpipe.planning.timing import fit_times, two_at_a_time
from schedules import check, lower

SECONDS = st.floats(0.001, 10)


def samples(costs):
    """Each stage's time, three times, for all kinds."""
    return {(kind, s): [cost] * 3 for kind in TIMED for s, cost in enumerate(costs)}


@given(st.lists(SECONDS, min_size=2, max_size=6), st.floats(0, 1), st.data())
def test_additive_times_are_found_exactly(own, fixed, data):
    """If an action takes what is fixed and the sum over its blocks, that is what comes out."""
    cut = data.draw(st.integers(1, len(own) - 1))
    few = [fixed + sum(own[:cut]), fixed + sum(own[cut:])]
    times, found = fit_times(
        samples([fixed + sum(own)]), samples(few), samples([fixed + t for t in own]), range(len(own))
    )
    assert all(math.isclose(one, fixed, rel_tol=1e-6, abs_tol=1e-9) for one in found)
    for block, expected in zip(times, own, strict=True):
        assert all(math.isclose(one, expected, rel_tol=1e-6, abs_tol=1e-9) for one in block)


@given(SECONDS, st.lists(SECONDS, min_size=1, max_size=4), st.lists(SECONDS, min_size=2, max_size=6))
def test_times_add_up_to_the_uncut_model_and_are_never_negative(whole, few, blocks):
    """Whatever disturbed the measurement."""
    times, fixed = fit_times(samples([whole]), samples(few), samples(blocks), range(len(blocks)))
    assert all(one >= 0 for block in (*times, fixed) for one in block)
    assume(sum(block.F for block in times) > 0)
    assert math.isclose(sum(block.F for block in times) + fixed.F, whole, rel_tol=1e-6)


def test_blocks_that_compute_the_same_take_the_same_time():
    times, _ = fit_times(samples([10]), samples([10]), samples([3, 2, 5]), ["a", "b", "a"])
    assert times[0] == times[2] != times[1]


def test_a_disturbed_sample_does_not_count():
    quiet = {("F", 0): [1.0, 1.0, 1.0]}
    loud = {("F", 0): [1.0, 50.0, 1.0]}
    assert fit_times(quiet, quiet, quiet, "a") == fit_times(loud, loud, loud, "a")


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 2), (2, 5)])
def test_the_schedule_that_is_timed_is_a_schedule(ranks, stages):
    how = two_at_a_time(ranks=ranks, microbatches=8, stages=stages)
    check(how)
    lower(how)
    kinds = [{action.kind for action in how.actions(0) if action.microbatch == i} for i in range(1, 8, 2)]
    assert kinds == [{"F", "B"}, {"F", "B"}, {"F", "I", "W"}, {"C", "R", "B"}]
