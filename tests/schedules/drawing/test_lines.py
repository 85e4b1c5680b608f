# SPDX-License-Identifier: Apache-2.0
"""A text picture shows every action at its simulated time."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    B,
    Costs,
    F,
    ScheduleError,
    Span,
    U,
    check,
    dag,
    gpipe,
    looped,
    one_f_one_b,
    parse,
    schedule,
    spans,
    split_backward,
)
from schedules.drawing import ansi, text, texts
from schedules.testing import orders, schedules
from tests.common.rows import edit
from tests.common.timelines import WAITED


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


def test_stages_on_one_rank_are_drawn_differently():
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


def test_independent_stages_are_drawn_side_by_side():
    assert text(gpipe(2, 1), graph=dag(2, set())).splitlines() == ["rank 0 |F0 B0    |", "rank 1 |F0 B0    |"]


def label(schedule, action):
    """Return the expected label of an action."""
    several = any(len(schedule.placement.stages_on(rank)) > 1 for rank in range(schedule.ranks))
    part = "" if action.slice is None else f".{action.slice}"
    return f"{action.stage if several else ''}{action.kind.removeprefix('OVERLAP_')}{action.microbatch}{part}"


@settings(deadline=None)
@given(orders())
def test_every_action_is_drawn_once_on_its_rank_at_its_time(case):
    schedule, graph = case
    costs = Costs(G=1 / schedule.slices, U=1 / schedule.slices)
    timeline = list(spans(schedule, costs, graph))
    rows = [line.partition("|")[2] for line in text(schedule, costs, graph).splitlines()]
    width = max(len(label(schedule, span.action)) for span in timeline) + 1
    for span in timeline:
        at = round(span.start * schedule.slices) * width
        joint = "&" * (span.action.kind == "OVERLAP_F")
        assert rows[span.rank][at : at + width].rstrip("| ") == label(schedule, span.action) + joint
    words = [word for row in rows for word in row.strip("|").replace("&", " ").split() if word != "."]
    assert len(words) == len(timeline)
    assert len({len(row) for row in rows}) == 1


@settings(deadline=None)
@given(schedules([gpipe, one_f_one_b]), st.integers(1, 200))
def test_blocks_of_columns_make_up_the_whole_picture(schedule, columns):
    blocks = [block.splitlines() for block in text(schedule, columns=columns).split("\n\n")]
    gutter, width = len("rank 0 |"), len(f"F{schedule.microbatches - 1} ")
    joined = [row[0][:gutter] + "".join(line[gutter:-1] for line in row) + "|" for row in zip(*blocks, strict=True)]
    assert joined == str(schedule).splitlines()
    assert all(len(line) <= max(columns, gutter + width + 1) for block in blocks for line in block)
    lengths = {len(block[0]) for block in blocks}
    assert max(lengths) - min(lengths) <= width


@given(schedules([gpipe, one_f_one_b]), st.integers(20, 200))
def test_without_color_codes_a_colored_picture_is_the_plain_one(schedule, columns):
    painted = text(schedule, columns=columns, paint=ansi)
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == text(schedule, columns=columns)
    assert painted.count("\x1b[0m") == painted.count("\x1b[38;") > 0


def test_an_action_without_duration_is_a_small_letter_after_the_cell():
    schedule = edit(gpipe(2, 1), ((U(0, 0), F(0, 0), B(0, 0), U(0, 0)), (F(1, 0), B(1, 0), U(1, 0))))
    assert str(schedule).splitlines() == ["rank 0 |F0u.  .  .  B0   u|", "rank 1 |.  F0 B0   u.  .  |"]


def test_a_fused_pair_is_joined():
    rows = ("0F0", "0OVERLAP_F1", "0B0", "0B1")
    schedule = edit(gpipe(1, 2), (tuple(map(parse, rows)),))
    assert str(schedule) == "rank 0 |F0 F1&B0    B1    |"


def test_a_blocked_schedule_is_drawn_up_to_the_block_with_the_reason():
    broken = edit(gpipe(2, 1), ((F(0, 0), B(0, 0)), (F(1, 0),)))
    assert str(broken).splitlines() == [
        "rank 0 |F0 B0!|",
        "rank 1 |.  F0 |",
        "rank 0, position 1, 0B0: needs 1B0 or 1I0, which rank 1 never runs [rule: ordered]. Add 1B0 or 1I0 to rank 1.",
        "This is along a chain of stages. For another stage graph, print connect(schedule, graph).",
    ]


def test_a_schedule_that_cannot_begin_is_drawn_as_its_first_action_and_the_reason():
    assert str(edit(gpipe(1, 1), ((B(0, 0),),))).startswith("rank 0 |B0!|\nrank 0, position 0, 0B0: comes before 0F0")
    assert str(edit(gpipe(1, 1), (("F",),))).startswith(
        "rank 0 |F!|\nrank 0, position 0, F: got 'F', expected an action"
    )
    assert str(edit(gpipe(1, 1), ((),))) == ""


def test_a_schedule_with_another_violation_is_drawn_up_to_it_with_the_reason():
    broken = edit(gpipe(2, 2), ((F(0, 0), F(0, 1), B(0, 0), B(0, 0)), (F(1, 0), B(1, 0), F(1, 1), B(1, 1))))
    with pytest.raises(ScheduleError) as caught:
        check(broken)
    assert text(broken, error=caught.value).splitlines() == [
        "rank 0 |F0 F1 .  .  B0    B0!|",
        "rank 1 |.  F0 B0    F1 B1    |",
        str(caught.value),
    ]


def test_a_measured_timeline_is_drawn_above_the_simulated_one():
    costs = Costs(F=1, B=2, comm=0.5)
    picture = texts({"measured": WAITED, "simulated": spans(gpipe(2, 1), costs)})
    assert picture.splitlines() == lines(
        """
        measured
        rank 0 |F0 -  -  -  -  B0       |
        rank 1 |-  -  F0 B0    .  .  .  |
        simulated
        rank 0 |F0 .  .  .  .  B0    .  |
        rank 1 |.  .  F0 B0    .  .  .  |
        """
    )


def test_actions_are_drawn_over_waits():
    wait = Span(0, parse("0RECV_B0<1"), 0, 3)
    assert texts({"": [wait, Span(0, F(0, 0), 0, 2), Span(0, F(0, 1), 3, 4)]}) == "rank 0 |F0    -  F1 |"


def test_empty_timelines_are_drawn():
    assert texts({}) == texts({"nothing": []}) == ""
