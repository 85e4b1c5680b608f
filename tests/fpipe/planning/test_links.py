# SPDX-License-Identifier: Apache-2.0
"""Latency and bandwidth from measured transfers."""

from __future__ import annotations

import math
from itertools import permutations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fpipe.network.measurements import pair_up
from fpipe.planning.links import MESSAGE_SIZES, fit_line, fit_link
from schedules import Link

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


@given(LATENCY, PER_BYTE, st.floats(2, 10))
def test_a_slow_pair_is_noted_with_its_factor(latency, per_byte, factor):
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
