# SPDX-License-Identifier: Apache-2.0
"""Files are read back as they were written, and nothing but actions is read."""

import io
import pickle

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schedules import B, F, Placement, TableError, check, gpipe, lower, one_f_one_b, parse, split_backward
from schedules.interchange import read_csv, table, write_csv
from schedules.testing import orders, require_round_trip, schedules


def read(text):
    return read_csv(io.StringIO(text))


def written(plan):
    file = io.StringIO()
    write_csv(plan, file)
    return file.getvalue()


def rows(plan, ranks):
    return [list(plan.actions(rank)) for rank in range(ranks)]


@settings(deadline=None)
@given(schedules([gpipe, one_f_one_b]) | orders().map(lambda case: case[0]))
def test_reading_gives_back_what_was_written(s):
    again = read(written(s))
    assert rows(again, s.ranks) == rows(s, s.ranks)
    assert (again.ranks, again.microbatches, again.placement) == (s.ranks, s.microbatches, s.placement)
    assert written(again) == written(s)


@settings(deadline=None)
@given(orders().map(lambda case: case[0]), st.data())
def test_idle_slots_blanks_and_line_ends_mean_nothing(s, data):
    cells = [line.split(",") for line in written(s).splitlines()]
    for row in cells:
        row.insert(data.draw(st.integers(0, len(row))), data.draw(st.sampled_from(["", " ", "\t"])))
    end = data.draw(st.sampled_from(["\n", "\r\n"]))
    assert rows(read(end.join(map(", ".join, cells))), s.ranks) == rows(s, s.ranks)


def test_a_path_will_do(tmp_path):
    s = split_backward(one_f_one_b(ranks=3, microbatches=5))
    for path in (tmp_path / "one.csv", str(tmp_path / "two.csv")):
        write_csv(s, path)
        check(read_csv(path))
        assert rows(read_csv(path), 3) == rows(s, 3)
    assert (tmp_path / "one.csv").read_bytes().count(b"\n") == 3


def test_the_table_says_where_stages_live():
    s = read("0F0,3F0,,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    assert s.placement == Placement(2, (0, 1, 1, 0))
    assert (s.stages, s.microbatches) == (4, 1)
    check(s)


def test_it_is_an_ordinary_schedule():
    s = table(rows=("0F0,0B0",))
    assert s == read("0F0,0B0\n")
    assert repr(s) == "table(rows=('0F0,0B0',))"
    assert list(s.actions(0)) == [F(0, 0), B(0, 0)]
    assert pickle.loads(pickle.dumps(s)) == s
    require_round_trip(s)


@settings(deadline=None)
@given(orders())
def test_a_program_is_written_with_its_transfers(case):
    program = lower(*case)
    lines = written(program).splitlines()
    assert [list(map(parse, line.split(","))) for line in lines] == rows(program, case[0].ranks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,,0Q0\n", "line 1, column 3: got '0Q0', expected a compute action"),
        ("0F0,0B0\n1F0,1B0,0F0x\n", "line 2, column 3: got '0F0x'"),
        ("0F0,0SEND_F0\n", "line 1, column 2: got '0SEND_F0', .* Leave transfers out"),
        ("0F0,0SEND_F0>1\n", "line 1, column 2: got '0SEND_F0>1', .* Leave transfers out"),
        ("0F0,(0F1;0B0)OVERLAP_F_B\n", r"line 1, column 2: got '\(0F1;0B0\)OVERLAP_F_B'"),
        ('"0F0",0B0\n', "line 1, column 1: got '\"0F0\"'"),
        ("0F0,0B0\n1F0,0F1\n", "stage 0 stands on line 1 and on line 2, expected one line for each stage. Move 0F1"),
        ("0F0,2F0\n", "stage 1 stands on no line, but stage 2 does"),
        ("999999999999999999F0", "stage 0 stands on no line, but stage 999999999999999999 does"),
        ("0F0,0B0\n,,\n", "line 2: got no action"),
        ("0F0,0B0\n\n", "line 2: got no action"),
        ("", r"got rows=\(\)"),
    ],
)
def test_what_is_no_table_is_refused(text, message):
    with pytest.raises(TableError, match=message):
        read(text)


@pytest.mark.parametrize("given", [["0F0"], "0F0", (b"0F0",), (), None])
def test_rows_are_a_tuple_of_texts(given):
    with pytest.raises(TableError, match="expected a tuple with one text per rank"):
        table(rows=given)


@given(st.text() | st.text("0123FBIW,\n"))
@example("\x00")
@example("\ud800")
def test_any_text_is_read_or_refused(text):
    try:
        s = read(text)
    except TableError:
        return
    assert rows(read(written(s)), s.ranks) == rows(s, s.ranks)


@given(st.binary())
def test_any_file_is_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "file.csv"
    path.write_bytes(b"0F0," + data + b"\xff")
    with pytest.raises(TableError, match="line "):
        read_csv(path)


def test_torch_reads_the_same_actions():
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    s = split_backward(one_f_one_b(ranks=2, microbatches=3))
    for rank, line in enumerate(written(s).splitlines()):
        theirs = [torch_schedules._Action.from_str(cell) for cell in line.split(",")]
        assert list(map(str, theirs)) == list(map(str, s.actions(rank)))
