# SPDX-License-Identifier: Apache-2.0
"""The laws of transforms that change an order: splitting, merging, recomputing, mirroring, overlapping, connecting."""

import pickle
from contextlib import suppress
from itertools import accumulate, pairwise, product
from math import isfinite

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schedules import (
    KINDS,
    B,
    C,
    Costs,
    F,
    G,
    GraphError,
    I,
    R,
    ScheduleError,
    SizeError,
    Sizes,
    U,
    W,
    bidirectional,
    breadth_first,
    chain,
    check,
    chimera,
    connect,
    dag,
    defer_weights,
    dualpipe_v,
    eager_1f1b,
    forward_only,
    forwards,
    from_rows,
    gis,
    gpipe,
    hanayo,
    interleaved_1f1b,
    interleaved_zero_bubble,
    linear,
    lower,
    memory_over_time,
    merge_backward,
    mirror,
    offload,
    one_f_one_b,
    overlap,
    parse,
    pipedream,
    recompute,
    schedule,
    seq_1f1b,
    simulate,
    spans,
    split_backward,
    transform,
)
from schedules.checking.rules import kinds_of
from schedules.files.csv import table
from schedules.playing.rows import edit
from schedules.proof.interpreter import ideal, prove
from schedules.testing import conformance, graphs, orders, require_round_trip, schedules
from schedules.transforms.connect import format_graph, parse_graph
from schedules.transforms.shorten import find_fewest, shorten
from tests.common.rows import rows

# ---------------------------------------------------------------------------------------------- The laws of transforms

both = schedules([gpipe, one_f_one_b])


@given(both)
def test_merging_undoes_splitting(s):
    assert rows(merge_backward(split_backward(s))) == rows(s)


@settings(deadline=None)
@given(orders())
def test_splitting_or_merging_twice_is_the_same_as_once(case):
    s, _ = case
    assert rows(split_backward(split_backward(s))) == rows(split_backward(s))
    assert rows(merge_backward(merge_backward(s))) == rows(merge_backward(s))
    assert rows(merge_backward(split_backward(s))) == rows(merge_backward(s))


def peak(schedule, rank):
    """The most activations, in units of the rank's share of one microbatch, counted at every prefix."""
    growth = [Sizes().growth(action.kind, 0) for action in schedule.actions(rank)]
    return max(accumulate(growth), default=0) * schedule.ranks / schedule.stages / schedule.slices


def defer(schedule, room):
    """As far as a limit allows that has room for so many activations more than the fullest rank needs."""
    limits = [(schedule.memory(rank), peak(schedule, rank)) for rank in range(schedule.ranks)]
    most = max(declared if isfinite(declared) else counted for declared, counted in limits)
    return defer_weights(schedule, memory=most + room * schedule.ranks / schedule.stages / schedule.slices)


def may_wait_in_a_circle(schedule, graph):
    """Return whether updates use gradients of other stages: ranks that defer these may wait for each other."""
    return bool(graph.gradients) and "U" in kinds_of(schedule)


@settings(deadline=None)
@given(orders(), st.integers(0, 6), st.data())
def test_correct_schedules_stay_correct(case, room, data):
    s, graph = case
    some = data.draw(st.sets(st.integers(0, s.stages - 1)))
    deferred = [] if may_wait_in_a_circle(s, graph) else [defer(s, room), defer(split_backward(s), room)]
    for changed in (
        split_backward(s),
        merge_backward(s),
        recompute(s),
        *deferred,
        *[recompute(one, stages=tuple(some)) for one in deferred[1:]],
    ):
        check(changed, graph)
        prove(changed, graph)
    check(forwards(s), graph)


FAMILIES = [one_f_one_b, gpipe, eager_1f1b, interleaved_1f1b, interleaved_zero_bubble, seq_1f1b, pipedream]
TRANSFORMS = [split_backward, merge_backward, recompute, offload, overlap, mirror, lambda s: defer(s, 3)]


@settings(deadline=None)
@given(schedules([*FAMILIES, dualpipe_v, chimera]), st.sampled_from([*TRANSFORMS, None]), st.data())
def test_the_first_microbatches_of_a_schedule_are_a_schedule(s, change, data):
    """With the same order, and in the same memory; updates and collectives are added afterwards."""
    with suppress(SizeError):
        s = change(s) if change else s
    least = find_fewest(s)
    if any(action.kind == "U" for action in s.actions(0)):
        with pytest.raises(SizeError, match="Shorten it first"):
            list(shorten(s, s.microbatches).actions(0))
        return
    short = shorten(s, data.draw(st.integers(least, s.microbatches)))
    check(short)
    for rank in range(s.ranks):
        kept = [a for a in s.actions(rank) if a.microbatch < short.microbatches and a.kind != "G"]
        assert [a[1:] for a in kept] == [a[1:] for a in short.actions(rank) if a.kind != "G"]
    for wrong in (least - 1, s.microbatches + 1):
        with pytest.raises(SizeError, match="shorten: got microbatches="):
            shorten(s, wrong)


@settings(deadline=None)
@given(schedules(FAMILIES), st.lists(st.sampled_from(TRANSFORMS), max_size=4))
def test_families_stay_correct_under_several_transforms(s, several):
    for change in several:
        with suppress(SizeError):  # what cannot be mirrored
            s = change(s)
    check(s)
    require_round_trip(s)


def test_stages_without_a_backward_are_not_recomputed():
    s = forwards(one_f_one_b(ranks=2, microbatches=3))
    check(recompute(s))
    assert rows(recompute(s)) == rows(s)


@settings(deadline=None)
@given(orders(), st.integers(0, 6))
def test_transforms_leave_other_actions_alone(case, room):
    s, _ = case
    assert rows(split_backward(s), without="IW") == rows(s, without="BIW")
    assert rows(merge_backward(s), without="B") == rows(s, without="BIW")
    assert rows(defer(s, room), without="W") == rows(s, without="W")
    moves = ("OFFLOAD", "RELOAD")  # of what is recomputed, there is nothing to move
    assert rows(recompute(s), without=("C", "R", *moves)) == rows(s, without=("C", "R", "F", "OVERLAP_F", *moves))


@settings(deadline=None)
@given(orders(), st.integers(0, 6))
def test_weight_gradients_move_to_the_place_of_a_later_one_and_stay_in_order(case, room):
    s, _ = case
    s = split_backward(s)
    for before, after in zip(rows(s), rows(defer(s, room)), strict=True):
        for stage in range(s.stages):
            assert [a for a in after if a[:2] == ("W", stage)] == [a for a in before if a[:2] == ("W", stage)]
        late, due = (
            {a: sum(b.kind != "W" for b in row[: row.index(a)]) for a in row if a.kind == "W"}
            for row in (after, before)
        )
        assert all(late[action] >= due[action] for action in due)
    if room == 0:
        fullest = max(range(s.ranks), key=lambda rank: peak(s, rank))
        assert rows(defer(s, 0))[fullest] == rows(s)[fullest]


@settings(deadline=None)
@given(orders(), st.integers(0, 6))
def test_memory_stays_within_the_limit_at_every_prefix(case, room):
    s, _ = case
    for changed in (defer(s, room), defer(split_backward(s), room)):
        limit = dict(changed.arguments)["memory"]
        assert all(peak(changed, rank) <= limit + 1e-9 for rank in range(s.ranks))
    for changed in (split_backward(s), merge_backward(s), recompute(s)):
        assert all(peak(changed, rank) <= peak(s, rank) for rank in range(s.ranks))


@given(schedules(FAMILIES))
def test_limits_are_kept(s):
    for changed in (split_backward(s), merge_backward(s), recompute(s), overlap(s)):
        assert [changed.memory(rank) for rank in range(s.ranks)] == [s.memory(rank) for rank in range(s.ranks)]
        assert [changed.versions(rank) for rank in range(s.ranks)] == [s.versions(rank) for rank in range(s.ranks)]


def test_a_weight_gradient_never_passes_the_sum_or_the_update_that_uses_it():
    row = (F(0, 0), I(0, 0), W(0, 0), U(0, 0), F(0, 1), I(0, 1), W(0, 1), U(0, 1))
    s = edit(gpipe(1, 2), (row,))
    assert rows(defer_weights(s, memory=2)) == [list(row)]
    free = tuple(action for action in row if action.kind != "U")
    late = [F(0, 0), I(0, 0), F(0, 1), I(0, 1), W(0, 0), W(0, 1)]
    assert rows(defer_weights(edit(gpipe(1, 2), (free,)), memory=2)) == [late]


def test_a_limit_below_what_the_schedule_needs_is_refused():
    s = split_backward(one_f_one_b(ranks=4, microbatches=8))
    with pytest.raises(SizeError, match=r"defer_weights: got memory=3, expected at least the 4 that rank 0 .*>= 4"):
        check(defer_weights(s, memory=3))
    assert rows(defer_weights(s, memory=4))[0] == rows(s)[0]


@settings(deadline=None)
@given(orders(), st.data())
def test_recomputation_comes_directly_before_the_backward_on_the_named_stages(case, data):
    s, _ = case
    stages = tuple(sorted(data.draw(st.sets(st.integers(0, s.stages - 1)))))
    for before, after in zip(rows(s), rows(recompute(s, stages=stages)), strict=True):
        fresh = {action[1:] for action in after if action.kind == "R"} - {a[1:] for a in before if a.kind == "R"}
        forwards_of = {a[1:] for a in before if a.kind in ("F", "OVERLAP_F") and a.stage in stages}
        assert fresh == forwards_of
        for unit in fresh:
            at = after.index(R(unit[0], unit[1], unit[3]))
            assert C(unit[0], unit[1], unit[3]) in after[:at]
            behind = [a for a in after[at + 1 : at + 3] if a.kind != "OVERLAP_F"]
            assert behind[0] in (B(unit[0], unit[1], unit[3]), I(unit[0], unit[1], unit[3]))


def test_recomputing_splits_fused_pairs_of_its_own_stages_only():
    text = "0F0 1F0 0F1 1F1 1B0 0OVERLAP_F2 1B1 0B0 1F2 1B2 0B1 0B2"
    s = edit(interleaved_1f1b(1, 3, chunks=2), (tuple(map(parse, text.split())),))
    check(s)
    texts = [" ".join(map(str, rows(recompute(s, stages=stages))[0])) for stages in ((1,), (0,))]
    assert texts[0] == "0F0 1C0 0F1 1C1 1R0 1B0 1R1 0OVERLAP_F2 1B1 0B0 1C2 1R2 1B2 0B1 0B2"
    assert texts[1] == "0C0 1F0 0C1 1F1 1B0 0C2 1B1 0R0 0B0 1F2 1B2 0R1 0B1 0R2 0B2"


def test_recomputed_activations_are_held_from_the_recomputation_on():
    assert simulate(recompute(gpipe(ranks=4, microbatches=8))).peak_memory == (1, 1, 1, 1)


@settings(deadline=None)
@given(orders(), st.integers(0, 6))
def test_the_order_of_the_gradients_is_kept(case, room):
    s, graph = case
    deferred = [] if may_wait_in_a_circle(s, graph) else [defer(split_backward(s), room)]
    for changed in (split_backward(s), recompute(s), *deferred):
        before, after = ideal(s, graph), ideal(changed, graph)  # outputs come in the order in which replicas make them
        assert (after.gradients, after.sums, after.copies) == (before.gradients, before.sums, before.copies)


@settings(deadline=None)
@given(orders())
def test_forwards_keeps_the_forwards_only(case):
    s, _ = case
    units = [[action[1:] for action in row if KINDS[action.kind].crosses == "F"] for row in rows(s)]
    assert [[action[1:] for action in row] for row in rows(forwards(s))] == units
    assert {action.kind for row in rows(forwards(s)) for action in row} == {"F"}
    assert rows(forwards(split_backward(s))) == rows(forwards(forwards(s))) == rows(forwards(s))


def test_evaluation_fills_and_drains():
    assert simulate(forwards(one_f_one_b(ranks=4, microbatches=8))).makespan == 8 + 4 - 1


@given(both)
def test_a_transformed_schedule_is_an_ordinary_schedule(s):
    for made in (split_backward(s), forwards(merge_backward(schedule=s))):
        require_round_trip(made)
        assert hash(pickle.loads(pickle.dumps(made))) == hash(made)
        assert (made.ranks, made.microbatches, made.placement) == (s.ranks, s.microbatches, s.placement)


def test_a_transformed_schedule_prints_as_the_calls_that_make_it():
    s = merge_backward(split_backward(gpipe(2, 3)))
    assert repr(s) == "merge_backward(schedule=split_backward(schedule=gpipe(ranks=2, microbatches=3)))"
    assert s != merge_backward(split_backward(gpipe(2, 4)))
    assert split_backward(gpipe(2, 3)) != merge_backward(gpipe(2, 3))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([F(0, 0), W(0, 0)], "rank 0, position 1, 0W0: comes before 0I0 [rule: forward_before_backward]."),
        ([F(0, 0), B(0, 0), W(0, 0)], "rank 0, position 2, 0W0: comes before 0I0 [rule: forward_before_backward]."),
        ([I(0, 0), W(0, 0), W(0, 0)], "rank 0, position 2, 0W0: comes before 0I0 [rule: forward_before_backward]."),
        ([F(0, 0), I(0, 0)], "rank 0, position 2, end of its actions: 0W0 never runs [rule: complete]."),
    ],
)
def test_merging_does_not_hide_a_broken_rule(row, message):
    with pytest.raises(ScheduleError) as caught:
        list(merge_backward(edit(gpipe(1, 1), (tuple(row),))).actions(0))
    assert str(caught.value).startswith(message)


def test_transforming_a_factory_is_refused():
    with pytest.raises(TypeError, match=r"split_backward: got .*, expected a Schedule. Call the factory first"):
        split_backward(one_f_one_b)


def test_a_transform_of_something_else_is_refused():
    with pytest.raises(TypeError, match=r"got parameters \['rank', 'plan'\].*begin with rank, schedule"):

        @transform
        def mine(rank, plan):
            yield from plan.actions(rank)


# ---------------------------------------------------------------------------- The laws of mirroring and of overlapping

given_ones = schedules([gpipe, one_f_one_b, interleaved_1f1b, breadth_first, hanayo, dualpipe_v])
times = st.integers(1, 8)


def one_way(row, way):
    """The actions on the microbatches of one way, numbered as if there were no other."""
    return [a._replace(microbatch=a.microbatch // 2) for a in row if a.microbatch % 2 == way and a.kind != "G"]


@given(given_ones)
def test_each_copy_keeps_its_order(s):
    mirrored = rows(mirror(s))
    assert [one_way(row, 0) for row in mirrored] == rows(s)
    assert [one_way(row, 1) for row in reversed(mirrored)] == rows(s)


@settings(deadline=None)
@given(orders())
def test_a_mirrored_schedule_is_as_correct_as_it_was(case):
    s, graph = case
    updates = any(action.kind == "U" for row in rows(s) for action in row)
    if s.placement.mirrors or updates:
        with pytest.raises(SizeError, match=r"mirror: got schedule=.*, expected one"):
            rows(mirror(s))
    else:
        check(mirror(s), graph)
        prove(mirror(s), graph)


@given(given_ones)
def test_a_mirrored_schedule_holds_the_memory_of_both_copies(s):
    peaks = simulate(s).peak_memory
    mirrored = mirror(s)
    check(mirrored)
    for rank, peak in enumerate(simulate(mirrored).peak_memory):
        assert peak <= peaks[rank] + peaks[-1 - rank] + 1e-9
        assert mirrored.memory(rank) == s.memory(rank) + s.memory(s.ranks - 1 - rank)


@given(st.integers(2, 8), st.integers(0, 8), times, times)
def test_idle_time_of_mirrored_1f1b(P, more, F, B):
    timeline = simulate(mirror(one_f_one_b(P, -(-P // 2) + more)), Costs(F=F, B=B))
    assert max(timeline.idle) == 2 * ((P - 1) // 2) * max(F, B)


def test_gradients_of_replicas_are_summed_at_the_end():
    s = mirror(one_f_one_b(ranks=3, microbatches=2))
    assert s.placement == bidirectional(ranks=3)
    assert [[a for a in row if a.kind == "G"] for row in rows(s)] == [[G(0, 2), G(2, 3)], [], [G(0, 3), G(2, 2)]]
    assert not any(a.kind == "G" for row in rows(mirror(forward_only(ranks=2, microbatches=2))) for a in row)


@pytest.mark.parametrize("s", [seq_1f1b(ranks=3, microbatches=2, slices=2), overlap(one_f_one_b(3, 4))])
def test_mirroring_keeps_slices_and_pairs(s):
    assert [one_way(row, 0) for row in rows(mirror(s))] == rows(s)
    check(mirror(s))


@pytest.mark.parametrize(
    ("s", "message"),
    [
        (chimera(ranks=2, microbatches=2), "expected one whose stages live on one rank each"),
        (mirror(gpipe(ranks=1, microbatches=1)), "expected one whose stages live on one rank each"),
        (pipedream(ranks=2, microbatches=2), "expected one that updates no weights"),
        (overlap(pipedream(ranks=3, microbatches=4)), "the two copies would drift apart"),
    ],
)
def test_mirroring_replicas_and_asynchronous_schedules_is_refused(s, message):
    with pytest.raises(SizeError, match=f"mirror: got schedule=.*{message}"):
        mirror(s)


@pytest.mark.parametrize("changed", [mirror, overlap])
def test_mirroring_does_not_hide_a_deadlock(changed):
    s = changed(table(rows=("0F0,0B0,0F1,0B1", "1F1,1B1,1F0,1B0")))
    with pytest.raises(ScheduleError, match="wait for each other"):
        check(s)


def fused_pairs(s):
    return [[f"{a} {b}" for a, b in pairwise(row) if a.kind == "OVERLAP_F"] for row in rows(s)]


@settings(deadline=None)
@given(orders())
def test_an_overlapped_schedule_is_as_correct_as_it_was(case):
    s, graph = case
    changed = overlap(s)
    check(changed, graph)
    prove(changed, graph)
    plain = [[a._replace(kind=a.kind.removeprefix("OVERLAP_")) for a in row] for row in rows(changed)]
    assert plain == [[a._replace(kind=a.kind.removeprefix("OVERLAP_")) for a in row] for row in rows(s)]
    assert rows(overlap(changed)) == rows(changed)


@given(given_ones)
def test_overlapping_keeps_the_memory(s):
    assert simulate(overlap(s)).peak_memory == simulate(s).peak_memory


def test_pairs_that_wait_for_each_other_stay_apart():
    s = gpipe(ranks=2, microbatches=3)
    assert fused_pairs(overlap(s)) == [[], ["1OVERLAP_F2 1B0"]]


def test_a_pair_for_which_a_sum_of_gradients_would_wait_stays_apart():
    """Fused, `0F2` would wait for `1B0`, that for `2G3` before it, that for `2B2`, and that for `0F2`."""
    s = table(
        rows=(
            "0F0,3F1,3B1,3F3,3B3,0F2,0B0,0B2,0G2,3G3",
            "1F0,2F1,2B1,2F3,2B3,1F2,2G3,1B0,1B2,1G2",
            "1F1,1F3,2F0,2F2,1B1,1B3,2B0,2B2,1G3,2G2",
            "0F1,0F3,3F0,3B0,3F2,3B2,0B1,0B3,0G3,3G2",
        )
    )
    check(s)
    check(overlap(s))
    assert fused_pairs(overlap(s)) == [[], [], ["2OVERLAP_F2 1B1"], []]


def test_a_microbatch_is_not_overlapped_with_itself():
    assert fused_pairs(overlap(one_f_one_b(ranks=1, microbatches=3))) == [[]]


def test_overlap_makes_mirrored_1f1b_faster():
    s = mirror(one_f_one_b(ranks=4, microbatches=16))
    costs = Costs(OVERLAP_F=0.25)
    assert simulate(overlap(s), costs).makespan < simulate(s, costs).makespan


# ------------------------ A schedule that is connected to a stage graph is taken for that graph wherever none is given

TOWERS = dag(3, {(0, 2), (1, 2)})


@schedule()
def two_towers(rank, ranks, microbatches):
    """Stages 0 and 1 know nothing of each other; along a chain, 1 would wait for 0."""
    order = range(microbatches) if rank != 1 else reversed(range(microbatches))
    passes = list(gpipe(ranks, microbatches).actions(rank))
    yield from (F(rank, i) for i in order)
    yield from passes[microbatches:]


def towers(s):
    return dag(s.stages, {(t, s.stages - 1) for t in range(s.stages - 1)})


def few(ranks, microbatches):
    if max(ranks, microbatches) > 4:
        raise SizeError("too many")
    return two_towers(ranks, microbatches)


test_a_schedule_for_one_graph_conforms = conformance(few, graph=towers)


def both_towers_on_a_rank():
    return table(rows=("1F0,0F0,0B0,1B0", "2F0,2B0"))


def test_a_connected_schedule_prints_without_false_violations():
    s = both_towers_on_a_rank()
    assert "1F0!" in str(s)
    assert str(s).endswith("For another stage graph, print connect(schedule, graph).")
    right = "rank 0 |1F0 0F0 .   .   .   0B0     1B0     |\nrank 1 |.   .   2F0 2B0     .   .   .   .   |"
    assert str(connect(s, TOWERS)) == str(lower(s, TOWERS)) == right


def test_a_real_violation_does_not_mention_chains():
    s = table(rows=("0B0,0F0",))
    assert "connect" not in str(s)


def test_a_schedule_for_one_graph_does_not_conform_to_others():
    with pytest.raises(ScheduleError):
        conformance(lambda ranks, microbatches: connect(both_towers_on_a_rank(), chain(3)))()


@settings(deadline=None)
@given(orders())
def test_a_connected_schedule_is_correct_for_its_graph(case):
    s, graph = case
    connected = connect(s, graph)
    assert [list(connected.actions(rank)) for rank in range(s.ranks)] == [list(s.actions(r)) for r in range(s.ranks)]
    check(connected)
    prove(connected)
    assert lower(connected).graph == graph
    assert simulate(connected) == simulate(s, graph=graph)
    for changed in (overlap(connected), split_backward(connected), forwards(connected)):
        assert changed.graph == graph
        check(changed)
    updates = any(a.kind == "U" for rank in range(s.ranks) for a in s.actions(rank))
    if not s.placement.mirrors and not updates:
        check(mirror(connected))


def towered(microbatches):
    """Both towers on a rank, the second first, which along a chain gets nowhere."""
    first = [f"1F{i},0F{i}" for i in range(microbatches)]
    back = [f"0B{i},1B{i}" for i in range(microbatches)]
    steps = [*first[:2], *(step for pair in zip(first[2:], back[:-2], strict=True) for step in pair), *back[-2:]]
    return table(rows=(",".join(steps), ",".join(f"2F{i},2B{i}" for i in range(microbatches))))


def test_towers_are_mirrored_and_overlapped_side_by_side():
    s, chains = gpipe(8, 2), {(s, s + 1) for s in range(7)} - {(3, 4)}
    two = dag(8, chains | {(3, 7)})
    assert (simulate(mirror(connect(s, two))).makespan, simulate(mirror(s), graph=two).makespan) == (22, 30)
    assert list(mirror(both_towers_on_a_rank()).actions(0))[:2] == [F(1, 0), F(0, 0)], "as it stands: all is stuck"
    assert list(mirror(connect(both_towers_on_a_rank(), TOWERS)).actions(0))[:3] == [F(1, 0), F(0, 0), F(2, 1)]
    apart, along = (overlap(one) for one in (towered(4), connect(towered(4), TOWERS)))
    assert [sum(a.kind == "OVERLAP_F" for a in one.actions(0)) for one in (apart, along)] == [0, 2]


@given(st.integers(1, 6).flatmap(graphs))
def test_the_text_form_includes_the_whole_graph(graph):
    assert parse_graph(format_graph(graph), graph.stages) == graph
    s = connect(gpipe(graph.stages, 1), graph)
    require_round_trip(s)
    assert pickle.loads(pickle.dumps(s)).graph == graph
    assert s != gpipe(graph.stages, 1)
    assert connect(gpipe(graph.stages, 1), graph) == s
    assert hash(connect(gpipe(graph.stages, 1), graph)) == hash(s)


@pytest.mark.parametrize("graph", [chain(2), None, "0-1"])
def test_a_graph_with_other_stages_is_refused(graph):
    with pytest.raises(GraphError, match=r"connect: got .* expected a Graph of 3"):
        connect(gpipe(3, 1), graph)


# ------------------------------------------------------------------------------------------------ Moves off the device


def moves_of(schedule):
    return [a for rank in range(schedule.ranks) for a in schedule.actions(rank) if a.kind in ("OFFLOAD", "RELOAD")]


@settings(deadline=None, max_examples=30)
@given(orders(), st.integers(1, 2))
def test_what_is_moved_stays_correct_and_takes_no_longer(case, passes):
    """A move takes as long as so many passes, if passes take as long as each other."""
    s, graph = case
    assume(not moves_of(s))
    moved = offload(s, passes=passes)
    check(moved, graph)
    prove(moved, graph)
    assert [[a for a in row if a.kind not in ("OFFLOAD", "RELOAD")] for row in rows(moved)] == rows(s)
    costs = Costs(F=1, B=1, I=1, W=1, OFFLOAD=passes)
    before, after = simulate(s, costs, graph), simulate(moved, costs, graph)
    assert after.makespan == pytest.approx(before.makespan)
    assert all(a <= b for a, b in zip(after.peak_memory, before.peak_memory, strict=True))


def test_moves_are_one_in_one_out():
    s = offload(interleaved_1f1b(ranks=4, microbatches=16, chunks=2))
    times = [span for span in spans(s, Costs(F=1, B=2, OFFLOAD=1)) if span.action.kind in ("OFFLOAD", "RELOAD")]
    assert len(times) == len(moves_of(s)) > 100
    for rank, kind in product(range(4), ("OFFLOAD", "RELOAD")):
        mine = [span for span in times if (span.rank, span.action.kind) == (rank, kind)]
        assert all(a.end <= b.start for a, b in pairwise(mine))


@pytest.mark.parametrize(
    ("how", "peaks", "moved"),
    [
        (one_f_one_b(ranks=8, microbatches=32), (8, 7, 6, 5, 4, 3, 2, 1), (3, 3, 3, 3, 3, 3, 2, 1)),
        (interleaved_1f1b(ranks=4, microbatches=16, chunks=2), (5.5, 4.5, 3.5, 2.5), (1.5, 1.5, 1.5, 1)),
        (gis(ranks=4, microbatches=16, chunks=2), (4, 3.5, 3, 2.5), (1.5, 1.5, 1, 1)),
        (gpipe(ranks=4, microbatches=16), (16,) * 4, (3,) * 4),
    ],
    ids=repr,
)
def test_a_rank_holds_three_stages_activations_if_the_host_is_as_fast_as_a_pass(how, peaks, moved):
    """One that is computed, one that leaves, one that comes back (arXiv 2503.01328): however many are in flight."""
    costs = Costs(F=1, B=1, I=1, W=1, OFFLOAD=1)
    assert simulate(how, costs).peak_memory == peaks
    assert simulate(offload(how), costs).peak_memory == moved
    assert simulate(offload(how), costs).makespan == simulate(how, costs).makespan


def test_gaps_shorter_than_the_round_trip_are_skipped():
    s = one_f_one_b(ranks=4, microbatches=8)
    assert {a.stage for a in moves_of(offload(s))} == {0, 1}
    assert not moves_of(offload(s, passes=3))
    assert {a.stage for a in moves_of(offload(s, stages=(1, 3)))} == {1}
    assert not moves_of(offload(forwards(s)))
    assert not moves_of(recompute(offload(s)))
    check(recompute(offload(s), stages=(0,)))


def test_moves_take_memory_from_their_start_to_their_end():
    s = from_rows((parse_all("0F0 0OFFLOAD0 0F1 0RELOAD0 0B0 0B1"),), linear(1), microbatches=2)
    sizes = Sizes(activation=1)
    assert simulate(s, Costs(F=1, B=1, OFFLOAD=0.5, RELOAD=0.5), sizes=sizes).peak_memory == (2,)
    slow = list(spans(s, Costs(F=1, B=1, OFFLOAD=2, RELOAD=4)))
    assert [(str(x.action), x.start, x.end) for x in slow][1:4] == [
        ("0OFFLOAD0", 1, 3),
        ("0F1", 1, 2),
        ("0RELOAD0", 3, 7),
    ]
    levels = memory_over_time(slow, s)
    assert levels == (((0, 1.0), (1, 2.0), (3, 2.0), (8, 1.0), (9, 0.0)),)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0F0 0OFFLOAD0 0B0", "0B0: comes before 0RELOAD0, and what the forward kept is off the device"),
        ("0F0 0OFFLOAD0", "end of its actions: 0RELOAD0, with its backward, never runs"),
        ("0OFFLOAD0 0F0 0RELOAD0 0B0", "0OFFLOAD0: comes before 0F0"),
        ("0F0 0RELOAD0 0B0", "0RELOAD0: comes before 0OFFLOAD0"),
        ("0F0 0B0 0OFFLOAD0", "0OFFLOAD0: has already run, or its backward has"),
    ],
)
def test_moves_out_of_place_are_refused(row, message):
    with pytest.raises(ScheduleError, match=message):
        check(from_rows((parse_all(row),), linear(1), microbatches=1))


def parse_all(text):
    return tuple(map(parse, text.split()))


def test_arguments_of_offload_are_refused():
    with pytest.raises(SizeError, match="offload: got stages=4, expected a tuple of stages"):
        offload(gpipe(2, 2), stages=4)
    with pytest.raises(SizeError, match="offload: got passes=0"):
        offload(gpipe(2, 2), passes=0)
