# SPDX-License-Identifier: Apache-2.0
"""What the docstrings of the families say holds for all sizes: formulas, limits, refusals, kinships, figures."""

import inspect
import tracemalloc
from itertools import accumulate, islice, pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as incumbent

from schedules import (
    Action,
    B,
    C,
    Costs,
    F,
    I,
    Problem,
    SizeError,
    Sizes,
    W,
    bidirectional,
    breadth_first,
    check,
    chimera,
    defer_weights,
    dualpipe,
    dualpipe_v,
    eager_1f1b,
    families,
    forward_only,
    forwards,
    gis,
    gpipe,
    group_passes,
    hanayo,
    interleaved_1f1b,
    interleaved_zero_bubble,
    kfkb,
    linear,
    merge_backward,
    mirror,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    play,
    seq_1f1b,
    simulate,
    split_backward,
    v_1f1b,
    v_half,
    v_min,
    v_schedule,
    zb_auto,
    zb_h1,
    zb_h2,
    zb_v,
)
from schedules.families.blocks import every, merge_in_order, time_passes
from schedules.families.greedy import list_rules
from schedules.families.vee import least_memory
from schedules.testing import conformance, costs, require_round_trip
from tests.common.published_costs import MEASURED, read_measured
from tests.common.routes import SEVERAL_ROUTES
from tests.common.rows import rows
from tests.common.sizes import by_night, sampled

EVERY = [getattr(families, name) for name in families.__all__]
MOST = {"ranks": 8, "microbatches": 20, "chunks": 4, "slices": 5, "waves": 3, "k": 5, "accumulate": 12}
QUARTERS = st.integers(1, 40).map(lambda quarters: quarters / 4)


@st.composite
def members(draw, factory):
    """What `factory` makes of any sizes that it does not refuse."""
    names = inspect.signature(factory).parameters
    try:
        return factory(**{name: draw(st.integers(1, MOST[name])) for name in names if name in MOST})
    except SizeError:
        reject()


def parametrize(factories):
    return {"argvalues": factories, "ids": [factory.__name__ for factory in factories]}


@sampled(3)
@pytest.mark.parametrize("factory", **parametrize(EVERY))
@given(data=st.data())
def test_any_member_is_correct_within_its_limits_and_round_trips(factory, data):
    schedule = data.draw(members(factory))
    check(schedule)
    require_round_trip(schedule)
    peak = simulate(schedule).peak_memory
    assert all(held <= schedule.memory(rank) + 1e-9 for rank, held in enumerate(peak))


@sampled(2)
@pytest.mark.parametrize("factory", **parametrize([factory for factory in EVERY if factory is not forward_only]))
def test_the_family_conforms(factory):
    conformance(factory)()


@sampled(1)
@pytest.mark.parametrize("factory", **parametrize(SEVERAL_ROUTES))
def test_schedules_on_several_routes_conform(factory):
    conformance(factory, sizes={"ranks": range(1, 6), "microbatches": range(1, 9)})()


@sampled(1)
@pytest.mark.parametrize(
    "factory",
    [
        lambda ranks, microbatches: kfkb(ranks, microbatches, k=3),
        lambda ranks, microbatches: hanayo(ranks, microbatches, waves=2),
        lambda ranks, microbatches: seq_1f1b(ranks, microbatches, slices=3),
        lambda ranks, microbatches: pipedream_2bw(ranks, microbatches, accumulate=ranks),
    ],
    ids=["kfkb", "hanayo", "seq_1f1b", "pipedream_2bw"],
)
def test_the_family_conforms_with_its_own_parameters(factory):
    conformance(factory)()


IDLE = {
    gpipe: lambda P, M, F, B: (P - 1) * (F + B),
    forward_only: lambda P, M, F, B: (P - 1) * F,
    one_f_one_b: lambda P, M, F, B: (P - 1) * (F + B),
    eager_1f1b: lambda P, M, F, B: (P - 1) * (F + B),
    kfkb: lambda P, M, F, B, k: (P - 1) * (F + B),
    interleaved_1f1b: lambda P, M, F, B, chunks: (P - 1 + (chunks - 1) * max(0, P - M)) * (F + B),
    breadth_first: lambda P, M, F, B, chunks: (P - 1 + (chunks - 1) * max(0, P - M)) * (F + B),
    hanayo: lambda P, M, F, B, waves: (
        2 * (min(P, M) - 1) * (max(F, B) + (max(1, M // P) - 1) * abs(F - B)) + 2 * waves * max(0, P - M) * (F + B)
    ),
    seq_1f1b: lambda P, M, F, B, slices: (P - 1) * (F + B) / slices,
    pipedream: lambda P, M, F, B: (P - 1) * (F + B),
    pipedream_2bw: lambda P, M, F, B, accumulate: (P - 1) * (F + B),
}
OURS = list(IDLE)
KEEPING = [interleaved_zero_bubble, chimera, dualpipe, dualpipe_v]
KEEPING += [factory for factory in OURS if factory is not forward_only]
SLOTS = Costs(F=1, B=2, I=1, W=1)


def waiting(schedule, times=SLOTS):
    """The longest time that a rank waits, after its first action and before its last; the same from start to end."""
    timeline = simulate(schedule, times)
    return timeline.span - max(timeline.busy), timeline.makespan - max(timeline.busy)


@pytest.mark.parametrize("factory", **parametrize(OURS))
@given(data=st.data(), F=QUARTERS, B=QUARTERS, U=QUARTERS)
def test_idle_time_matches_the_docstring(factory, data, F, B, U):
    schedule = data.draw(members(factory))
    P, M, *rest = (value for _, value in schedule.arguments)
    assert waiting(schedule, Costs(F=F, B=B, U=U))[1] == pytest.approx(IDLE[factory](P, M, F, B, *rest))


@given(s=members(interleaved_zero_bubble), F=QUARTERS, I=QUARTERS, W=QUARTERS)
def test_idle_time_with_deferred_weight_gradients_matches_the_docstring(s, F, I, W):  # noqa: E741 - the action's name
    W = min(F, W)
    if s.microbatches >= s.ranks:
        assert waiting(s, Costs(F=F, I=I, W=W))[1] == pytest.approx((s.ranks - 1) * (F + I - min(I, W)))


@given(eager=members(eager_1f1b), grouped=members(kfkb), F=QUARTERS, B=QUARTERS, share=st.floats(0, 1))
def test_idle_time_with_overlapped_transfers_matches_the_docstrings(eager, grouped, F, B, share):
    comm = share * (F + B) / 2
    assert waiting(eager, Costs(F=F, B=B, comm=comm))[1] == pytest.approx((eager.ranks - 1) * (F + B + 2 * comm))
    comm *= dict(grouped.arguments)["k"] - 1
    assert waiting(grouped, Costs(F=F, B=B, comm=comm))[1] == pytest.approx((grouped.ranks - 1) * (F + B + 2 * comm))


@pytest.mark.parametrize("factory", **parametrize(KEEPING))
@given(data=st.data(), F=QUARTERS, B=QUARTERS)
def test_peak_memory_is_the_limit(factory, data, F, B):
    schedule = data.draw(members(factory))
    limits = [schedule.memory(rank) for rank in range(schedule.ranks)]
    assert list(simulate(schedule, Costs(F=F, B=B)).peak_memory) == pytest.approx(limits)


def versions(schedule, rank):
    """The most versions of its weights that the rank keeps: the newest, and what microbatches in flight began with."""
    newest, began, most = 0, {}, 1
    for kind, _, i, _, _ in schedule.actions(rank):
        if kind == "F":
            began[i] = newest
        elif kind == "B":
            del began[i]
        else:
            newest += 1
        most = max(most, len({newest, *began.values()}))
    return most


@given(stashed=members(pipedream), doubled=members(pipedream_2bw))
def test_the_number_of_weight_versions_matches_the_docstring(stashed, doubled):
    P, M = stashed.ranks, stashed.microbatches
    for rank in range(P):
        kept, limit = versions(stashed, rank), stashed.versions(rank)
        assert kept <= limit <= P - rank
        assert kept == P - rank or 2 * (P - 1 - rank) > M
    assert all(versions(doubled, rank) <= doubled.versions(rank) == 2 for rank in range(doubled.ranks))


@given(members(pipedream_2bw))
def test_updates_come_after_every_group_and_after_the_remainder(s):
    M, accumulate = s.microbatches, dict(s.arguments)["accumulate"]
    for row in rows(s, without="F"):
        updates = [before.microbatch for before, action in pairwise(row) if action.kind == "U"]
        assert updates == [action.microbatch for action in row if action.kind == "U"]
        assert updates == [*range(accumulate - 1, M - 1, accumulate), M - 1]


@given(s=members(gpipe), k=st.integers(1, 5))
def test_families_coincide_at_their_special_sizes(s, k):
    P, M = s.ranks, s.microbatches
    one = rows(one_f_one_b(P, M))
    assert rows(s) == rows(breadth_first(P, M, chunks=1)) == rows(kfkb(P, M, k=M))
    assert rows(forward_only(P, M)) == rows(forwards(s))
    assert one == rows(interleaved_1f1b(P, M, chunks=1)) == rows(kfkb(P, M, k=1)) == rows(seq_1f1b(P, M, slices=1))
    assert one == rows(pipedream(P, M), without="U") == rows(pipedream_2bw(P, M, accumulate=P + k), without="U")
    assert rows(pipedream(1, M)) == rows(pipedream_2bw(1, M, accumulate=1))


@given(P=st.integers(1, 5), R=st.integers(1, 4))
def test_one_wave_is_chimera_with_its_replicas_merged(P, R):
    folded = rows(chimera(2 * P, 2 * P * R), without="G")[:P]
    assert rows(hanayo(P, P * R)) == [[a._replace(microbatch=a.microbatch // 2) for a in row] for row in folded]


@pytest.mark.parametrize("maker", [F, B, I, W, C], ids=lambda maker: maker.__name__)
def test_passes_in_groups_are_those_that_their_makers_return(maker):
    passes = list(group_passes([(maker, 3), (F, 1)], [range(2), range(5, 6)]))
    assert passes == [maker(3, 0), maker(3, 1), F(1, 0), F(1, 1), maker(3, 5), F(1, 5)]
    assert {*map(type, passes)} == {Action}


@given(s=members(interleaved_1f1b) | members(interleaved_zero_bubble))
def test_interleaved_schedules_are_those_of_torch_for_all_sizes_that_it_takes(s):
    P, M, V = (value for _, value in s.arguments)
    stage = SimpleNamespace(group_rank=0, group_size=P, num_stages=P * V, submod=None)
    kinds = {interleaved_1f1b: incumbent.ScheduleInterleaved1F1B}
    try:
        theirs = kinds.get(s.factory, incumbent.ScheduleInterleavedZeroBubble)([stage] * V, M).pipeline_order
    except ValueError:
        reject()
    ours = eager_1f1b(P, M) if s.factory is interleaved_1f1b and V == 1 else s
    texts = [[str(action) for action in theirs[rank] if action] for rank in range(P)]
    assert texts == [[str(action) for action in row] for row in rows(ours)]


HALVES = Costs(F=0.5, B=1, I=0.5, W=0.5)


@pytest.mark.parametrize(
    ("schedule", "costs", "makespan", "idle", "peak"),
    [
        (gpipe(4, 8), Costs(), 33, 9, 8),
        (one_f_one_b(4, 8), Costs(), 33, 9, (4, 3, 2, 1)),
        (one_f_one_b(4, 8), Costs(comm=0.5), 41, 17, (4, 3, 2, 1)),
        (one_f_one_b(4, 8), Costs(comm=1), 49, 25, (4, 3, 2, 1)),
        (eager_1f1b(4, 8), Costs(), 33, 9, (7, 5, 3, 1)),
        (eager_1f1b(4, 8), Costs(comm=0.5), 36, 12, (7, 5, 3, 1)),
        (eager_1f1b(4, 8), Costs(comm=1), 39, 15, (7, 5, 3, 1)),
        (kfkb(4, 8, k=2), Costs(), 33, 9, (8, 6, 4, 2)),
        (kfkb(4, 8, k=2), Costs(comm=1), 39, 15, (8, 6, 4, 2)),
        (seq_1f1b(4, 8, slices=4), Costs(), 26.25, 2.25, (1.75, 1.5, 1.25, 1)),
        (dualpipe(8, 20), Costs(), 66, 6, 9),
        (dualpipe_v(4, 10), HALVES, 33, 3, 4.5),
        (v_1f1b(4, 8), HALVES, 31.5, 7.5, 3),
        (v_min(4, 8), HALVES, 29.5, 5.5, 2),
        (v_half(4, 8), HALVES, 26.5, 2.5, 3),
        (zb_v(4, 8), HALVES, 25.5, 1.5, 4),
        (v_min(6, 18), HALVES, 62.5, 8.5, 3),
        (v_half(6, 18), HALVES, 59.5, 5.5, 4),
        (zb_v(6, 18), HALVES, 56.5, 2.5, 6),
    ],
    ids=repr,
)
def test_published_figures(schedule, costs, makespan, idle, peak):
    timeline, peaks = simulate(schedule, costs), peak if isinstance(peak, tuple) else (peak,) * schedule.ranks
    assert (timeline.makespan, timeline.makespan - max(timeline.busy), timeline.peak_memory) == (makespan, idle, peaks)


@pytest.mark.parametrize(
    ("factory", "sizes", "message"),
    [
        (chimera, {"ranks": 3}, r"got ranks=3, expected an even number: .* ranks=4"),
        (dualpipe, {"ranks": 3}, r"got ranks=3, expected an even number: .* ranks=4"),
        (chimera, {"microbatches": 1}, "got microbatches=1, expected an integer of at least 2"),
        (dualpipe, {"microbatches": 1}, "got microbatches=1, expected an integer of at least 2"),
        (kfkb, {"k": 0}, "got k=0, expected an integer of at least 1"),
        (
            pipedream_2bw,
            {"accumulate": 3},
            "got accumulate=3, expected an integer of at least 4. .* need a third version",
        ),
        (v_schedule, {"ranks": 6, "memory": 5}, r"got memory=5, expected an integer of at least 6, .*=6"),
        (zb_auto, {"memory": 0.5}, r"got memory=0.5, expected at least 1: one microbatch. Choose memory >= 1."),
        (zb_auto, {"residual": 0}, r"got residual=0, expected a share above 0, at most 1. Choose residual=1 for all."),
        (zb_auto, {"residual": 1.5}, r"got residual=1.5"),
        (zb_auto, {"costs": 3}, r"got costs=3, expected Costs to find an order for. Pass Costs\("),
        (v_half, {"costs": 3}, r"v_half: got costs=3, expected Costs to find an order for. Pass Costs\("),
        (zb_v, {"costs": Costs(F=(1, 2))}, r"got F=\(1, 2\), expected a number, or a tuple of"),
        (zb_auto, {"costs": Costs(F=(1, 2))}, r"got F=\(1, 2\), expected a number, or a tuple of 4"),
    ],
)
def test_sizes_that_a_family_does_not_take_are_refused(factory, sizes, message):
    with pytest.raises(SizeError, match=message):
        factory(**{"ranks": 4, "microbatches": 8, **sizes})


# ------------------------ Chimera, DualPipe and DualPipeV: their formulas, their figures, and what they have in common

EQUAL = Costs(F=1, B=1)
even = st.integers(1, 5).map(lambda half: 2 * half)
times = st.integers(1, 8)


def most_idle(schedule, costs):
    return max(simulate(schedule, costs).idle)


@st.composite
def split_costs(draw):
    """Times with `F = I >= W`, `B = I + W`, and pairs that may gain something."""
    F = draw(times)
    W = draw(st.integers(0, F))
    return Costs(F=F, I=F, W=W, B=F + W, OVERLAP_F=draw(st.integers(0, F)))


def pair_formula(half, costs):
    """Idle time of DualPipe, whose ranks are `half` away from the middle at most."""
    return half * (costs.OVERLAP_F + 2 * costs.time("B", 0) - 3 * costs.time("W", 0))


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


# ------------------------ V placement: published figures, the least waiting known at each memory, memory at every size


@pytest.mark.parametrize(("memory", "slots"), [(4, 11), (5, 8), (6, 5), (7, 3), (8, 0)])
def test_the_least_known_waiting_on_four_ranks(memory, slots):
    for M in (8, 9, 40):
        assert waiting(v_schedule(4, M, memory=memory))[0] == slots


@st.composite
def sized(draw):
    """Ranks, memory from the least to some of no use, and any number of microbatches."""
    P = draw(st.integers(1, 12))
    return P, draw(st.integers(least_memory(P), 2 * P + 2)), draw(st.integers(1, 4 * P))


@given(sized())
def test_any_size_is_correct_within_memory_and_waits_no_longer_than_the_docstring_says(size):
    P, memory, M = size
    schedule, m = v_schedule(P, M, memory=memory), min(memory, 2 * P)
    check(schedule)
    stall, idle = waiting(schedule)
    if m <= M:
        assert simulate(schedule).peak_memory == (m / 2,) * P
        assert stall == (0 if m == 2 * P else 3 if m == 2 * P - 1 else 6 * P - 1 - 3 * m)
        assert idle <= stall + P - 1
    if m <= M and m == 2 * P:
        assert idle == P - 1


@given(P=st.integers(1, 12), more=st.integers(0, 12))
def test_v_min_v_half_and_zb_v_are_v_schedule_at_their_memory(P, more):
    M = 2 * P + more
    for factory, m in ((v_min, 2 * ((P + 4) // 3)), (v_half, 2 * ((P + 2) // 2)), (zb_v, 2 * P)):
        assert rows(factory(P, M)) == rows(v_schedule(P, M, memory=m))
        assert factory(P, M).memory(0) == m / 2
        if factory is not zb_v:
            stall, idle = waiting(factory(P, M))
            assert stall == (6 * P - 1 - 3 * m if P >= 3 else 0)
            assert idle == stall or P == 2


@given(P=st.integers(1, 12), M=st.integers(1, 40), F=st.integers(1, 8))
def test_v_1f1b_takes_the_memory_and_time_of_its_docstring(P, M, F):
    schedule, most = v_1f1b(P, M), 2 * P // 3 + 1
    check(schedule)
    timeline = simulate(schedule, Costs(F=F, B=2 * F))
    assert all(peak <= min(most, M) for peak in timeline.peak_memory)
    if 2 * most <= M:
        assert timeline.peak_memory == (most,) * P
        assert timeline.makespan - max(timeline.busy) == (5 * (P - 1) - (P - 1) % 3) * F


@by_night
@settings(max_examples=20, deadline=None)
@given(P=st.integers(20, 48), data=st.data())
def test_large_schedules_are_correct(P, data):
    m, M = data.draw(st.integers(least_memory(P), 2 * P)), data.draw(st.integers(1, 3 * P))
    for schedule in (v_schedule(P, M, memory=m), v_1f1b(P, M)):
        check(schedule)


@given(sized())
def test_forwards_and_gradients_are_in_ascending_order(size):
    P, memory, M = size
    for schedule in (v_schedule(P, M, memory=memory), v_1f1b(P, M)):
        for row in rows(schedule):
            for kind in "FBIW":
                for stage in {action.stage for action in row}:
                    order = [action.microbatch for action in row if action[:2] == (kind, stage)]
                    assert order == sorted(order)
        check(forwards(schedule))


VEES = pytest.mark.parametrize("make", [zb_v, v_half, v_min, v_1f1b, v_schedule])


@sampled(2)
@VEES
@given(st.integers(1, 6), st.integers(1, 9), costs())
def test_a_vee_follows_costs_in_the_same_memory(make, P, M, times):
    fixed, found = make(P, M), make(P, M, costs=times)
    check(found)
    assert simulate(found, times).makespan <= simulate(fixed, times).makespan
    assert all(found.memory(rank) == fixed.memory(rank) for rank in range(P))


@VEES
@given(st.integers(1, 6), st.integers(1, 9), QUARTERS)
def test_a_vee_keeps_its_order_for_the_costs_that_it_is_made_for(make, P, M, F):
    assert rows(make(P, M, costs=Costs(F=F, B=2 * F, I=F, W=F))) == rows(make(P, M))


@sampled(2)
@pytest.mark.parametrize(
    ("make", "times", "fixed", "found"),
    [
        (v_half, Costs(F=5, B=12, I=9, W=3, comm=0.5), 989, 801),
        (v_min, Costs(F=5, B=12, I=9, W=3, comm=0.5), 1051, 920),
        (zb_v, Costs(F=5, B=12, I=9, W=3, comm=0.5), 648, 645),
        (v_1f1b, Costs(F=3, B=6, comm=2), 551, 535),
    ],
)
def test_a_vee_takes_less_time_if_it_follows_costs(make, times, fixed, found):
    assert (simulate(make(8, 16), times).makespan, simulate(make(8, 16, costs=times), times).makespan) == (fixed, found)


@sampled(2)
@pytest.mark.parametrize("make", [zb_v, v_half, v_min, v_1f1b])
def test_actions_are_generated_lazily_and_not_kept(make):
    actions = make(8, 10**9).actions(3)
    list(islice(actions, 1000))
    tracemalloc.start()
    list(islice(actions, 0, 20_000, 10_000))
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 20_000


# ---------------- Hand-written and found orders with little waiting: published rates, formulas, memory at every prefix

RATES = """
0.2431 0.1585 0.1083 0.1585 0.0433
0.1985 0.1242 0.0837 0.1242 0.0039
0.1240 0.0674 0.0444 0.0674 0.0026
0.2347 0.1323 0.0698 0.1323 0.0029
0.1898 0.1045 0.0559 0.1045 0.0022
0.1091 0.0554 0.0294 0.0554 0.0010
""".strip().splitlines()


@sampled(2)
@pytest.mark.parametrize(("line", "rates"), [*zip(MEASURED, RATES, strict=True)])
def test_bubble_rates_on_eight_ranks(line, rates):
    """arXiv 2401.10241, table 5: measured times of the 1.5B and the 6.2B model."""
    times, M = read_measured(line)
    each = [one_f_one_b(8, M), zb_h1(8, M), zb_h2(8, M)]
    each += [zb_auto(8, M, memory=memory, costs=times) for memory in (8, 16)]
    found = [waiting(schedule, times)[0] / simulate(schedule, times).span for schedule in each]
    published = [*map(float, rates.split())]
    assert [round(rate, 4) for rate in found[:4]] == published[:4]
    assert found[4] <= published[4] * 1.03  # its order is not the published one, and mostly better


@given(P=st.integers(1, 7), more=st.integers(0, 12), F=QUARTERS, I=QUARTERS, W=QUARTERS)
def test_waiting_matches_the_docstrings(P, more, F, I, W):  # noqa: E741 - the action's name
    if min(I, W) > F:
        F, I = I, F  # noqa: E741
    times, half = Costs(F=F, I=I, W=W), min(I, W)
    assert waiting(zb_h1(P, P + more), times)[1] == pytest.approx((P - 1) * (F + I - half))
    assert waiting(zb_h2(P, 2 * P - 1 + more), times)[0] == pytest.approx((P - 1) * max(0, F + I - 2 * W))


@given(P=st.integers(1, 8), M=st.integers(1, 24))
def test_zb_h1_and_zb_h2_are_1f1b_and_eager_1f1b_with_deferred_weight_gradients(P, M):
    assert rows(merge_backward(zb_h1(P, M))) == rows(one_f_one_b(P, M))
    assert rows(merge_backward(zb_h2(P, M))) == rows(eager_1f1b(P, M))
    once, twice = min(P, M), min(2 * P - 1, M)
    assert rows(zb_h1(P, M)) == rows(defer_weights(split_backward(one_f_one_b(P, M)), memory=once))
    assert rows(zb_h2(P, M)) == rows(defer_weights(split_backward(eager_1f1b(P, M)), memory=twice))
    if M >= P:
        assert rows(zb_h1(P, M)) == rows(interleaved_zero_bubble(P, M, chunks=1))


@given(P=st.integers(1, 8), M=st.integers(1, 24))
def test_every_rank_holds_as_much_as_the_first(P, M):
    for schedule, most in ((zb_h1(P, M), P), (zb_h2(P, M), 2 * P - 1)):
        peaks = simulate(schedule).peak_memory
        assert all(peak <= min(most, M) for peak in peaks)
        assert most > M or peaks == (most,) * P
        assert {schedule.memory(rank) for rank in range(P)} == {min(most, M)}


AUTO = st.builds(
    zb_auto,
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 14),
    costs(),
    st.sampled_from([0.25, 0.5, 1.0]),
)


@given(P=st.integers(1, 6), V=st.integers(1, 3), more=st.integers(0, 3), rounds=st.integers(2, 4), data=st.data())
def test_gis_takes_the_time_and_memory_of_its_docstring(P, V, more, rounds, data):
    g = min(P, (P + 1) // 2 + more)
    half = data.draw(st.integers(1, 4))
    F = data.draw(st.integers(1, 2 * half))
    I = half + data.draw(st.integers(0, F))  # noqa: E741 - the action's name
    timeline = simulate(gis(P, rounds * g, V, group=g), Costs(F=F, I=I, W=half))
    idle = (P - 1) * (F + I) + (P - g) * (V - 1) * (F + I - half)
    found = timeline.makespan - max(timeline.busy)
    assert found == idle if half == I else found <= idle
    peaks = [min((g * (V - 1) + P - r) / V, rounds * g) for r in range(P)]
    assert timeline.peak_memory == pytest.approx(peaks)


@given(st.integers(1, 8), st.integers(1, 3), st.integers(0, 4), st.integers(1, 20))
def test_gis_is_correct_in_ragged_rounds_within_less_memory(P, V, more, M):
    found = gis(P, M, V, group=(P + 1) // 2 + more)
    check(found)
    assert max(simulate(found).peak_memory) <= max(simulate(interleaved_1f1b(P, M, V)).peak_memory)
    if P > 2:
        with pytest.raises(SizeError, match="half of the ranks"):
            gis(P, M, V, group=(P - 1) // 2)


@given(AUTO)
def test_zb_auto_stays_within_memory_at_every_prefix(schedule):
    _, _, memory, _, residual = (value for _, value in schedule.arguments)
    check(schedule)
    for row in rows(schedule):
        held = accumulate(Sizes(residual=residual).growth(action.kind, action.stage) for action in row)
        assert max(held) <= memory + 1e-9


@given(AUTO)
def test_zb_auto_takes_the_least_time_of_its_own_orders(schedule):
    P, M, memory, times, residual = (value for _, value in schedule.arguments)
    problem = Problem(times, linear(P), M, memory, Sizes(residual=residual))
    each = [simulate(play(problem, rule), times).makespan for rule in list_rules(P, min(memory, M))]
    assert simulate(schedule, times).makespan <= min(each) * (1 + 1e-9)


@given(AUTO)
def test_zb_auto_with_memory_for_all_is_at_least_as_fast_as_1f1b(schedule):
    P, M, _, times, residual = (value for _, value in schedule.arguments)
    found = simulate(zb_auto(P, M, memory=M, costs=times, residual=residual), times).makespan
    assert found <= simulate(split_backward(one_f_one_b(P, M)), times).makespan


@pytest.mark.parametrize(
    ("P", "M", "memory", "F", "I", "W", "comm", "makespan"),
    [
        (2, 9, 7, 3, 2, 4, 1, 85),
        (4, 3, 8, 3, 2, 6, 0, 42),
        (3, 8, 4, 5, 1, 5, 1, 100),
        (4, 7, 9, 6, 1, 2, 1, 84),
        (3, 8, 6, 5, 5, 3, 1, 116),
        (4, 6, 4, 2, 6, 4, 1, 98),
    ],
)
def test_zb_auto_takes_as_long_as_the_published_scheduler(P, M, memory, F, I, W, comm, makespan):  # noqa: E741 - the action's name
    """Each is the best of that scheduler's eight orders; the last takes it 96."""
    times = Costs(F=F, I=I, W=W, comm=comm)
    assert simulate(zb_auto(P, M, memory=memory, costs=times), times).makespan == makespan


@given(st.data())
def test_zb_auto_takes_costs_that_differ_from_stage_to_stage(data):
    ranks = data.draw(st.integers(1, 8))
    times = st.tuples(*[st.sampled_from((0, 1, 2, 10, 100))] * ranks)
    costs = Costs(F=data.draw(times), I=data.draw(times), W=data.draw(times), comm=data.draw(st.sampled_from((0, 7))))
    memory, microbatches = data.draw(st.sampled_from((1, 2, 3, 8))), data.draw(st.integers(1, 6))
    check(zb_auto(ranks, microbatches, memory=memory, costs=costs))


# -------------------------------------- Building blocks: times, their order, and weight gradients in what is left free


@st.composite
def timed(draw):
    """Times of forwards and of input halves behind them, all different, on one stage."""
    M = draw(st.integers(1, 12))
    times = draw(st.lists(st.integers(0, 60), min_size=2 * M, max_size=2 * M, unique=True))
    forwards, halves = sorted(times[:M]), sorted(times[M:])
    return M, forwards, [half + 60 for half in halves] if any(map(int.__le__, halves, forwards)) else halves


@given(timed(), st.integers(1, 12))
def test_weight_gradients_come_in_free_slots_when_memory_is_full_or_at_the_end(case, memory):
    M, forwards, halves = case
    row = list(merge_in_order(time_passes(F, 0, forwards, M), time_passes(I, 0, halves, M), memory=memory))
    times = {**{F(0, i): t for i, t in enumerate(forwards)}, **{I(0, i): t for i, t in enumerate(halves)}}
    rest = [action for action in row if action.kind != "W"]
    assert rest == sorted(times, key=times.get)
    assert [action for action in row if action.kind == "W"] == [W(0, i) for i in range(M)]
    held, owed, gaps = 0, 0, {(a, b): times[b] - times[a] - 1 for a, b in pairwise(rest)}
    last = None
    for at, action in enumerate(row):
        if action.kind == "W":
            assert owed > 0
            held, owed = held - 1, owed - 1
            later = next((a for a in row[at:] if a.kind != "W"), None)
            if later is not None:
                assert gaps[last, later] > 0 or (later.kind == "F" and held + 1 >= memory)
                gaps[last, later] -= 1
            continue
        if last is not None:
            assert not owed or gaps[last, action] <= 0
        held, owed, last = held + (action.kind == "F"), owed + (action.kind == "I"), action
        assert held <= memory or not owed or action.kind == "I"


def test_passes_are_generated_lazily():
    row = merge_in_order(time_passes(F, 0, every(3, 0), 10**18), time_passes(I, 0, every(3, 1), 10**18))
    assert list(islice(row, 4)) == [F(0, 0), I(0, 0), W(0, 0), F(0, 1)]
