# SPDX-License-Identifier: Apache-2.0
"""Of several profiles of one model, the slowest time of each counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from fpipe import InputError
from fpipe.planning.ranges import TIMED
from tests.common.profiles import TIMES, block, plain_profile, profiles

FOUR = profiles(blocks=4)
SAME = ("hops", "activation", "residual", "arrivals", "versions", "parameters")


def alike(profile, other):
    """Return `other` as a profile of the same model as `profile`."""
    return replace(other, **{name: getattr(profile, name) for name in SAME})


@given(FOUR, FOUR, FOUR)
def test_the_order_does_not_matter(a, b, c):
    b, c = alike(a, b), alike(a, c)
    assert a.merge() == a.merge(a) == a.merge(a, a)
    assert a.merge(b) == b.merge(a)
    assert a.merge(b, c) == a.merge(b).merge(c) == a.merge(b.merge(c)) == c.merge(a, b)


@given(FOUR, FOUR)
def test_no_stage_is_faster_than_on_any_device(a, b):
    b = alike(a, b)
    merged = a.merge(b)
    for one in (a, b):
        for kind in TIMED:
            assert (merged.ranges.seconds(kind) >= one.ranges.seconds(kind) - 1e-9).all()
        for ends in ((0, 1), (1, 0), (2, 3)):
            assert merged.stage_link([1]).time(0, ends) >= one.stage_link([1]).time(0, ends)
    assert merged.sizes([1]) == a.sizes([1])


@given(FOUR, TIMES)
def test_each_time_is_the_largest(a, slow):
    merged = a.merge(replace(a, fixed=slow))
    assert merged.fixed == tuple(map(max, a.fixed, slow))
    assert merged.times == a.times


def test_profiles_of_other_models_are_refused_by_what_differs_first():
    a = plain_profile(4)
    for other, words in [
        (
            replace(a, blocks=(*a.blocks[:2], block(9), a.blocks[3])),
            "others[0]: got a block 2 named 'm9' of 1 operations",
        ),
        (plain_profile(3), "others[0]: got 3 blocks, expected 4"),
        (replace(a, microbatch="float32[2]"), "others[0].microbatch: got float32[2], expected float32[1]"),
        (replace(a, backward="as a graph"), "others[0].backward: got as a graph, expected by autograd"),
        (replace(a, versions=(0, 9, 0, 0)), "others[0].versions: got 9, expected 0"),
        (replace(a, hops=()), "others[0].hops: got 0 entries, expected 3 entries"),
    ]:
        with pytest.raises(InputError) as caught:
            a.merge(other)
        assert words in str(caught.value)
