# SPDX-License-Identifier: Apache-2.0
"""Tables of all runs of blocks equal sums that are made one by one."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from fpipe.planning.ranges import Arrival, Hop, Spread, count_once, sum_blocks, sum_crossing, sum_entering

BLOCKS = st.integers(1, 6)
AMOUNTS = st.integers(0, 9)


def runs(count):
    return combinations(range(count + 1), 2)


@st.composite
def amounts(draw):
    return draw(st.lists(AMOUNTS, min_size=1, max_size=6))


@st.composite
def spreads(draw):
    count = draw(BLOCKS)
    users = st.sets(st.integers(0, count - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    return count, draw(st.lists(st.builds(Spread, AMOUNTS, users), max_size=5))


@st.composite
def hops(draw):
    count = draw(st.integers(2, 6))
    ends = st.sets(st.integers(0, count - 1), min_size=2, max_size=2).map(sorted)
    return count, [Hop(*draw(ends), draw(AMOUNTS), draw(AMOUNTS)) for _ in range(draw(st.integers(0, 5)))]


@st.composite
def arrivals(draw):
    count, found = draw(hops())
    return count, [Arrival(a, b, size, draw(st.integers(b, count))) for a, b, size, _ in found]


@given(amounts())
def test_sums_add_up(found):
    table = sum_blocks(found)
    assert all(table[a, b] == sum(found[a:b]) for a, b in runs(len(found)))
    assert table.tril().count_nonzero() == 0


@given(spreads())
def test_memory_that_blocks_share_counts_once(drawn):
    count, found = drawn
    table = count_once(found, count)
    for a, b in runs(count):
        assert table[a, b] == sum(size for size, blocks in found if any(a <= block < b for block in blocks))


@given(arrivals())
def test_a_stage_gets_what_is_made_before_it_and_used_in_it(drawn):
    count, found = drawn
    every, unsaved = sum_entering(found, count), sum_entering(found, count, unsaved=True)
    for a, b in runs(count):
        entering = [one for one in found if one.source < a <= one.target < b]
        assert every[a, b] == sum(one.bytes for one in entering)
        assert unsaved[a, b] == sum(one.bytes for one in entering if b <= one.saved)


@given(hops())
def test_what_is_made_before_a_cut_and_used_after_it_crosses_it(drawn):
    count, found = drawn
    values, cotangents = sum_crossing(found, count)
    for place in range(count + 1):
        crossing = [hop for hop in found if hop.source < place <= hop.target]
        assert values[place] == sum(hop.forward for hop in crossing)
        assert cotangents[place] == sum(hop.back for hop in crossing)
