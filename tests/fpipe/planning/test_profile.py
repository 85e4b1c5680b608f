# SPDX-License-Identifier: Apache-2.0
"""What a profile says of stages follows from what it says of blocks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpipe import InputError
from fpipe.planning.ranges import TIMED, Spread
from schedules import Costs, Link, Sizes, dualpipe, gpipe, looped, simulate, vee, zb_h1
from tests.common.profiles import cuts_of, plain_profile, profiles

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
def test_sizes_are_those_of_ranges(drawn):
    profile, cuts = drawn
    sizes, ranges = profile.sizes(cuts), profile.ranges
    for name in ("activation", "residual", "inputs"):
        assert getattr(sizes, name) == tuple(int(getattr(ranges, name)[stage]) for stage in profile.stages(cuts))
    assert sizes.weight == tuple(int(ranges.parameters[stage]) for stage in profile.stages(cuts))


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


@given(FOUR)
def test_costs_and_sizes_can_be_simulated(profile):
    cuts, how = (1, 2, 3), zb_h1(ranks=4, microbatches=6)
    costs, sizes = profile.costs(cuts), profile.sizes(cuts, how.placement)
    assert isinstance(costs, Costs)
    assert isinstance(sizes, Sizes)
    timeline = simulate(how, costs, sizes=sizes)
    expected = [6 * (costs.time("F", s) + costs.time("I", s) + costs.time("W", s)) for s in range(4)]
    assert all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in zip(timeline.busy, expected, strict=True))


def test_a_parameter_of_two_stages_on_a_rank_counts_once():
    profile = replace(plain_profile(4), parameters=(Spread(8, (0, 3)), Spread(1, (1,)), Spread(2, (2,))))
    assert profile.sizes([1, 2, 3]).weight == (8, 1, 2, 8)
    assert profile.sizes([1, 2, 3], vee(ranks=2, chunks=2)).weight == (8, 1, 2, 0)
    assert profile.sizes([1, 2, 3], looped(ranks=2, chunks=2)).weight == (8, 1, 2, 8)
    assert profile.sizes([1, 2, 3], dualpipe(4, 4).placement).weight == (8, 1, 2, 0)
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
