# SPDX-License-Identifier: Apache-2.0
"""Files are read back as they were written, and nothing else is read, in bounded time and memory."""

import io
import json
import os
import pickle
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schedules import (
    KINDS,
    Action,
    B,
    F,
    Graph,
    PipelineError,
    Placement,
    Schedule,
    ScheduleError,
    SizeError,
    TableError,
    chain,
    check,
    connect,
    defer_weights,
    families,
    gpipe,
    lower,
    one_f_one_b,
    parse,
    recompute,
    repeat,
    schedule,
    split_backward,
    zb_auto,
    zb_h1,
    zb_v,
)
from schedules.commands.subjects import transforms
from schedules.files.calls import NAMED_TRANSFORMS, read_call, spell_call
from schedules.files.cells import pipelining
from schedules.files.csv import Listing, listing, read_csv, table, write_csv
from schedules.language.schedule import graph_of
from schedules.playing.costs import Costs, Link
from schedules.proof.interpreter import interpret
from schedules.proof.networks import fifo
from schedules.testing import graphs, orders, require_round_trip, schedules
from schedules.transforms.connect import parse_graph
from tests.common.hostile import JSON, answer, changed
from tests.common.rows import rows
from tests.common.sizes import few

# ------------------------------------------- Files are read back as they were written, and nothing but actions is read


def read_text(text):
    return read_csv(io.StringIO(text))


def write(plan, **words):
    file = io.StringIO()
    write_csv(plan, file, **words)
    return file.getvalue()


FAMILIES = [getattr(families, name) for name in families.__all__]
COMPUTE = sorted(kind for kind, word in KINDS.items() if not word.mark)
AHEAD = {"SEND_F": 1, "WAIT_F": 1, "RECV_F": -1, "SEND_B": -1, "WAIT_B": -1, "RECV_B": 1}


@st.composite
def cells(draw, transfers):
    """Per rank, actions in any order, and the placement: every stage has every forward, and there is more."""
    even = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    S, M, k = len(even), draw(st.integers(2, 4)), draw(st.integers(1, 3))
    odd = draw(st.just(even) | st.lists(st.integers(0, 3), min_size=S, max_size=S))
    used = sorted({*even, *odd})
    even, odd = (tuple(used.index(home) for home in homes) for homes in (even, odd))
    actions = [F(s, i) for s in range(S) for i in range(M)] + [F(0, 0, k - 1)] * (k > 1)
    units = st.tuples(st.sampled_from(COMPUTE), st.integers(0, S - 1), st.integers(0, M - 1), st.none())
    actions += draw(
        st.lists(st.builds(lambda unit, part: Action(*unit, part), units, st.none() | st.integers(0, k - 1)))
    )
    if transfers and S > 1:
        ways = st.tuples(st.sampled_from(sorted(AHEAD)), st.integers(0, S - 1), st.integers(0, M - 1))
        moves = [Action(kind, s, i, s + AHEAD[kind]) for kind, s, i in draw(st.lists(ways, min_size=1))]
        actions += [move for move in moves if 0 <= move.peer < S]
    placement = Placement(len(used), even, () if even == odd else (odd,))
    found = [[] for _ in used]
    for action in draw(st.permutations(actions)):
        found[placement.home(action.stage, action.microbatch)].append(action)
    return found, placement, (M, k)


@settings(deadline=None)
@given(cells(transfers=False))
def test_a_table_has_the_placement_and_sizes_of_its_actions(case):
    found, placement, (M, k) = case
    s = table(rows=tuple(",".join(map(str, row)) for row in found))
    assert rows(s) == found
    assert (s.ranks, s.microbatches, s.placement, s.slices) == (placement.ranks, M, placement, k)
    forwards = {"F", "C", "OVERLAP_F", "UNSHARD", "RESHARD"}
    assert s.backward == any(action.kind not in forwards for row in found for action in row)
    assert rows(read_text(write(s))) == found


@settings(deadline=None)
@given(cells(transfers=True))
def test_a_file_has_the_placement_and_sizes_of_its_actions(case):
    found, placement, (M, _) = case
    text = "\n".join(",".join(map(str, row)) for row in found)
    plan = read_text(text)
    assert rows(plan) == found
    assert rows(read_text(write(plan))) == found
    if any(action.peer is not None for row in found for action in row):
        assert rows(plan.schedule) == [[action for action in row if action.peer is None] for row in found]
        assert (plan.schedule.placement, plan.schedule.microbatches) == (placement, M)


@settings(deadline=None)
@given(schedules(FAMILIES) | orders().map(lambda case: case[0]))
def test_schedules_are_read_back_as_written(s):
    again = read_text(write(s))
    assert rows(again) == rows(s)
    assert (again.microbatches, again.placement) == (s.microbatches, s.placement)
    assert (again.slices, again.backward) == (s.slices, s.backward)
    assert write(again) == write(s)


@settings(deadline=None)
@given(schedules(FAMILIES))
def test_programs_of_chains_are_read_back_as_written(s):
    program = lower(s)
    again = read_text(write(program))
    assert rows(again) == rows(program)
    if isinstance(again, Listing):
        assert (again.graph, again.channels) == (program.graph, program.channels)
        check(again)


@settings(deadline=None)
@given(orders().map(lambda case: case[0]), st.data())
def test_idle_slots_blanks_and_line_ends_are_ignored(s, data):
    cells = [line.split(",") for line in write(s).splitlines()]
    for row in cells:
        nothing = data.draw(st.sampled_from(["", " ", "\t", "0UNSHARD", "0RESHARD", "0REDUCE_GRAD"]))
        row.insert(data.draw(st.integers(0, len(row))), nothing)
    end = data.draw(st.sampled_from(["\n", "\r\n"]))
    assert rows(read_text(end.join(map(", ".join, cells)))) == rows(s)


def test_files_are_named_by_path_or_text(tmp_path):
    s = split_backward(one_f_one_b(ranks=3, microbatches=5))
    for path in (tmp_path / "one.csv", str(tmp_path / "two.csv")):
        write_csv(s, path)
        check(read_csv(path))
        assert rows(read_csv(path)) == rows(s)
    assert (tmp_path / "one.csv").read_bytes().count(b"\n") == 3


def test_the_placement_is_read_from_the_table():
    s = read_text("0F0,3F0,,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    assert s.placement == Placement(2, (0, 1, 1, 0))
    assert (s.stages, s.microbatches) == (4, 1)
    check(s)


def test_a_table_is_an_ordinary_schedule():
    s = table(rows=("0F0,0B0",))
    assert s == read_text("0F0,0B0\n")
    assert repr(s) == "table(rows=('0F0,0B0',))"
    assert list(s.actions(0)) == [F(0, 0), B(0, 0)]
    assert pickle.loads(pickle.dumps(s)) == s
    require_round_trip(s)


def test_even_and_odd_microbatches_on_two_lines_are_a_bidirectional_schedule():
    s = read_text("0F0,1F1,1B1,0B0,0G0,1G1\n0F1,1F0,1B0,0B1,0G1,1G0\n")
    assert s.placement == Placement(2, (0, 1), ((1, 0),))
    check(s)


def test_a_fused_pair_is_one_cell_and_two_actions():
    s = read_text("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    assert list(map(str, s.actions(0))) == ["0F0", "0OVERLAP_F1", "0B0", "0B1"]
    assert write(s) == "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n"
    assert rows(read_text("0F0,0OVERLAP_F1,0B0,0B1\n")) == rows(s)
    check(s)


@settings(max_examples=few(25))
@given(orders())
def test_a_program_is_written_with_its_transfers(case):
    program = lower(*case)
    lines = write(program).splitlines()[: program.schedule.ranks]
    assert all(str(parse(cell)) == cell for line in lines for cell in line.split(",") if not cell.endswith("F_B"))
    again = read_text(write(program))
    assert rows(again) == rows(program)
    check(again)
    if isinstance(again, Listing):
        assert (again.graph, again.channels) == (program.graph, program.channels)
        assert interpret(again, fifo) == interpret(program, fifo)
    else:
        assert graph_of(again, None) == program.graph, "one rank sends nothing"


@settings(max_examples=few(25))
@given(orders())
def test_a_schedule_is_written_with_the_graph_that_it_is_for(case):
    s = connect(*case)
    again = read_text(write(s))
    assert rows(again) == rows(s)
    assert graph_of(again, None) == s.graph
    check(again)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("graph,0>1", r"line 3: got '0>1' in the graph ',0>1', expected edges such as 0-2, or F0-2"),
        ("graph,0-1x", "line 3: got '0-1x'"),
        ("graph,0-7", r"line 3: got edge \(0, 7\), expected \(s, t\) with 0 <= s < t < 2"),
        ("graph,F1-0", r"line 3: got edge \(1, 0\)"),
        ("graph,G0-0", "line 3: got edge .* of gradients"),
        ("graphs,0-1", "line 3, column 1: got 'graphs'"),
    ],
)
def test_a_malformed_graph_is_refused(line, message):
    for rows_ in ("0F0,0B0\n1F0,1B0\n", "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"):
        with pytest.raises(TableError, match=message):
            read_text(rows_ + line)


def test_a_fused_pair_with_an_input_half_is_one_cell():
    s = table(rows=("0F0,0OVERLAP_F1,0I0,0W0,0B1",))
    assert write(s) == "0F0,(0F1;0I0)OVERLAP_F_B,0W0,0B1\n"
    assert write(s, words=pipelining) == write(s)
    sliced = table(rows=("0F0.0,0F0.1,0OVERLAP_F1.0,0I0.1,0B0.0",))
    assert write(sliced) == "0F0.0,0F0.1,(0F1.0;0I0.1)OVERLAP_F_B,0B0.0\n"


@settings(deadline=None)
@given(st.data())
def test_the_graph_is_read_from_transfers(data):
    s = data.draw(schedules([gpipe, one_f_one_b]).filter(lambda s: s.ranks > 1))
    graph = data.draw(graphs(s.stages) | st.just(chain(s.stages)))
    program = lower(s, graph)
    theirs, *_ = write(program).split("graph")
    again = read_text(theirs)
    assert (again.graph, again.channels) == (graph, program.channels)


def test_a_chain_within_a_rank_is_read_as_a_chain():
    s = read_text("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    for words in ({}, {"words": pipelining}):
        assert read_text(write(lower(s), **words)).graph == chain(4)


def test_a_chain_is_read_as_a_chain_on_any_route():
    s = read_text("0F0,1F0,2F0,2B0,1B0,0B0,0F1,0B1,1G0,2G0\n1F1,2F1,2B1,1B1,1G1,2G1\n")
    check(s)
    program = lower(s)
    again = read_text(write(program))
    assert (again.graph, again.channels, rows(again)) == (chain(3), program.channels, rows(program))


def test_a_transfer_missing_at_both_ends_is_a_violation():
    text = write(lower(gpipe(ranks=3, microbatches=1)))
    for cell in ("1SEND_F0>2,", "1WAIT_F0>2", "2RECV_F0<1,"):
        assert cell in text
        text = text.replace(cell, "")
    with pytest.raises(ScheduleError):
        check(read_text(text))


def test_a_program_of_a_chain_that_lacks_transfers_is_read_as_it_was_written():
    program = read_text("0F0,0SEND_F0,0B0\n1F0,1B0\n")
    assert program.graph == chain(2)
    assert write(program) == "0F0,0SEND_F0>1,0B0\n1F0,1B0\ngraph,0-1\n"
    assert read_text(write(program)).graph == chain(2)


def test_transfers_that_name_some_edges_give_a_graph_of_those_only():
    s = read_text("0F0,1F0,1B0,0B0\n2F0,2B0\n")
    edges = frozenset({(0, 2)})
    theirs, _ = write(lower(s, Graph(3, edges | {(0, 1)}, edges))).split("graph")
    assert read_text(theirs).graph == Graph(3, edges, edges)


def test_files_for_torch_have_no_waits():
    s = lower(one_f_one_b(ranks=2, microbatches=2))
    again = read_text(write(s, words=pipelining))
    assert rows(again) == [[action for action in row if "WAIT" not in action.kind] for row in rows(s)]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (table(rows=("0C0,0R0,0B0",)), "rank 0: got 0C0, expected F, B, I or W on a whole microbatch"),
        (table(rows=("0F0.0,0B0.0",)), "got 0F0.0"),
        (table(rows=("0F0,1F1,0B0", "1F0,0F1")), "got a schedule with stages on two ranks each"),
        (table(rows=("0F0",)), "got a schedule with no backward"),
        (listing(("0OVERLAP_F0,0SEND_F0,0B0", "1F0")), "rank 0: got 0OVERLAP_F0, expected 3B0"),
        (table(rows=("0F0,0B0", "1OVERLAP_F0,1F0")), "rank 1: got 1OVERLAP_F0, expected 3B0 or 3I0 right after it"),
        (lower(gpipe(ranks=3, microbatches=1), Graph(3, frozenset({(0, 2)}), frozenset())), "rank 0: got 0SEND_F0>2"),
        (
            lower(gpipe(ranks=2, microbatches=1), Graph(2, frozenset(), frozenset(), frozenset({(0, 1)}))),
            "rank 0: got 0SEND_G0>1",
        ),
    ],
)
def test_writing_what_torch_cannot_read_is_refused(plan, message):
    with pytest.raises(TableError, match=message):
        write(plan, words=pipelining)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,,0Q0\n", "line 1, column 3: got '0Q0', expected a compute action"),
        ("0F0,0B0\n1F0,1B0,0F0x\n", "line 2, column 3: got '0F0x'"),
        ("0F0,(0F1;0W0)OVERLAP_F_B\n", r"line 1, column 2: got '\(0F1;0W0\)OVERLAP_F_B', .* a pair such as"),
        ("0F0,(0B1;0F0)OVERLAP_F_B\n", r"line 1, column 2: got '\(0B1;0F0\)OVERLAP_F_B'"),
        ("0F0,(0F1;0F0;0B0)OVERLAP_F_B\n", r"line 1, column 2: got '\(0F1;0F0;0B0\)OVERLAP_F_B'"),
        ("(0SEND_F0;0B0)OVERLAP_F_B\n", r"line 1, column 1: got '\(0SEND_F0;0B0\)OVERLAP_F_B'"),
        ('"0F0",0B0\n', "line 1, column 1: got '\"0F0\"'"),
        ("0F0,0B0\n1F0,0F2\n", "stage 0 is on line 1 and on line 2, expected one line .* Move .* microbatch 2"),
        ("0F0,2F0\n", "stage 1 is on no line, but stage 2 is"),
        ("999999999999999999F0", "stage 0 is on no line, but stage 999999999999999999 is"),
        ("0F0,0B0\n,,\n", "line 2: got no action"),
        ("0F0,0B0\n\n", "line 2: got no action"),
        ("", r"got rows=\(\)"),
        ("0F0,0SEND_F0\n", "line 1: got 0SEND_F0>1, expected a transfer between two of the 1 stages"),
        ("0F0,0SEND_F0>999999999999999999\n", "line 1: got 0SEND_F0>9"),
        ("0F0,0SEND_B0\n", "line 1, column 2: got '0SEND_B0', expected .* a transfer such as 2SEND_F1>5"),
        ("0F0\n1F0,1RECV_F0>0\n", "line 2, column 2: got '1RECV_F0>0'"),
        ("0F0,0RECV_F0<1\n1F0\n", "line 1: got 0RECV_F0<1, expected .* from the earlier to the later"),
        ("0F0,0SEND_B0>1\n1F0\n", "line 1: got 0SEND_B0>1, expected .* from the later to the earlier"),
        ("0F0,0F0x\n1F0,1RECV_F0\n", "line 1, column 2: got '0F0x'"),
        ("0F0,0SEND_F0\n0F2,1F0\n", "stage 0 is on line 1 and on line 2"),
        ("0F0,0SEND_F0\n1RECV_F0\n", "line 2: got no action"),
    ],
)
def test_malformed_tables_are_refused(text, message):
    with pytest.raises(TableError, match=message):
        read_text(text)


@pytest.mark.parametrize("given", [["0F0"], "0F0", (b"0F0",), (), None])
@pytest.mark.parametrize("maker", [table, listing])
def test_rows_of_a_table_are_a_tuple_of_strings(maker, given):
    with pytest.raises(TableError, match="expected a tuple with one string per rank"):
        maker(rows=given)


def test_a_table_of_a_schedule_has_no_transfers():
    with pytest.raises(TableError, match=r"line 1, column 2: got '0SEND_F0', .* Leave transfers out"):
        table(rows=("0F0,0SEND_F0", "1F0"))


WORDS = ["0F0", "1F0", "1F1", "0B0", ",", ",", ",", "\n", "0SEND_F0", "1RECV_F0<0", "(", ";", ")OVERLAP_F_B", "UNSHARD"]


@given(st.text() | st.text("0123FBIW,\n") | st.lists(st.sampled_from(WORDS)).map("".join))
@example("\x00")
@example("\ud800")
def test_any_text_is_read_or_refused(text):
    try:
        plan = read_text(text)
    except TableError:
        return
    assert rows(read_text(write(plan))) == rows(plan)


@given(st.binary())
def test_any_file_is_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "file.csv"
    path.write_bytes(b"0F0," + data + b"\xff")
    with pytest.raises(TableError, match="line "):
        read_csv(path)


# ----------------- A schedule that was written as JSON and read again is equal, and nothing else in a file becomes one


def there_and_back(how):
    return read_call(json.loads(json.dumps(spell_call(how))))


@pytest.mark.parametrize(
    "how",
    [
        zb_v(4, 8),
        recompute(one_f_one_b(2, 4), stages=(0,)),
        repeat(recompute(one_f_one_b(2, 4)), times=2),
        defer_weights(zb_h1(3, 6), memory=2.5),
        zb_auto(2, 4, memory=6, costs=Costs(F=(1, 2), comm=Link(latency=0.5, slow=(((0, 1), 2.0),)))),
    ],
)
def test_a_schedule_comes_back_equal(how):
    assert there_and_back(how) == how


def test_a_schedule_of_ones_own_comes_back_action_by_action():
    @schedule()
    def one_at_a_time(rank, ranks, microbatches):
        for i in range(microbatches):
            yield F(rank, i)
            yield B(rank, i)

    how = one_at_a_time(2, 3)
    found = there_and_back(recompute(how))
    assert [[*found.actions(rank)] for rank in range(2)] == [[*recompute(how).actions(rank)] for rank in range(2)]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("gpipe", "expected the call of a schedule"),
        ({"schedule": "gpipe"}, "expected a name and its arguments"),
        ({"schedule": "os", "arguments": {}}, "expected a built-in schedule"),
        ({"schedule": "gpipe", "arguments": {"ranks": 2, "rows": 1}}, "got ['rows']"),
        ({"schedule": "gpipe", "arguments": {"ranks": 2}}, "missing a required argument"),
        ({"schedule": "recompute", "arguments": {"schedule": 3}}, "got 3, expected a schedule"),
        ({"value": "Costs", "arguments": {}}, "expected the call of a schedule"),
    ],
)
def test_anything_else_is_refused(call, words):
    with pytest.raises(TableError, match=words.replace("[", r"\[")):
        read_call(call)


def test_sizes_are_those_that_the_factory_takes():
    with pytest.raises(SizeError, match="ranks=0"):
        read_call({"schedule": "gpipe", "arguments": {"ranks": 0, "microbatches": 1}})


def test_every_transform_of_schedules_alone_can_be_named():
    assert {one.__name__ for one in NAMED_TRANSFORMS} == {*transforms()} - {"connect"}


def test_a_stage_graph_is_refused_rather_than_lost():
    with pytest.raises(TableError, match="expected the chain"):
        spell_call(connect(one_f_one_b(3, 3), chain(3)))


# ------------ Whatever is in a file, its parser answers with a value or with a named error, in bounded time and memory

NUMBERS = st.sampled_from(["0", "1", "2", "10", "00", "-1", "9" * 18, "9" * 30, "1.0", "", "²", "0x1"])
KINDS_OF_CELLS = (
    "F B I W C R G U OVERLAP_F UNSHARD RESHARD REDUCE_GRAD SEND_F RECV_F WAIT_F WAIT_SEND_F SEND_B SEND_G X"
)
CELLS = st.builds(
    "{}{}{}{}".format,
    NUMBERS,
    st.sampled_from(KINDS_OF_CELLS.split()),
    NUMBERS,
    st.sampled_from(["", ".0", ".1", ">1", "<0", ">9", "F"]),
)
PAIRS = st.builds("({};{})OVERLAP_F_B".format, CELLS, CELLS)
LINES = st.lists(CELLS | PAIRS | st.text(max_size=6), max_size=5).map(",".join)
GRAPHS = st.lists(st.builds("{}{}-{}".format, st.sampled_from("FBGX"), NUMBERS, NUMBERS), max_size=3)
TABLES = st.lists(LINES | GRAPHS.map(lambda edges: ",".join(["graph", *edges])), max_size=5).map("\n".join)


@given(TABLES | st.text() | st.binary().map(lambda data: data.decode("latin-1")))
def test_tables_are_read_or_refused(text):
    found = answer(read_csv, io.StringIO(text))
    if found is not None:
        write_csv(found, io.StringIO())


@given(st.text() | CELLS | PAIRS)
def test_actions_are_parsed_or_refused(text):
    assert answer(parse, text) is None or str(parse(text)) == text


@given(GRAPHS.map(",".join) | st.text(), st.integers(0, 5))
def test_graphs_are_parsed_or_refused(text, stages):
    found = answer(parse_graph, text, stages)
    assert found is None or found.stages == stages


CALLS = [
    spell_call(one)
    for one in (
        recompute(one_f_one_b(2, 4), stages=(0,)),
        zb_auto(2, 3, costs=Costs(F=(1, 2), comm=Link(latency=1, slow=(((0, 1), 2.0),)))),
    )
]


@given(st.sampled_from(CALLS).flatmap(lambda call: changed(call, JSON | st.sampled_from(CALLS))))
def test_calls_are_read_or_refused(call):
    assert isinstance(answer(read_call, call), Schedule | None)


def test_calls_of_too_many_passes_are_refused():
    call = {"schedule": "one_f_one_b", "arguments": {"ranks": 2**10, "microbatches": 2**14}}
    with pytest.raises(TableError, match="got 16777216 passes, expected at most"):
        read_call(call)


def test_deep_values_are_refused():
    call = CALLS[0]
    for _ in range(17):
        call = {"schedule": "forwards", "arguments": {"schedule": call}}
    with pytest.raises(TableError, match="deep"):
        read_call(call)
    nested = json.loads("[" * 900 + "]" * 900)
    with pytest.raises(PipelineError):
        read_call({"schedule": "gpipe", "arguments": {"ranks": nested, "microbatches": 2}})


def test_a_hundred_thousand_lines_are_read_in_about_a_second():
    text = "".join(f"{rank}F0,{rank}B0\n" for rank in range(10**5))
    start = time.process_time()
    assert read_csv(io.StringIO(text)).ranks == 10**5
    assert time.process_time() - start < 20


def test_a_pipe_in_place_of_a_table_is_refused(tmp_path):
    os.mkfifo(tmp_path / "a.csv")
    with pytest.raises(TableError, match="other than a regular file, expected one"):
        read_csv(tmp_path / "a.csv")


def test_errors_do_not_repeat_files():
    for text in ("0F0," + "x" * 10**6, "0F0\n" * 10**4, ",".join(["0F0"] * 10**5 + ["?"])):
        with pytest.raises(PipelineError) as caught:
            read_csv(io.StringIO(text))
        assert len(str(caught.value)) < 1000


# -------------------------------------------------------------------------------- A file is written whole or not at all


def test_a_file_that_could_not_be_written_is_as_it_was(tmp_path):
    """Nothing is left beside it; a link leads to what is replaced, and a pipe is written in place."""
    path, link, pipe = tmp_path / "table.csv", tmp_path / "link.csv", tmp_path / "pipe.csv"
    write_csv(families.gpipe(2, 1), path)
    before = path.read_text()

    def interrupted(plan, rank):
        if rank:
            raise KeyboardInterrupt
        return "0F0"

    with pytest.raises(KeyboardInterrupt):
        write_csv(families.gpipe(2, 2), path, words=interrupted)
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["table.csv"]
    link.symlink_to(path)
    write_csv(families.gpipe(2, 2), link)
    assert link.is_symlink()
    assert path.read_text() != before
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_csv(families.gpipe(2, 2), pipe)
    assert os.read(reader, 1000).decode() == path.read_text()
    os.close(reader)
    with pytest.raises(IsADirectoryError):
        write_csv(families.gpipe(2, 2), tmp_path)
