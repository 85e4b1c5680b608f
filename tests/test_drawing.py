# SPDX-License-Identifier: Apache-2.0
"""The picture says what the simulation says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    B,
    Costs,
    F,
    ScheduleError,
    check,
    dag,
    gpipe,
    looped,
    one_f_one_b,
    schedule,
    spans,
    split_backward,
    transform,
)
from schedules.drawing import text
from schedules.testing import orders, schedules


def lines(picture):
    return [line.strip() for line in picture.strip().splitlines()]


def test_1f1b():
    assert str(one_f_one_b(ranks=3, microbatches=4)).splitlines() == lines(
        """
        rank 0 |F0 F1 F2 .  .  .  .  B0    F3 B1    .  B2    .  B3    |
        rank 1 |.  F0 F1 .  .  B0    F2 B1    F3 B2    .  B3    .  .  |
        rank 2 |.  .  F0 B0    F1 B1    F2 B2    F3 B3    .  .  .  .  |
        """
    )


def test_costs_stretch_the_cells():
    picture = text(split_backward(gpipe(ranks=2, microbatches=1)), Costs(F=1, I=2, W=1, comm=1))
    assert picture.splitlines() == lines(
        """
        rank 0 |F0 .  .  .  .  .  I0    W0 |
        rank 1 |.  .  F0 I0    W0 .  .  .  |
        """
    )


def test_several_stages_on_a_rank_are_told_apart():
    @schedule(placement=looped)
    def mine(rank, ranks, microbatches, chunks=2):
        for stage in range(rank, ranks * chunks, ranks):
            yield F(stage, 0)
        for stage in reversed(range(rank, ranks * chunks, ranks)):
            yield B(stage, 0)

    assert str(mine(2, 1)).splitlines() == lines(
        """
        rank 0 |0F0 .   2F0 .   .   .   2B0     .   .   0B0     |
        rank 1 |.   1F0 .   3F0 3B0     .   .   1B0     .   .   |
        """
    )


def test_a_graph_may_let_ranks_go_side_by_side():
    assert text(gpipe(2, 1), graph=dag(2, set())).splitlines() == ["rank 0 |F0 B0    |", "rank 1 |F0 B0    |"]


@settings(deadline=None)
@given(orders())
def test_every_action_stands_once_on_its_rank_at_its_time(case):
    schedule, graph = case
    rows = [line.partition("|")[2] for line in text(schedule, graph=graph).splitlines()]
    single = schedule.stages == schedule.ranks
    width = max(len(str(span.action)[single:]) for span in spans(schedule, Costs(), graph)) + 1
    for span in spans(schedule, Costs(), graph):
        at = int(span.start) * width
        assert rows[span.rank][at : at + width].strip() == str(span.action)[single:]
    assert len({len(row) for row in rows}) == 1


@settings(deadline=None)
@given(schedules([gpipe, one_f_one_b]), st.integers(1, 200))
def test_blocks_put_side_by_side_are_the_whole_picture(schedule, columns):
    blocks = [block.splitlines() for block in text(schedule, columns=columns).split("\n\n")]
    gutter, width = len("rank 0 |"), len(f"F{schedule.microbatches - 1} ")
    joined = [row[0][:gutter] + "".join(line[gutter:-1] for line in row) + "|" for row in zip(*blocks, strict=True)]
    assert joined == str(schedule).splitlines()
    assert all(len(line) <= max(columns, gutter + width + 1) for block in blocks for line in block)


@transform
def edited(rank, schedule, rows):
    yield from rows[rank]


def test_what_blocks_is_drawn_up_to_there_with_the_reason():
    broken = edited(gpipe(2, 1), ((F(0, 0), B(0, 0)), (F(1, 0),)))
    assert str(broken).splitlines() == [
        "rank 0 |F0 B0!|",
        "rank 1 |.  F0 |",
        "rank 0, position 1, 0B0: needs 1B0 or 1I0, which rank 1 never does [rule: ordered]. Add 1B0 or 1I0 to rank 1.",
    ]


def test_what_cannot_begin_is_the_action_and_the_reason():
    assert str(edited(gpipe(1, 1), ((B(0, 0),),))).startswith("rank 0 |B0!|\nrank 0, position 0, 0B0: comes before 0F0")
    assert str(edited(gpipe(1, 1), (("F",),))).startswith("rank 0 |F!|\nrank 0, position 0, F: no compute action")
    assert str(edited(gpipe(1, 1), ((),))) == ""


def test_a_violation_that_does_not_block_is_drawn_up_to_there_too():
    broken = edited(gpipe(2, 2), ((F(0, 0), F(0, 1), B(0, 0), B(0, 0)), (F(1, 0), B(1, 0), F(1, 1), B(1, 1))))
    with pytest.raises(ScheduleError) as caught:
        check(broken)
    assert text(broken, error=caught.value).splitlines() == [
        "rank 0 |F0 F1 .  .  B0    B0!|",
        "rank 1 |.  F0 B0    F1 B1    |",
        str(caught.value),
    ]
