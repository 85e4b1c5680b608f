# SPDX-License-Identifier: Apache-2.0
"""Chimera, DualPipe and DualPipeV: their formulas, their figures, and what they have in common."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as incumbent

from schedules import (
    Costs,
    SizeError,
    bidirectional,
    check,
    chimera,
    dualpipe,
    dualpipe_v,
    merge_backward,
    mirror,
    one_f_one_b,
    simulate,
)
from schedules.testing import conformance

test_chimera_conforms = conformance(chimera)
test_dualpipe_conforms = conformance(dualpipe)
test_dualpipe_v_conforms = conformance(dualpipe_v)

EQUAL = Costs(F=1, B=1)
even = st.integers(1, 5).map(lambda half: 2 * half)
times = st.integers(1, 8)


def most_idle(schedule, costs):
    return max(simulate(schedule, costs).idle)


def peaks(schedule):
    return list(simulate(schedule).peak_memory)


def declared_memory(schedule):
    return [schedule.memory(rank) for rank in range(schedule.ranks)]


@st.composite
def split_costs(draw):
    """Times with `F = I >= W`, `B = I + W`, and pairs that may gain something."""
    F = draw(times)
    W = draw(st.integers(0, F))
    return Costs(F=F, I=F, W=W, B=F + W, OVERLAP_F=draw(st.integers(0, F)))


def pair_formula(half, costs):
    """Idle time of DualPipe, whose ranks are `half` away from the middle at most."""
    return half * (costs.OVERLAP_F + costs.B + costs.B - 3 * costs.W)


@given(even, st.integers(2, 40))
def test_the_peak_memory_is_the_declared_limit(P, M):
    for s in (chimera(P, M), dualpipe(P, M), dualpipe_v(P, M), dualpipe_v(P - 1, M - 1)):
        assert peaks(s) == declared_memory(s)
        check(s)


@given(even, st.integers(1, 4), times, times)
def test_idle_time_of_chimera_in_whole_units(P, units, F, B):
    idle = (P - 2) * (max(F, B) + (units - 1) * abs(F - B))
    assert simulate(chimera(P, units * P), Costs(F=F, B=B)).idle == (idle,) * P


@given(even, st.integers(2, 40))
def test_idle_time_of_chimera_with_a_last_unit_in_part(P, M):
    last = (M - 1) % P + 1
    assert most_idle(chimera(P, M), EQUAL) == 2 * P - 2 - 2 * (last // 2)


@given(even, st.integers(0, 10), split_costs())
def test_idle_time_of_dualpipe(P, more, costs):
    M = 2 * P - 2 + 2 * more
    assert most_idle(dualpipe(P, max(2, M)), costs) == pair_formula(P // 2 - 1, costs)
    assert simulate(dualpipe(P, M + 1), costs).makespan == simulate(dualpipe(P, M + 2), costs).makespan


@given(st.integers(1, 6), st.integers(0, 12), split_costs())
def test_idle_time_of_dualpipe_v(P, more, costs):
    assert most_idle(dualpipe_v(P, 2 * P - 1 + more), costs) == pair_formula(P - 1, costs)


@given(even, st.integers(2, 16))
def test_up_to_one_unit_chimera_is_as_fast_as_mirrored_1f1b(P, M):
    if M <= P and M % 2 == 0:
        for costs in (EQUAL, Costs()):
            assert simulate(chimera(P, M), costs).makespan == simulate(mirror(one_f_one_b(P, M // 2)), costs).makespan


def one_way(schedule, rank, way):
    """The forwards and backwards of the microbatches that go one way, as if there were no other."""
    plain = {"OVERLAP_F": "F", "I": "B"}
    return [
        action._replace(kind=plain.get(action.kind, action.kind), microbatch=action.microbatch // 2)
        for action in schedule.actions(rank)
        if action.microbatch % 2 == way and action.kind not in "WG"
    ]


@given(even, st.integers(2, 30))
def test_in_each_direction_dualpipe_is_1f1b(P, M):
    s = dualpipe(P, M)
    for rank in range(P):
        assert one_way(s, rank, 0) == [*one_f_one_b(P, (M + 1) // 2).actions(rank)]
        assert one_way(s, rank, 1) == [*one_f_one_b(P, M // 2).actions(P - 1 - rank)]


@given(even, st.integers(1, 16))
def test_the_two_directions_are_mirror_images(P, pairs):
    for s in (chimera(P, 2 * pairs), dualpipe(P, 2 * pairs)):
        for rank in range(P):
            there = [a._replace(microbatch=a.microbatch ^ 1) for a in s.actions(P - 1 - rank) if a.kind != "G"]
            assert [a for a in s.actions(rank) if a.kind != "G"] == there


@given(st.integers(1, 5), st.integers(1, 12))
def test_dualpipe_v_is_dualpipe_folded(P, M):
    wide, narrow = dualpipe(2 * P, 2 * M), dualpipe_v(P, M)
    for rank in range(P):
        folded = [a._replace(microbatch=a.microbatch // 2) for a in wide.actions(rank) if a.kind != "G"]
        assert folded == [*narrow.actions(rank)]


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(0, 10))
def test_dualpipe_v_is_that_of_torch(P, more):
    M = 2 * P + more
    stage = SimpleNamespace(group_rank=0, group_size=P, num_stages=2 * P, submod=None)
    order = incumbent.ScheduleDualPipeV([stage] * 2, M).pipeline_order
    for rank in range(P):
        theirs = [a.sub_actions or (a,) for a in order[rank] if a]
        pairs = [f"{pass_}".replace("F", "OVERLAP_F" if len(step) > 1 else "F") for step in theirs for pass_ in step]
        assert [str(a) for a in dualpipe_v(P, M).actions(rank)] == pairs


@given(even, st.integers(2, 20))
def test_gradients_are_summed_last_and_accumulate_in_order(P, M):
    for s in (chimera(P, M), dualpipe(P, M)):
        assert s.placement == bidirectional(P)
        for rank in range(P):
            actions = [*s.actions(rank)]
            assert [(a.kind, a.stage) for a in actions[-2:]] == [("G", stage) for stage in s.placement.stages_on(rank)]
            for stage in s.placement.stages_on(rank):
                mine = [a.microbatch for a in actions if a.stage == stage and a.kind in "BW"]
                assert mine == sorted(mine)
                assert actions[-2:][stage != min(rank, P - 1 - rank)].microbatch == mine[-1]


FIGURES = [
    (dualpipe(ranks=8, microbatches=20), Costs(F=1, B=2, I=1, W=1), 66, 6, [9] * 8),
    (dualpipe_v(ranks=4, microbatches=10), Costs(F=0.5, B=1, I=0.5, W=0.5), 33, 3, [4.5] * 4),
]


@pytest.mark.parametrize(("schedule", "costs", "makespan", "idle", "peak"), FIGURES)
def test_simulations_agree_with_the_reference_figures(schedule, costs, makespan, idle, peak):
    timeline = simulate(schedule, costs)
    assert (timeline.makespan, list(timeline.peak_memory)) == (makespan, peak)
    assert timeline.makespan - max(timeline.busy) == idle


def test_overlap_makes_the_schedule_faster():
    s = dualpipe(ranks=8, microbatches=20)
    assert simulate(s, Costs(OVERLAP_F=0.5)).makespan < simulate(s).makespan == 66
    assert simulate(merge_backward(s)).makespan > 66


@pytest.mark.parametrize("factory", [chimera, dualpipe])
def test_invalid_sizes_are_refused(factory):
    with pytest.raises(SizeError, match=rf"{factory.__name__}: got ranks=3, expected an even number: .* ranks=4"):
        factory(ranks=3, microbatches=4)
    with pytest.raises(SizeError, match=rf"{factory.__name__}: got microbatches=1, expected an integer of at least 2"):
        factory(ranks=2, microbatches=1)
