# SPDX-License-Identifier: Apache-2.0
"""`replay` finds an order in which everything can happen, or says who waits for whom."""

import pytest
from hypothesis import given, settings

from schedules import B, Costs, F, I, ScheduleError, Sizes, W, chain, gpipe
from schedules.files.csv import table
from schedules.replay.dependencies import wires
from schedules.replay.engine import replay
from schedules.replay.outputs import inputs_of, output_of
from schedules.testing import orders
from tests.common.rows import edit

FREE = Costs(F=0, B=0, I=0, W=0)


def play(schedule, graph, wired=None):
    streams = [schedule.actions(rank) for rank in range(schedule.ranks)]
    wired = wired or wires(schedule, graph, FREE, Sizes())
    return [span for batch in replay(schedule, streams, wired, FREE) for span in batch]


@settings(deadline=None)
@given(orders())
def test_each_rank_keeps_its_order_and_every_action_finds_its_data(case):
    schedule, graph = case
    done, made = play(schedule, graph), set()
    for rank in range(schedule.ranks):
        assert [span.action for span in done if span.rank == rank] == list(schedule.actions(rank))
    for span in done:
        assert made.issuperset(inputs_of(span.action, graph))
        made.add(output_of(span.action))


@settings(deadline=None)
@given(orders())
def test_values_are_kept_until_they_are_used(case):
    schedule, graph = case
    wired = wires(schedule, graph, FREE, Sizes())
    play(schedule, graph, wired)
    assert not any(
        dependency.arrived
        for kinds in wired
        for rows in kinds.values()
        for row in rows.values()
        for dependency in row.takes
    )


def test_needs_and_makes_of_each_kind_of_action():
    graph = chain(2)
    assert inputs_of(F(0, 3), graph) == []
    assert inputs_of(B(1, 3), graph) == [("F", 1, 3)]
    assert inputs_of(I(0, 3), graph) == [("F", 0, 3), ("B", 1, 3)]
    assert inputs_of(W(0, 3), graph) == [("B", 0, 3)]
    assert [output_of(a) for a in (F(0, 3), B(0, 3), I(0, 3))] == [("F", 0, 3), ("B", 0, 3), ("B", 0, 3)]


@pytest.mark.parametrize(
    ("rows", "where", "why"),
    [
        ([[F(0, 0)], [F(1, 1)]], (1, 0, F(1, 1)), "needs 0F1, which rank 0 never runs"),
        ([[F(0, 0), B(0, 0), F(0, 1)], [F(1, 1), B(1, 0)]], (0, 1, B(0, 0)), "wait for each other"),
        ([[F(0, 0), B(0, 0)], [F(1, 1), B(1, 0)]], (1, 0, F(1, 1)), "needs 0F1, which rank 0 never runs"),
    ],
)
def test_a_block_is_traced_to_its_cause(rows, where, why):
    with pytest.raises(ScheduleError, match=why) as caught:
        play(edit(gpipe(2, 2), tuple(map(tuple, rows))), chain(2))
    assert (caught.value.rank, caught.value.position, caught.value.action) == where
    assert caught.value.rule == "ordered"


def test_a_deadlock_may_involve_the_next_action_of_a_rank():
    with pytest.raises(ScheduleError, match=r"for each other: rank 0 at 2F0 needs 1F0, rank 1 at 1F0 needs 0F0"):
        play(table(("2F0,0F0", "1F0")), chain(3))
