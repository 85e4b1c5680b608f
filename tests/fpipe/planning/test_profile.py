# SPDX-License-Identifier: Apache-2.0
"""What a profile says of stages follows from what it says of blocks; of several profiles, the slowest time counts."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpipe import InputError
from fpipe.planning.ranges import TIMED, Arrival, Hop, Spread, count_once, sum_blocks, sum_crossing, sum_entering
from schedules import Link, Placement, dualpipe, gpipe, looped, vee
from tests.common.profiles import TIMES, block, cuts_of, plain_profile, profiles

FOUR = profiles(blocks=4)


@st.composite
def cut_profiles(draw):
    found = draw(profiles())
    return found, draw(cuts_of(len(found.blocks)))


@given(cut_profiles())
def test_costs_are_what_is_fixed_and_the_sum_over_blocks(drawn):
    profile, cuts = drawn
    costs, stages = profile.costs(cuts), profile.stages(cuts)
    assert [block for a, b in stages for block in range(a, b)] == [*range(len(profile.blocks))]
    for k, kind in enumerate(TIMED):
        for stage, (a, b) in enumerate(stages):
            expected = profile.fixed[k] + sum(times[k] for times in profile.times[a:b])
            assert math.isclose(costs.time(kind, stage), expected, rel_tol=1e-9, abs_tol=1e-9)
            assert math.isclose(float(profile.ranges.seconds(kind)[a, b]), expected, rel_tol=1e-9, abs_tol=1e-9)
    assert costs.R is None


@given(cut_profiles())
def test_what_crosses_the_only_cut_is_what_one_stage_sends_the_other(drawn):
    profile, _ = drawn
    values, cotangents = profile.ranges.crossing
    for place in range(1, len(profile.blocks)):
        link = profile.stage_link([place])
        assert link.bytes == (values[place], 0)
        assert link.back == (0, cotangents[place])


@given(FOUR)
def test_of_several_messages_the_largest_counts(profile):
    link = profile.stage_link([1, 2, 3])
    for s in range(4):
        sent = [hop.forward for hop in profile.hops if hop.source == s]
        assert link.bytes[s] <= sum(sent)
        assert link.bytes[s] >= max(sent, default=0)
    assert link.bytes[3] == link.back[0] == 0
    assert (link.latency, link.bandwidth, link.slow) == (
        profile.link.latency,
        profile.link.bandwidth,
        profile.link.slow,
    )


def test_a_parameter_of_two_stages_on_a_rank_counts_once():
    profile = replace(plain_profile(4), parameters=(Spread(8, (0, 3)), Spread(1, (1,)), Spread(2, (2,))))
    assert profile.sizes([1, 2, 3]).weight == (8, 1, 2, 8)
    assert profile.sizes([1, 2, 3], vee(ranks=2, chunks=2)).weight == (8, 1, 2, 0)
    assert profile.sizes([1, 2, 3], looped(ranks=2, chunks=2)).weight == (8, 1, 2, 8)
    assert profile.sizes([1, 2, 3], dualpipe(4, 4).placement).weight == (8, 1, 2, 0)
    assert profile.sizes([3], Placement(3, (0, 1), ((1, 2),))).weight == (11, 8)
    assert profile.sizes([]).weight == (11,)


def test_cuts_are_names_or_numbers():
    profile = plain_profile(4)
    assert profile.stages(["m1", 3]) == ((0, 1), (1, 3), (3, 4))
    for cuts, words in [
        ([0], ("cuts[0]: got 0", "from 1 to 3")),
        ([4], ("cuts[0]: got 4", "from 1 to 3")),
        ([True], ("cuts[0]: got True",)),
        (["m0"], ("cuts[0]: got 'm0'", "'m1'", "print(profile)")),
        (["m9"], ("cuts[0]: got 'm9'", "'m1'")),
        ([2, 1], ("cuts[1]: got block 1 after block 2", "order of execution")),
        (["m1", "m1"], ("cuts[1]: got block 1 after block 1",)),
    ]:
        with pytest.raises(InputError) as caught:
            profile.stages(cuts)
        assert all(word in str(caught.value) for word in words), caught.value


def test_a_placement_of_other_stages_is_refused():
    with pytest.raises(InputError, match=r"placement: got one of 4 stages, expected 2, as the cuts make"):
        plain_profile(4).sizes([1], gpipe(4, 4).placement)


def test_a_link_that_takes_no_time_is_left_out():
    profile = replace(plain_profile(4), link=Link())
    assert profile.costs([1]).comm == 0
    assert isinstance(replace(profile, link=Link(latency=1)).costs([1]).comm, Link)


def test_a_printed_profile_has_a_row_for_each_block():
    profile = plain_profile(4)
    lines = str(profile).splitlines()
    assert [line.split()[1] for line in lines if line.strip()[:1].isdigit()] == [f"m{k}" for k in range(4)]
    assert "Profile of Model: 4 blocks, differentiated by autograd" in lines[0]


def test_a_long_profile_is_cut_short():
    text = str(plain_profile(100))
    assert "... 65 more" in text
    assert "m99" in text


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
