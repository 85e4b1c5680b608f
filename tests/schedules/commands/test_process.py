# SPDX-License-Identifier: Apache-2.0
"""The command lines as processes: users' files that fail, interrupts, narrow terminals, enormous ranges."""

import subprocess
import sys

import pytest

from fpipe.__main__ import main as plan
from schedules.__main__ import main
from tests.common.command_line import answer

START = "from schedules import F, schedule\n@schedule()\ndef mine(rank, ranks, microbatches):\n    "
FAILING = {
    "at import": ("1 / 0\n", "line 1: got ZeroDivisionError: division by zero"),
    "in its generator": (START + "yield F(rank, [][0])\n", "line 4: got IndexError: list index out of range"),
    "no Python": ("def mine(:\n", "line 1: got SyntaxError"),
    "an exit": ("import sys\nsys.exit(0)\n", "line 2: got SystemExit: 0"),
    "an error without a text": (
        "class Mine(Exception):\n    def __str__(self): raise ValueError\nraise Mine\n",
        "line 3: got Mine: its text can't be made",
    ),
    "a control character": ("raise ValueError('\\x1b[2J')\n", "got ValueError: \\x1b[2J"),
}


@pytest.mark.parametrize("what", FAILING)
def test_an_error_of_a_users_file_is_one_line_that_says_where(capsys, tmp_path, what):
    text, words = FAILING[what]
    file = tmp_path / "mine.py"
    file.write_text(text)
    code, _, err = answer(capsys, "check", f"{file}:mine")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"python -m schedules: {file}, line ")
    assert words in err
    assert err.endswith("Repair it.\n")


def test_a_task_that_fails_is_one_line(capsys, tmp_path):
    file = tmp_path / "train.py"
    file.write_text("def task():\n    raise RuntimeError('no data')\n")
    assert plan(["plan", f"{file}:task", "--ranks", "2"]) == 2
    assert f"{file}, line 2: got RuntimeError: no data" in capsys.readouterr().err


def test_errors_of_the_package_keep_their_traceback(monkeypatch):
    monkeypatch.setattr("schedules.commands.reports.check", lambda schedule: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["check", "gpipe"])


def test_an_interrupt_is_one_line_and_code_130(capsys, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("raise KeyboardInterrupt\n")
    assert answer(capsys, "check", f"{file}:mine") == (130, "", "python -m schedules: interrupted\n")


@pytest.mark.parametrize("stream", [">&-", "2>&-", "| head -c 1 > /dev/null"])
def test_closed_streams_are_quiet(stream):
    command = f'"{sys.executable}" -m schedules list {stream}'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["interleaved_1f1b", "chunks=1..999999999"], "expected a range of at most 1000 values"),
        (["v_schedule", "memory=1..100", "microbatches=1..100"], "got 10000 schedules of v_schedule"),
        (["gpipe", "--microbatches", "999999999999"], "got 3999999999996 forwards in gpipe("),
        (["gpipe", "--ranks", "999999999999"], "expected an integer of at least 1, and at most 1048576"),
        (["gpipe", "microbatches=" + "9" * 5000], "expected a number"),
    ],
)
def test_enormous_numbers_are_refused_not_tried(capsys, words, said):
    code, out, err = answer(capsys, "simulate", *words)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err) < 1000


COMMANDS = [
    ["list"],
    ["show", "interleaved_1f1b", "chunks=3"],
    ["check", "gpipe"],
    ["simulate", "one_f_one_b", "split_backward"],
    ["compare", "one_f_one_b", "interleaved_1f1b", "chunks=2..4", "defer_weights", "memory=8"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_everything_fits_into_eighty_columns(capsys, monkeypatch, words):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    code, out, _ = answer(capsys, *words)
    assert code == 0
    assert max(map(len, out.split("\n"))) <= 80


def test_names_of_files_do_not_control_the_terminal(capsys, tmp_path):
    file = tmp_path / "a\x1b[2Jb.csv"
    file.write_text("0F0,0B0\n")
    code, out, _ = answer(capsys, "compare", file, "gpipe", "--ranks", 1, "--microbatches", 1)
    assert code == 0
    assert "\x1b" not in out
    assert "a\\x1b[2Jb.csv" in out
