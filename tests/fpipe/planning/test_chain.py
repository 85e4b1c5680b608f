# SPDX-License-Identifier: Apache-2.0
"""The largest stage of a partition is as small as any partition's."""

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from fpipe.planning.chain import partition_chain
from fpipe.planning.ranges import sum_blocks


def largest(amounts, cuts):
    return max(sum(amounts[a:b]) for a, b in pairwise([0, *cuts, len(amounts)]))


@given(st.data())
def test_no_partition_has_a_smaller_largest_stage(data):
    amounts = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    stages = data.draw(st.integers(1, 4))
    places = data.draw(st.sets(st.integers(1, max(1, len(amounts) - 1))))
    places = {k for k in places if k < len(amounts)}
    pinned = [k for k in sorted(places) if data.draw(st.booleans())]
    allowed = [cuts for cuts in combinations(sorted(places), stages - 1) if set(pinned) <= set(cuts)]
    found = partition_chain(sum_blocks(amounts), stages, places, pinned)
    if not allowed:
        assert found is None
    else:
        assert found in allowed
        assert largest(amounts, found) == min(largest(amounts, cuts) for cuts in allowed)
