# SPDX-License-Identifier: Apache-2.0
"""`python -m schedules`, as it is typed."""

import subprocess
import sys

import pytest

from schedules import families, one_f_one_b
from schedules.__main__ import main
from schedules.interchange import write_csv

MINE = """
from schedules import B, F, schedule

@schedule()
def good(rank, ranks, microbatches):
    for i in range(microbatches):
        yield F(rank, i)
        yield B(rank, i)

@schedule()
def bad(rank, ranks, microbatches):
    yield B(rank, 0)

def plain():
    pass
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "json.py"  # a name that a module of the standard library has
    path.write_text(MINE)
    return path


def answer(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_as_a_process():
    command = [sys.executable, "-m", "schedules", "show", "one_f_one_b", "--ranks", "4", "--microbatches", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{one_f_one_b(ranks=4, microbatches=8)}\n"
    assert done.stderr == ""


def test_list(capsys):
    code, out, _ = answer(capsys, "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == families.__all__
    assert all(len(line.split()) > 3 for line in out.splitlines())


def test_show_with_costs(capsys):
    assert answer(capsys, "show", "gpipe", "--ranks", 2, "--microbatches", 1, "--B", 1, "--comm", 1) == (
        0,
        "rank 0 |F0 .  .  .  .  B0 |\nrank 1 |.  .  F0 B0 .  .  |\n",
        "",
    )


def test_show_wraps_in_a_terminal_only(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    whole = answer(capsys, "show", "gpipe", "--ranks", 2, "--microbatches", 3)[1]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    blocks = answer(capsys, "show", "gpipe", "--ranks", 2, "--microbatches", 3)[1]
    assert max(map(len, whole.splitlines())) > 20
    assert max(map(len, blocks.splitlines())) <= 20
    assert blocks.startswith("rank 0 |F0 F1 F2 |\nrank 1 |.  F0 F1 |\n\nrank 0 |")


def test_simulate(capsys):
    code, out, _ = answer(capsys, "simulate", "one_f_one_b", "--ranks", 4, "--microbatches", 8, "--comm", 0.5)
    assert code == 0
    assert dict(line.split(maxsplit=1) for line in out.replace("peak memory", "peak_memory").splitlines()) == {
        "makespan": "41",
        "span": "41",
        "bubble": "0.4146",
        "busy": "24 24 24 24",
        "peak_memory": "4 3 2 1",
    }


def test_check(capsys, file):
    assert answer(capsys, "check", "gpipe") == (0, "ok: 4 ranks, 4 stages, 8 microbatches, 64 actions\n", "")
    assert answer(capsys, "check", f"{file}:good", "--ranks", 1) == (
        0,
        "ok: 1 ranks, 1 stages, 8 microbatches, 16 actions\n",
        "",
    )
    code, out, err = answer(capsys, "check", f"{file}:bad")
    assert (code, err) == (1, "")
    assert out.startswith("rank 0, position 0, 0B0: comes before 0F0 [rule: forward_before_backward].")


def test_a_table(capsys, tmp_path):
    path = tmp_path / "table.csv"
    write_csv(one_f_one_b(ranks=2, microbatches=3), path)
    assert answer(capsys, "check", path)[:2] == (0, "ok: 2 ranks, 2 stages, 3 microbatches, 12 actions\n")
    assert answer(capsys, "show", path)[1] == f"{one_f_one_b(ranks=2, microbatches=3)}\n"
    path.write_text("0F0,0B0\n1F0,1X0\n")
    code, _, err = answer(capsys, "show", path)
    assert code == 2
    assert err.startswith("python -m schedules: line 2, column 2: got '1X0'")


def test_chunks_reach_a_schedule_that_takes_them(capsys, tmp_path):
    path = tmp_path / "chunked.py"
    path.write_text(
        "from schedules import B, F, looped, schedule\n"
        "@schedule(looped)\n"
        "def chunked(rank, ranks, microbatches, chunks=2):\n"
        "    mine = range(rank, ranks * chunks, ranks)\n"
        "    yield from (F(s, 0) for s in mine)\n"
        "    yield from (B(s, 0) for s in reversed(mine))\n"
    )
    arguments = ["check", f"{path}:chunked", "--microbatches", 1, "--ranks", 2]
    assert answer(capsys, *arguments)[1] == "ok: 2 ranks, 4 stages, 1 microbatches, 8 actions\n"
    assert answer(capsys, *arguments, "--chunks", 3)[1] == "ok: 2 ranks, 6 stages, 1 microbatches, 12 actions\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "nope"], "got 'nope', expected one of gpipe, one_f_one_b"),
        (["check", "gpipe", "--ranks", "0"], "gpipe: got ranks=0, expected an integer of at least 1"),
        (["check", "gpipe", "--chunks", "2"], "got --chunks, but gpipe does not take them"),
        (["check", "nowhere.csv"], "No such file or directory: 'nowhere.csv'"),
        (["check", "nowhere.csv", "--ranks", "2"], "got --ranks, expected no sizes: nowhere.csv has its own"),
        (["check", "nowhere.py:f"], "No such file or directory"),
        (["check", "nowhere.txt:f"], "got 'nowhere.txt', expected a Python file"),
        (["check", "FILE:nothing"], "nothing', expected one of"),
        (["check", "FILE:plain"], "plain', expected one of"),
        (["simulate", "FILE:bad"], "0B0: needs 0F0, which no rank ever does [rule: ordered]"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_code_2(capsys, file, arguments, message):
    code, out, err = answer(capsys, *(argument.replace("FILE", str(file)) for argument in arguments))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("python -m schedules: ")
    assert message in err


@pytest.mark.parametrize("arguments", [[], ["list", "gpipe"], ["show"], ["show", "gpipe", "--F", "nan"]])
def test_what_is_no_question_is_code_2(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m schedules" in capsys.readouterr().err
