# SPDX-License-Identifier: Apache-2.0
"""`python -m schedules`, as a user types it."""

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedules
from fpipe.__main__ import main as plan
from schedules import dag, families, gpipe, lower, one_f_one_b, split_backward
from schedules.__main__ import main
from schedules.files.csv import read_csv, table, write_csv
from schedules.files.megatron import read_layout
from tests.common.command_line import answer
from tests.common.sizes import sampled

# --------------------------------------------------------------------------- `python -m schedules`, as a user types it

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
        "bubble    0.4146 of all ranks, 0.4146 of the busiest",
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


@sampled(3)
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


def test_pictures_for_papers(capsys, tmp_path):
    pdf, tex = tmp_path / "a.pdf", tmp_path / "a.tex"
    style = ["--window", "4,20", "--palette", "gray", "--labels", "microbatch", "--width", 300]
    assert answer(capsys, "simulate", "zb_v", "--pdf", pdf, "--tikz", tex, *style)[0] == 0
    assert b"MediaBox[0 0 300.00 " in pdf.read_bytes()
    drawn = tex.read_text()
    assert r"\path (0,0) rectangle (300.00," in drawn
    assert "{HTML}E69F00" not in drawn
    assert drawn.count("rectangle") < 200
    with pytest.raises(SystemExit):
        answer(capsys, "show", "zb_v", "--svg", tmp_path / "a.svg", "--window", "4,2")
    assert "--window: got '4,2', expected a later end" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["gpipe", "--C", "3"], "C"),
        (["gpipe", "--residual", "3"], "residual"),
        (["zb_h1", "--B", "3", "--I", "1", "--W", "2"], "B"),
        (["gpipe", "--OVERLAP_F", "1"], "OVERLAP_F"),
        (["one_f_one_b", "--gathered", "2"], "gathered"),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "compare", "show"])
def test_an_option_without_effect_is_an_error(capsys, command, words, option):
    code, _, err = answer(capsys, command, *words)
    assert (code, f"got --{option}, expected" in err, "no effect" in err) == (2, True, True)


def test_halves_follow_the_option_of_the_whole(capsys):
    rows = answer(capsys, "compare", "one_f_one_b", "zb_h1", "--F", 3, "--B", 6)[1].splitlines()
    assert [row.split()[2:4] for row in rows[-2:]] == [["99", "+0%"], ["81", "-18%"]]


def test_graphs_costs_and_tuples_are_parameters(capsys):
    words = ["v_half", "costs=F=5,I=9,W=3,comm=0.5", "--F", 5, "--I", 9, "--W", 3, "--comm", 0.5]
    sizes = ["--ranks", 8, "--microbatches", 16]
    found = [
        answer(capsys, "simulate", *one, *sizes, "--brief")[1].split()[1] for one in (words, [words[0], *words[2:]])
    ]
    assert found == ["801", "989"]
    graph = answer(capsys, "show", "gpipe", "connect", "graph=0-2,1-2", "--ranks", 3, "--microbatches", 1)[1]
    assert graph.splitlines()[1].startswith("rank 1 |F0")
    out = answer(capsys, "show", "gpipe", "recompute", "stages=0,2", "--ranks", 3, "--microbatches", 1)[1]
    assert [("R0" in row, "C0" in row) for row in out.splitlines()] == [(True, True), (False, False), (True, True)]
    for wrong in ("costs=Q=3", "costs=F=x", "costs=3"):
        assert answer(capsys, "show", "v_half", wrong)[0] == 2


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
        (["show", "WRONG"], "line 2, column 2: got '1X0'"),
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
    wrong = file.with_name("wrong.csv")
    wrong.write_text("0F0,0B0\n1F0,1X0\n")
    places = {"FILE": str(file), "TABLE": str(table), "WRONG": str(wrong)}
    named = (re.sub("FILE|TABLE|WRONG", lambda found: places[found[0]], argument) for argument in arguments)
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
    page = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()
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
    times = [word for kind in "FIW" for word in (f"--{kind}", "1,1,2,1")]
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
    assert "expected one without slices and recomputation" in err


# ----------------------------------- `python -m schedules` reads schedules from tables, and writes tables and pictures


def test_a_table_of_a_program_is_checked_and_shown(capsys, tmp_path):
    path = tmp_path / "table.csv"
    write_csv(lower(one_f_one_b(ranks=2, microbatches=3)), path)
    assert answer(capsys, "check", path)[:2] == (0, "ok: 2 ranks, 2 stages, 3 microbatches, 12 actions\n")
    assert answer(capsys, "show", path)[1] == f"{one_f_one_b(ranks=2, microbatches=3)}\n"
    assert answer(capsys, "check", path, "--device")[0] == 0
    hasty = tmp_path / "hasty.csv"
    hasty.write_text("0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert answer(capsys, "check", hasty)[0] == 0
    assert "[rule: posts]" in answer(capsys, "check", hasty, "--device")[1]
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


# --------------- The command lines as processes: users' files that fail, interrupts, narrow terminals, enormous ranges

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
    assert err.endswith("Fix it.\n")


def test_a_task_that_fails_is_one_line(capsys, tmp_path):
    file = tmp_path / "train.py"
    file.write_text("def task():\n    raise RuntimeError('no data')\n")
    assert plan(["plan", f"{file}:task", "--ranks", "2"]) == 2
    assert f"{file}, line 2: got RuntimeError: no data" in capsys.readouterr().err


def test_errors_of_the_package_keep_their_traceback(monkeypatch):
    monkeypatch.setattr("schedules.commands.reports.check", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["check", "gpipe"])


def test_an_interrupt_is_one_line_and_code_130(capsys, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("raise KeyboardInterrupt\n")
    assert answer(capsys, "check", f"{file}:mine") == (130, "", "python -m schedules: interrupted\n")


@sampled(1)
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


# ---------------------------------------------------------------------------------------------------------------- audit


def test_a_schedule_of_others_is_audited(tmp_path, capsys):
    """A table that others run: what holds of it, and what would be faster in its memory; its certificate is a file."""
    table, saved = tmp_path / "theirs.csv", tmp_path / "certificate.json"
    write_csv(lower(schedules.one_f_one_b(4, 8)), table)
    assert main(["audit", str(table), "--F", "1", "--B", "2", "--save", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "right: correct, and it can't hang on an accelerator" in out
    assert "bound     33, so it is 0.00 % above it: rank 3 waits 3, works 24, and leaves 6" in out
    assert re.search(r"zb_h1\(ranks=4, microbatches=8\) +27 +-18.2%", out)
    assert schedules.Certificate.read(saved).makespan == 33


def test_a_wrong_schedule_of_others_is_named(tmp_path, capsys):
    table = tmp_path / "theirs.csv"
    table.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B1\n")
    assert main(["audit", str(table)]) == 1
    assert "wrong: rank 1" in capsys.readouterr().out


def test_a_layout_of_megatron_is_audited(capsys):
    words = ["audit", "--layout", "Et*3|(tt|)*5,tt|L", "--ranks", "4", "--microbatches", "8", "--loss", "2"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "8 stages: Ettt | tt | tt | tt | tt | tt | tt | L" in out
    assert "bound     120" in out
    assert "dualpipe_v(ranks=4, microbatches=8)" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "got no schedule"),
        (["gpipe", "--layout", "EL"], "got gpipe besides --layout"),
        (["--layout", "tt|L"], "expected stages of E, t, m and L"),
        (["--layout", "Et|t|tL", "--ranks", "2"], "got 3 stages for 2 ranks"),
        (["--layout", "E" + "(t*99999)*99999" + "L"], "got 99999 times"),
        (["--layout", "E(((L"], "expected stages"),
    ],
)
def test_an_audit_that_makes_no_sense_is_refused(words, said, capsys):
    assert main(["audit", *words]) == 2
    assert said in capsys.readouterr().err


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_a_layout_reads_as_it_was_written(layers):
    stages = ["t" * count for count in layers]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    if len(stages) == 1:
        stages = ["E" + "t" * layers[0] + "L"]
    assert read_layout("|".join(stages)) == tuple(stages)
    short = "|".join(re.sub(r"t{2,}", lambda found: f"t*{len(found[0])}", stage) for stage in stages)
    assert read_layout(short) == tuple(stages)
