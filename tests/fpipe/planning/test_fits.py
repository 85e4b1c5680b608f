# SPDX-License-Identifier: Apache-2.0
"""Latency and bandwidth from measured transfers, and times of blocks from samples of stages, without a clock."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fpipe.network.measurements import pair_up
from fpipe.planning.ranges import TIMED
from fpipe.planning.timing import MESSAGE_SIZES, fit_line, fit_link, fit_times, two_at_a_time
from schedules import Link, check, lower

LATENCY, PER_BYTE = st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-7)


def rows(ranks, seconds):
    return torch.tensor(
        [(a, b, size, seconds(a, b, size)) for a, b in permutations(range(ranks), 2) for size in MESSAGE_SIZES],
        dtype=torch.float64,
    )


@given(LATENCY, PER_BYTE)
def test_a_line_is_found(latency, per_byte):
    found = fit_line([(size, latency + size * per_byte) for size in MESSAGE_SIZES])
    assert math.isclose(found[0], latency, rel_tol=1e-3, abs_tol=1e-9)
    assert math.isclose(found[1], per_byte, rel_tol=1e-3)


@given(st.lists(st.tuples(st.sampled_from(MESSAGE_SIZES), st.floats(1e-6, 1)), min_size=1, max_size=8))
def test_no_fit_is_negative(transfers):
    assert min(fit_line(transfers)) >= 0


@given(LATENCY, PER_BYTE, st.floats(2, 10) | st.floats(0.1, 0.5))
def test_a_slow_or_fast_pair_is_noted_with_its_factor(latency, per_byte, factor):
    def seconds(a, b, size):
        return (latency + size * per_byte) * (factor if {a, b} == {0, 3} else 1)

    found = fit_link(rows(4, seconds))
    assert {ends for ends, _ in found.slow} == {(0, 3), (3, 0)}
    whole = Link(found.latency, found.bandwidth, bytes=10**6, slow=found.slow)
    assert math.isclose(whole.time(0, (0, 3)), seconds(0, 3, 10**6), rel_tol=1e-2)
    assert math.isclose(whole.time(0, (1, 2)), seconds(1, 2, 10**6), rel_tol=1e-2)


def test_without_transfers_a_link_is_instant():
    assert fit_link(torch.empty(0, 4)) == Link()


@given(st.integers(2, 17))
def test_every_two_players_meet_once_and_nobody_is_in_two_places(players):
    rounds = list(pair_up(players))
    assert sorted(pair for pairs in rounds for pair in pairs) == [
        (a, b) for a in range(players) for b in range(a + 1, players)
    ]
    assert all(len({player for pair in pairs for player in pair}) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds) == players - 1 + players % 2


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


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 2), (2, 5)])
def test_the_schedule_that_is_timed_is_a_schedule(ranks, stages):
    how = two_at_a_time(ranks=ranks, microbatches=8, stages=stages)
    check(how)
    lower(how)
    kinds = [{action.kind for action in how.actions(0) if action.microbatch == i} for i in range(1, 8, 2)]
    assert kinds == [{"F", "B"}, {"F", "B"}, {"F", "I", "W"}, {"C", "R", "B"}]
