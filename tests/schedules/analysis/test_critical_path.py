# SPDX-License-Identifier: Apache-2.0
"""The critical path is unbroken, as long as the makespan, and shortening it shortens the step."""

from itertools import pairwise

import pytest
from hypothesis import given, settings

from schedules import Costs, critical_path, gpipe, one_f_one_b, schedule, simulate
from schedules.replay.outputs import inputs_of
from schedules.testing import costs, orders


@settings(deadline=None)
@given(orders(), costs())
def test_the_path_is_unbroken_and_as_long_as_the_makespan(case, times):
    schedule, graph = case
    path = critical_path(schedule, times, graph)
    first, last = path.stretches[0].span, path.stretches[-1].span
    assert first.start == 0
    assert last.end == pytest.approx(simulate(schedule, times, graph).makespan)
    for before, after in pairwise(path.stretches):
        assert before.span.end + after.transfer == pytest.approx(after.span.start)
        if before.span.rank != after.span.rank and after.span.action.kind not in ("G", "U", "OVERLAP_F"):
            actions = list(schedule.actions(before.span.rank))
            at = actions.index(before.span.action)
            pair = [one for one in actions[max(0, at - 1) : at] if one.kind == "OVERLAP_F"]
            made = {one.stage for one in (before.span.action, *pair)}
            assert made.intersection(token[1] for token in inputs_of(after.span.action, graph))
    assert sum(share.time for share in path.shares) == pytest.approx(last.end)


def test_shortening_an_action_on_the_path_shortens_the_step():
    slow = Costs(F=(1, 1, 5, 1), B=2)
    path = critical_path(one_f_one_b(ranks=4, microbatches=8), slow)
    share = path.shares[0]
    assert (share.what, share.time, share.passes) == ("F of stage 2", 40, 8)
    faster = Costs(F=(1, 1, 4, 1), B=2)
    s = one_f_one_b(ranks=4, microbatches=8)
    assert simulate(s, slow).makespan - simulate(s, faster).makespan == share.passes


def test_transfers_are_on_the_path():
    path = critical_path(gpipe(ranks=2, microbatches=1), Costs(comm=10))
    assert [(share.what, share.time) for share in path.shares[:2]] == [
        ("transfers from rank 0 to rank 1", 10),
        ("transfers from rank 1 to rank 0", 10),
    ]


def test_the_path_is_the_same_in_any_unit_of_time():
    s = one_f_one_b(ranks=3, microbatches=4)
    paths = [critical_path(s, Costs(F=unit, B=2 * unit, comm=64 * unit)).stretches for unit in (1, 2.0**-40)]
    first, second = ([stretch.span.action for stretch in path] for path in paths)
    assert first == second


def test_an_empty_timeline_has_no_path():
    @schedule()
    def nothing(rank, ranks, microbatches):
        yield from ()

    assert critical_path(nothing(ranks=2, microbatches=1)).stretches == ()
