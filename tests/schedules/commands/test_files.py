# SPDX-License-Identifier: Apache-2.0
"""`python -m schedules` reads schedules from tables, and writes tables and pictures."""

import json
from xml.etree import ElementTree

from schedules import dag, gpipe, lower, one_f_one_b, split_backward
from schedules.files.csv import read_csv, table, write_csv
from tests.common.command_line import answer


def test_a_table_is_checked_and_shown(capsys, tmp_path):
    path = tmp_path / "table.csv"
    write_csv(one_f_one_b(ranks=2, microbatches=3), path)
    assert answer(capsys, "check", path)[:2] == (0, "ok: 2 ranks, 2 stages, 3 microbatches, 12 actions\n")
    assert answer(capsys, "show", path)[1] == f"{one_f_one_b(ranks=2, microbatches=3)}\n"
    path.write_text("0F0,0B0\n1F0,1X0\n")
    code, _, err = answer(capsys, "show", path)
    assert code == 2
    assert err.startswith("python -m schedules: line 2, column 2: got '1X0'")


def test_a_table_of_a_program_is_checked_and_shown(capsys, tmp_path):
    path = tmp_path / "table.csv"
    write_csv(lower(one_f_one_b(ranks=2, microbatches=3)), path)
    assert answer(capsys, "check", path)[:2] == (0, "ok: 2 ranks, 2 stages, 3 microbatches, 12 actions\n")
    assert answer(capsys, "show", path)[1] == f"{one_f_one_b(ranks=2, microbatches=3)}\n"
    path.write_text(path.read_text().replace("0SEND_F1>1,", "", 1))
    code, out, _ = answer(capsys, "check", path)
    assert code == 1
    assert out.startswith("rank 0 |F0 F1 .  .  B0    F2 |\nrank 1 |.  F0 B0    F1!.  .  |\nrank 1, position 5, 1F1: ")
    assert "[rule: channel_order]" in out


def test_pictures_and_tables_are_written_to_files(capsys, tmp_path):
    svg, trace, table = tmp_path / "a.svg", tmp_path / "a.json", tmp_path / "a.csv"
    files = ["--svg", svg, "--trace", trace, "--csv", table]
    code, out, _ = answer(capsys, "show", "gpipe", "split_backward", "--ranks", 2, "--microbatches", 3, *files)
    assert (code, out) == (0, f"wrote {svg}\nwrote {trace}\nwrote {table}\n")
    assert ElementTree.parse(svg).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert len([e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]) == 18
    assert str(read_csv(table)) == str(split_backward(gpipe(2, 3)))
    assert answer(capsys, "simulate", "gpipe", "--svg", svg)[1].endswith(f"wrote {svg}\n")
    code, _, err = answer(capsys, "show", "gpipe", "--svg", tmp_path / "nowhere" / "a.svg")
    assert (code, "No such file" in err) == (2, True)


WITHOUT = """
from schedules import transform

@transform
def without_backwards(rank, schedule):
    yield from (action for action in schedule.actions(rank) if action.kind == "F")
"""


def test_a_transformed_program_from_a_file_is_checked(capsys, tmp_path):
    program, changes = tmp_path / "program.csv", tmp_path / "changes.py"
    changes.write_text(WITHOUT)
    write_csv(lower(gpipe(ranks=2, microbatches=2)), program)
    code, out, _ = answer(capsys, "check", program, f"{changes}:without_backwards")
    assert code == 1
    assert "0B0, or 0I0 and 0W0, never runs [rule: complete]" in out
    assert answer(capsys, "check", program)[0] == answer(capsys, "check", program, "split_backward")[0] == 0


def test_a_program_from_a_file_is_checked_with_its_graph(capsys, tmp_path):
    towers, path = dag(3, {(0, 2), (1, 2)}), tmp_path / "towers.csv"
    write_csv(lower(table(rows=("1F0,0F0,0B0,1B0", "2F0,2B0")), towers), path)
    assert answer(capsys, "check", path)[0] == 0
    right = "rank 0 |1F0 0F0 .   .   .   0B0     1B0     |\nrank 1 |.   .   2F0 2B0     .   .   .   .   |\n"
    assert answer(capsys, "show", path) == (0, right, "")
    assert "makespan  8" in answer(capsys, "simulate", path, "split_backward")[1]
    assert answer(capsys, "check", path, "--graph", "0-1,1-2")[0] == 1, "another graph than its own"
