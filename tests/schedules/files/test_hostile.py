# SPDX-License-Identifier: Apache-2.0
"""Whatever is in a file, its parser answers with a value or with a named error, in bounded time and memory."""

import io
import json
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import PipelineError, Schedule, TableError, one_f_one_b, parse, recompute, zb_auto
from schedules.files import read_csv, write_csv
from schedules.files.calls import read_call, spell_call
from schedules.replay.costs import Costs, Link
from schedules.transforms.connect import parse_graph
from tests.common.hostile import JSON, answer, changed

NUMBERS = st.sampled_from(["0", "1", "2", "10", "00", "-1", "9" * 18, "9" * 30, "1.0", "", "²", "0x1"])
WORDS = st.sampled_from(
    [
        "F",
        "B",
        "I",
        "W",
        "C",
        "R",
        "G",
        "U",
        "OVERLAP_F",
        "UNSHARD",
        "RESHARD",
        "REDUCE_GRAD",
        "SEND_F",
        "RECV_F",
        "WAIT_F",
        "WAIT_SEND_F",
        "SEND_B",
        "SEND_G",
        "X",
    ]
)
CELLS = st.builds("{}{}{}{}".format, NUMBERS, WORDS, NUMBERS, st.sampled_from(["", ".0", ".1", ">1", "<0", ">9", "F"]))
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
    with pytest.raises(TableError, match="no regular file, expected one"):
        read_csv(tmp_path / "a.csv")


def test_errors_do_not_repeat_files():
    for text in ("0F0," + "x" * 10**6, "0F0\n" * 10**4, ",".join(["0F0"] * 10**5 + ["?"])):
        with pytest.raises(PipelineError) as caught:
            read_csv(io.StringIO(text))
        assert len(str(caught.value)) < 1000
