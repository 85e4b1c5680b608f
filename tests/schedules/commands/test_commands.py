# SPDX-License-Identifier: Apache-2.0
"""`python -m schedules`, as a user types it."""

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from schedules import families, one_f_one_b
from schedules.__main__ import main
from tests.common.command_line import answer

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

@schedule()
def stuck(rank, ranks, microbatches):
    yield F(rank, 0)
    if rank == 0:
        yield B(rank, 0)

@schedule()
def needy(rank, ranks, microbatches, k):
    yield F(rank, k)

def plain():
    pass
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "json.py"  # a name that a module of the standard library has
    path.write_text(MINE)
    return path


def test_the_command_runs_as_a_process():
    command = [sys.executable, "-m", "schedules", "show", "one_f_one_b", "--ranks", "4", "--microbatches", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{one_f_one_b(ranks=4, microbatches=8)}\n"
    assert done.stderr == ""


def test_a_closed_pipe_ends_the_command_quietly():
    command = [sys.executable, "-m", "schedules", "show", "gpipe", "--microbatches", "4000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(10) == b"rank 0 |F0"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_list(capsys):
    code, out, _ = answer(capsys, "list")
    assert code == 0
    schedules, changes = out.split("\n\n")
    assert [line.split()[0] for line in schedules.splitlines()[1:]] == families.__all__
    assert "split_backward" in [line.split()[0] for line in changes.splitlines()[1:]]
    assert all(len(line.split()) > 3 for line in out.splitlines() if line)


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
    monkeypatch.setenv("NO_COLOR", "1")
    blocks = answer(capsys, "show", "gpipe", "--ranks", 2, "--microbatches", 3)[1].rpartition("\n\n")[0]
    assert max(map(len, whole.splitlines())) > 20
    assert max(map(len, blocks.splitlines())) <= 20
    assert blocks.startswith("rank 0 |F0 F1 F2 |\nrank 1 |.  F0 F1 |\n\nrank 0 |")


def test_colors_are_used_only_in_terminals_that_have_them(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    arguments = ["show", "gpipe", "split_backward", "--ranks", 2, "--microbatches", 2]
    bare = answer(capsys, *arguments)[1]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    painted = answer(capsys, *arguments)[1]
    assert "\x1b[" not in bare
    assert len(set(re.findall(r"\x1b\[[0-9;]+m", painted))) == 3 + 1  # F, I and W; and the end of each
    assert (
        re.sub(r"\x1b\[[0-9;]+m", "", painted)
        == bare + "\nF forward   I backward, input half   W backward, weight half\n"
    )
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in answer(capsys, *arguments)[1]
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b[" not in answer(capsys, *arguments)[1]


def test_simulate(capsys):
    code, out, _ = answer(capsys, "simulate", "one_f_one_b", "--ranks", 4, "--microbatches", 8, "--comm", 0.5)
    assert code == 0
    assert out.splitlines()[:9] == [
        "makespan  41",
        "span      41, the longest of one rank",
        "bubble    0.4146 of the span, 0.4146 of the makespan",
        "",
        "rank  busy  idle  peak memory",
        "0       24    17            4",
        "1       24    17            3",
        "2       24    17            2",
        "3       24    17            1",
    ]


def test_all_costs_may_be_zero(capsys, tmp_path):
    free = ["--F", 0, "--B", 0]
    for question in ("show", "simulate", "compare"):
        code, _, err = answer(
            capsys, question, "dualpipe", *free, "--svg", tmp_path / "a.svg", "--trace", tmp_path / "b"
        )
        assert (code, err) == (0, "")
        ElementTree.parse(tmp_path / "a.svg")
    assert answer(capsys, "show", "gpipe", *free)[0] == 0


def test_costs_of_each_stage_of_links_and_sizes(capsys):
    def makespan(*arguments):
        return float(answer(capsys, "simulate", "gpipe", "--ranks", 2, "--microbatches", 1, *arguments)[1].split()[1])

    assert makespan() == 6
    assert makespan("--F", "1,5") == 10
    assert makespan("--latency", 1, "--bytes", 8, "--bandwidth", 4) == makespan("--comm", 3) == 12
    assert 5 < makespan("--jitter", 0.1, "--seed", 1) != makespan("--jitter", 0.1, "--seed", 2) < 7
    out = answer(capsys, "simulate", "gpipe", "--ranks", 1, "--microbatches", 3, "--activation", 10)[1]
    assert "0        9     0           30" in out


def test_check(capsys, file):
    assert answer(capsys, "check", "gpipe") == (0, "ok: 4 ranks, 4 stages, 8 microbatches, 64 actions\n", "")
    assert answer(capsys, "check", f"{file}:good", "--ranks", 1) == (
        0,
        "ok: 1 ranks, 1 stages, 8 microbatches, 16 actions\n",
        "",
    )
    code, out, err = answer(capsys, "check", f"{file}:bad", "--ranks", 1)
    assert (code, err) == (1, "")
    assert out.startswith("rank 0 |B0!|\nrank 0, position 0, 0B0: comes before 0F0 [rule: forward_before_backward].")


def test_check_draws_the_last_actions_before_the_violation(capsys, tmp_path):
    path = tmp_path / "table.csv"
    actions = ",".join(f"0F{i},0B{i}" for i in range(100))
    path.write_text(f"{actions},0F7\n")
    code, out, _ = answer(capsys, "check", path)
    assert code == 1
    picture, reason = out.rstrip().rsplit("\n", 1)
    assert len(picture) < 300
    assert picture.endswith("F99 B99     F7! |")
    assert reason.startswith("rank 0, position 200, 0F7: has already run")


PARAMETERS = """
from schedules import B, F, looped, schedule, transform

@schedule(looped)
def chunked(rank, ranks, microbatches, chunks=2, name="x", *, late=False):
    mine = range(rank, ranks * chunks, ranks)
    yield from (F(s, 0) for s in mine)
    yield from (B(s, 0) for s in reversed(mine))

@transform
def twice(rank, schedule, times):
    yield from list(schedule.actions(rank)) * times
"""


def test_a_factory_may_have_its_own_parameters(capsys, tmp_path):
    path = tmp_path / "chunked.py"
    path.write_text(PARAMETERS)
    arguments = ["check", f"{path}:chunked", "--microbatches", 1, "--ranks", 2]
    assert answer(capsys, *arguments)[1] == "ok: 2 ranks, 4 stages, 1 microbatches, 8 actions\n"
    assert answer(capsys, *arguments, "chunks=3")[1] == "ok: 2 ranks, 6 stages, 1 microbatches, 12 actions\n"
    more = ["ranks=3", "chunks=1", "name=a=b", "late=true"]
    assert answer(capsys, *arguments, *more)[1] == "ok: 3 ranks, 3 stages, 1 microbatches, 6 actions\n"
    assert "has already run" in answer(capsys, *arguments, f"{path}:twice", "times=2")[1]


@pytest.mark.parametrize("name", families.__all__)
def test_every_built_in_schedule_answers_every_question(capsys, tmp_path, name):
    svg, trace, table = tmp_path / "a.svg", tmp_path / "a.json", tmp_path / "a.csv"
    assert answer(capsys, "check", name)[1].startswith("ok: 4 ranks")
    assert answer(capsys, "simulate", name, "--comm", 0.1, "--svg", svg, "--trace", trace, "--csv", table)[0] == 0
    actions = sum(1 for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X")
    assert actions == len(list(ElementTree.parse(svg).getroot().iter("{http://www.w3.org/2000/svg}title"))) >= 32
    if name != "forward_only":  # a table does not say that there is no backward
        assert answer(capsys, "check", table)[1].endswith(f" {actions} actions\n")
        assert answer(capsys, "show", table)[1] == answer(capsys, "show", name)[1]
    assert f"\n{name} " in answer(capsys, "compare", name)[1]


def test_compare(capsys, tmp_path):
    svg = tmp_path / "a.svg"
    out = answer(capsys, "compare", "gpipe", "one_f_one_b", "one_f_one_b", "split_backward", "--svg", svg)[1]
    assert out.splitlines() == [
        "4 ranks, 8 microbatches",
        "",
        "                             stages  makespan       bubble  idle  peak memory        weights",
        "gpipe                             4        33  +0%  0.2727     9            8   +0%        1",
        "one_f_one_b                       4        33  +0%  0.2727     9            4  -50%        1",
        "split_backward(one_f_one_b)       4        30  -9%  0.2000     6            4  -50%        1",
        f"wrote {svg}",
    ]
    texts = {element.text for element in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")}
    assert {"gpipe", "one_f_one_b", "split_backward(one_f_one_b)"} <= texts


def test_compare_gives_all_schedules_the_same_work(capsys, tmp_path):
    path = tmp_path / "chunked.py"
    path.write_text(PARAMETERS)
    sizes = ["--microbatches", 1, "--ranks", 2, "--activation", 6, "--memory", 6]
    rows = answer(capsys, "compare", f"{path}:chunked", "chunks=1..3", *sizes)[1].splitlines()[3:]
    assert [row.split()[1:4] for row in rows] == [["2", "6", "+0%"], ["4", "6", "+0%"], ["6", "6", "+0%"]]
    assert [row.split()[6:] for row in rows] == [["6", "+0%", "1"]] * 3


def test_compare_at_equal_memory_says_why_schedules_are_left_out(capsys, file):
    arguments = ["gpipe", "one_f_one_b", f"{file}:bad", "--memory", 4]
    code, out, err = answer(capsys, "compare", *arguments)
    rows = out.splitlines()
    assert (code, err, rows[3].split()[0]) == (0, "", "one_f_one_b")
    assert rows[5] == "gpipe is left out: it holds 8 on rank 0, more than 4."
    assert rows[6].startswith(f"{file}:bad is left out: rank 0, position 0, 0B0: comes before 0F0")
    assert len(rows) == 7


def test_compare_counts_weights(capsys):
    rows = answer(capsys, "compare", "gpipe", "dualpipe", "pipedream", "pipedream_2bw")[1].splitlines()[3:]
    assert [row.split()[-1] for row in rows] == ["1", "2", "4", "2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "nope"], "got 'nope', expected one of gpipe, forward_only, one_f_one_b"),
        (["check", "gpipe", "--ranks", "0"], "gpipe: got ranks=0, expected an integer of at least 1"),
        (["check", "gpipe", "k=2"], "got k=, but gpipe takes ranks, microbatches. Drop it."),
        (["check", "gpipe", "ranks=x"], "got ranks=x, expected a number. Write it as in ranks=2."),
        (["check", "gpipe", "ranks=1e999"], "got ranks=1e999, expected a number."),
        (["check", "gpipe", "ranks=2.5"], "gpipe: got ranks=2.5, expected an integer of at least 1"),
        (["check", "gpipe", "ranks=2,,3"], "got '2,,3', expected a value, as in 2, several, as in 1,2,4, or a range"),
        (["check", "gpipe", "ranks=3..2"], "got '3..2', expected a value"),
        (["check", "gpipe", "ranks=2..3"], "got gpipe(ranks=2) and gpipe(ranks=3), expected one schedule. Use compare"),
        (["check", "gpipe", "gpipe"], "got gpipe and gpipe, expected one schedule"),
        (["check", "ranks=2"], "got ranks=2, expected a schedule's name before it"),
        (["check", "split_backward"], "got split_backward, expected a schedule before it"),
        (["check", "FILE:needy"], "needy needs k. Add it, as in"),
        (
            ["compare", "gpipe", "ranks=2", "gpipe"],
            "got gpipe with 4 ranks and gpipe(ranks=2) with 2, expected the same number",
        ),
        (["compare", "gpipe", "--F", "1,2"], "got F=(1.0, 2.0), expected one number"),
        (["show", "gpipe", "--F", "1,2"], "got 2 numbers for --F, expected 4: one for each stage of gpipe"),
        (["simulate", "gpipe", "--activation", "1,2"], "got 2 numbers for --activation, expected 4"),
        (["show", "gpipe", "--bytes", "1,2"], "got 2 numbers for --bytes, expected 4"),
        (["show", "gpipe", "--comm", "1", "--bytes", "2"], "got --comm and --bytes, expected one of them"),
        (["check", "nowhere.csv", "k=2"], "got k=, but nowhere.csv has its own sizes"),
        (["check", "nowhere.csv"], "No such file or directory: 'nowhere.csv'"),
        (["check", "TABLE", "--ranks", "2"], "got --ranks, expected no sizes: "),
        (["check", "nowhere.py:f"], "No such file or directory"),
        (["check", "nowhere.txt:f"], "got 'nowhere.txt', expected a Python file"),
        (["check", "FILE:nothing"], "nothing', expected one of"),
        (["check", "FILE:plain"], "plain', expected one of"),
        (["simulate", "FILE:stuck"], "1B0, or 1I0 and 1W0, never runs [rule: complete]"),
    ],
)
def test_invalid_arguments_are_one_line_and_code_2(capsys, file, arguments, message):
    table = file.with_name("table.csv")
    table.write_text("0F0,0B0\n")
    named = (argument.replace("FILE", str(file)).replace("TABLE", str(table)) for argument in arguments)
    code, out, err = answer(capsys, *named)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("python -m schedules: ")
    assert message in err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["list", "gpipe"],
        ["show"],
        ["show", "gpipe", "--F", "nan"],
        ["show", "gpipe", "--F", "1,"],
        ["show", "gpipe", "--bandwidth", "0"],
        ["show", "gpipe", "--jitter", "1"],
        ["compare", "gpipe", "--memory", "nan"],
        ["draw", "gpipe"],
    ],
)
def test_an_unknown_command_is_code_2(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m schedules" in capsys.readouterr().err


def test_the_table_in_the_docs_is_what_compare_prints(capsys):
    page = (Path(__file__).parents[3] / "docs" / "command_line.md").read_text()
    shown = r"^    python -m schedules (compare [^\n]*)\n\n```text\n(.*?)```"
    found = re.search(shown, page, re.MULTILINE | re.DOTALL)
    assert answer(capsys, *found[1].split())[1] == found[2]


def test_a_graph_is_given_by_its_edges(capsys):
    sizes = "--ranks", 3, "--microbatches", 1
    assert answer(capsys, "show", "gpipe", *sizes, "--graph", "0-2,1-2") == (
        0,
        "rank 0 |F0 .  .  .  B0    |\nrank 1 |F0 .  .  .  B0    |\nrank 2 |.  F0 B0    .  .  |\n",
        "",
    )
    assert answer(capsys, "simulate", "gpipe", *sizes, "--graph", "0-2,F1-2")[1].startswith("makespan  6")
    code, out, _ = answer(capsys, "check", "pipedream", *sizes, "--microbatches", 2, "--graph", "0-1,1-2,G0-2")
    assert (code, "another stage holds some of its parameters" in out) == (1, True)
    for wrong in ("0>2", "0-9", "2-0"):
        code, _, err = answer(capsys, "show", "gpipe", *sizes, "--graph", wrong)
        assert (code, "got" in err, "edge" in err) == (2, True, True)
    assert "is left out: got edge (0, 3)" in answer(capsys, "compare", "gpipe", *sizes, "--graph", "0-3")[1]


def test_a_search_shows_the_fastest_order_in_the_same_memory(capsys, tmp_path):
    times = [word for kind in "FIW" for word in (f"--{kind}", "1,1,2,1")] + ["--B", "2,2,4,2"]
    words = ["zb_h1", "--ranks", 4, "--microbatches", 6, *times]
    code, out, err = answer(capsys, "search", *words)
    assert (code, err) == (0, "")
    assert out.startswith("makespan 38, at most 0.00 % above the best possible, from ")
    assert "zb_h1(ranks=4, microbatches=6) takes 38\n" in out
    assert out.count("\nrank ") == 4
    code, out, _ = answer(capsys, "search", *words, "--csv", tmp_path / "found.csv")
    assert code == 0
    code, out, _ = answer(capsys, "simulate", tmp_path / "found.csv", *times, "--brief")
    assert "38" in out


def test_a_search_in_too_little_memory_says_how_much_it_takes(capsys):
    code, out, err = answer(capsys, "search", "zb_h1", "--memory", "0.5")
    assert (code, out) == (2, "")
    assert "got memory=0.5, expected at least the 1 that rank 0 needs for one microbatch" in err


@pytest.mark.parametrize("words", [("one_f_one_b", "recompute"), ("seq_1f1b",)])
def test_a_search_is_refused_where_its_bound_does_not_hold(capsys, words):
    code, out, err = answer(capsys, "search", *words)
    assert (code, out) == (2, "")
    assert "expected one with neither slices nor recomputation" in err
