# SPDX-License-Identifier: Apache-2.0
"""Stages as even as can be, against brute force."""

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from fpipe.cutting.balance import Forbidden, Refusal, balance


@st.composite
def chains(draw):
    """Sizes, places to cut, what crosses, and stages that are refused."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    count = len(sizes)
    places = sorted(draw(st.sets(st.integers(1, max(1, count - 1)), max_size=count))) if count > 1 else []
    crossing = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    pairs = st.tuples(st.integers(0, count), st.integers(0, count)).map(sorted)
    bad = draw(st.lists(st.tuples(pairs, pairs), max_size=3))
    return sizes, places, crossing, [Forbidden(range(*a), range(b[0], b[1] + 1)) for a, b in bad]


def weight(sizes, crossing, cuts):
    """What is made least, in this order."""
    stages = [sum(sizes[a:b]) for a, b in pairwise([0, *cuts, len(sizes)])]
    return max(stages), sum(crossing[cut] for cut in cuts), sum(stage**2 for stage in stages)


@given(chains(), st.integers(1, 5), st.sampled_from([1.0, 1.5]))
def test_even_cuts_are_the_best_of_those_not_refused(chain, stages, slack):
    sizes, places, crossing, bad = chain

    def refused(cuts):
        bounds = list(pairwise([0, *cuts, len(sizes)]))
        return [one for one in bad if any(a in one.begins and b in one.stops for a, b in bounds)]

    def refusal(cuts):
        return Refusal("refused", tuple(refused(cuts))[:1]) if refused(cuts) else None

    allowed = [cuts for cuts in combinations(places, stages - 1) if not refused(cuts)]
    found = balance(places, sizes, stages, refusal, crossing, slack)
    if not allowed:
        assert isinstance(found, Refusal)
        assert found.reason == ("refused" if len(places) >= stages - 1 else "")
        return
    best = min(weight(sizes, crossing, cuts) for cuts in allowed)
    assert found in allowed
    got = weight(sizes, crossing, found)
    assert got[0] <= slack * best[0]
    assert got == best or (slack > 1 and got[1:] < best[1:])
