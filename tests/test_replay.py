# SPDX-License-Identifier: Apache-2.0
"""`replay` finds an order in which everything can happen, or says who waits for whom."""

import pytest
from hypothesis import given, settings

from schedules import B, F, I, Placement, ScheduleError, W, chain, linear
from schedules.replay import InFlight, makes, needs, replay
from schedules.testing import orders


def events(schedule, graph):
    streams = [schedule.actions(rank) for rank in range(schedule.ranks)]
    return list(replay(streams, graph, schedule.placement))


@settings(deadline=None)
@given(orders())
def test_each_rank_keeps_its_order_and_everything_finds_its_data(case):
    schedule, graph = case
    done, made = events(schedule, graph), set()
    for rank in range(schedule.ranks):
        mine = [event for event in done if event.rank == rank]
        assert [event.action for event in mine] == list(schedule.actions(rank))
        assert [event.position for event in mine] == list(range(len(mine)))
    for event in done:
        assert made.issuperset(needs(event.action, graph))
        made.add(makes(event.action))


@settings(deadline=None)
@given(orders())
def test_a_token_is_kept_until_its_last_use(case):
    schedule, graph = case
    alive = InFlight[None](graph)
    for event in events(schedule, graph):
        for token in needs(event.action, graph):
            alive.take(token)
        alive.put(event.action, None)
    assert not alive._alive


def test_who_needs_and_makes_what():
    graph = chain(2)
    assert needs(F(0, 3), graph) == []
    assert needs(B(1, 3), graph) == [("F", 1, 3)]
    assert needs(I(0, 3), graph) == [("F", 0, 3), ("B", 1, 3)]
    assert needs(W(0, 3), graph) == [("B", 0, 3)]
    assert [makes(a) for a in (F(0, 3), B(0, 3), I(0, 3))] == [("F", 0, 3), ("B", 0, 3), ("B", 0, 3)]


@pytest.mark.parametrize(
    ("rows", "where", "why"),
    [
        ([[F(0, 0)], [F(1, 1)]], (1, 0, F(1, 1)), "needs 0F1, which rank 0 never does"),
        ([[B(0, 0)], [F(1, 0)]], (0, 0, B(0, 0)), "needs 0F0, which no rank ever does"),
        ([[B(0, 0), F(0, 0)], []], (0, 0, B(0, 0)), "needs 0F0, which this rank does only later"),
        ([[F(0, 0), B(0, 0), F(0, 1)], [F(1, 1), B(1, 0)]], (0, 1, B(0, 0)), "wait in a circle"),
        ([[F(0, 0), B(0, 0)], [F(1, 1), B(1, 0)]], (1, 0, F(1, 1)), "needs 0F1, which rank 0 never does"),
    ],
)
def test_a_block_is_followed_to_its_cause(rows, where, why):
    with pytest.raises(ScheduleError, match=why) as caught:
        list(replay([iter(row) for row in rows], chain(2), linear(2)))
    assert (caught.value.rank, caught.value.position, caught.value.action) == where
    assert caught.value.rule == "ordered"


def test_a_circle_may_go_through_what_a_rank_is_about_to_do():
    with pytest.raises(ScheduleError, match=r"in a circle: rank 0 at 2F0 needs 1F0, rank 1 at 1F0 needs 0F0"):
        list(replay([iter([F(2, 0), F(0, 0)]), iter([F(1, 0)])], chain(3), Placement(2, (0, 1, 0))))
