# SPDX-License-Identifier: Apache-2.0
"""The laws of mirroring and of overlapping."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    Costs,
    G,
    ScheduleError,
    SizeError,
    bidirectional,
    breadth_first,
    check,
    chimera,
    dualpipe_v,
    forward_only,
    gpipe,
    hanayo,
    interleaved_1f1b,
    mirror,
    one_f_one_b,
    overlap,
    pipedream,
    seq_1f1b,
    simulate,
)
from schedules.files.csv import table
from schedules.proof.interpreter import prove
from schedules.testing import conformance, orders, schedules
from tests.common.rows import rows

given_ones = schedules([gpipe, one_f_one_b, interleaved_1f1b, breadth_first, hanayo, dualpipe_v])
times = st.integers(1, 8)

test_mirrored_schedules_conform = conformance(
    lambda ranks, microbatches: mirror(one_f_one_b(ranks, -(-microbatches // 2)))
)
test_overlapped_schedules_conform = conformance(lambda ranks, microbatches: overlap(one_f_one_b(ranks, microbatches)))


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


@pytest.mark.parametrize("s", [chimera(ranks=2, microbatches=2), mirror(gpipe(ranks=1, microbatches=1))])
def test_mirroring_twice_is_refused(s):
    with pytest.raises(SizeError, match=r"mirror: got schedule=.*, expected one whose stages live on one rank each"):
        mirror(s)


def test_asynchronous_schedules_are_refused():
    with pytest.raises(SizeError, match=r"mirror: got schedule=pipedream\(.*expected one that updates no weights"):
        mirror(pipedream(ranks=2, microbatches=2))


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
