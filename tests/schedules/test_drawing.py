# SPDX-License-Identifier: Apache-2.0
"""Pictures of timelines: text, SVG, and traces."""

import json
import re
from itertools import combinations
from math import inf, nan
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    B,
    Costs,
    F,
    ScheduleError,
    Sizes,
    Span,
    U,
    check,
    dag,
    gpipe,
    interleaved_1f1b,
    looped,
    one_f_one_b,
    parse,
    schedule,
    simulate,
    spans,
    split_backward,
)
from schedules.drawing import Style, ansi, draw, legend, svg, text, texts, trace
from schedules.drawing import lines as lines_module
from schedules.drawing.palette import LOOKS, WAIT, shade
from schedules.drawing.strips import make_strip
from schedules.drawing.vector import LEFT
from schedules.errors import ArgumentError, TimelineError
from schedules.language.actions import BESIDE, KINDS
from schedules.playing.outputs import inputs_of, output_of
from schedules.playing.rows import edit
from schedules.testing import orders, schedules
from tests.common.rows import stays_on_the_device
from tests.common.sizes import sampled
from tests.common.timelines import NAMES, WAITED, events, timelines

# ------------------------------------------------------------- A text picture shows every action at its simulated time


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
@given(orders().filter(stays_on_the_device))
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
        "This is for a chain of stages. For another stage graph, print connect(schedule, graph).",
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


# ------------------- An SVG picture shows every action at its time, waits in their own style, and the simulated memory

SVG = "{http://www.w3.org/2000/svg}"


def cells(element):
    """Yield the title, x and width of each rectangle that is an action."""
    for cell in element.iter(f"{SVG}rect"):
        for title in cell.iter(f"{SVG}title"):
            yield title.text, float(cell.get("x")) - LEFT, float(cell.get("width"))


def areas(root):
    """Yield the corners of each cell, except cells without duration."""
    for cell in root.iter(f"{SVG}rect"):
        if list(cell) and cell.get("stroke"):
            x, y, width, height = (float(cell.get(name)) for name in ("x", "y", "width", "height"))
            yield x, y, x + width, y + height


def overlap(one, other):
    (left, top, right, bottom), (x, y, x_end, y_end) = one, other
    tiny = 0.03  # two digits are kept
    return not (x >= right - tiny or x_end <= left + tiny or y >= bottom - tiny or y_end <= top + tiny)


@settings(deadline=None)
@given(st.dictionaries(NAMES, timelines(), max_size=3), st.booleans())
def test_any_timelines_make_a_picture_with_a_cell_for_each_action(given_, memory):
    picture = svg(given_, memory=memory)
    root = ElementTree.fromstring(picture)
    wide, high = float(root.get("width")), float(root.get("height"))
    assert len(list(cells(root))) == sum(map(len, given_.values()))
    assert not any(overlap(one, other) for one, other in combinations(areas(root), 2))
    assert all(x >= -1 and x + width <= wide for _, x, width in cells(root))
    assert all(0 <= float(one.get("y")) <= high for one in root.iter(f"{SVG}rect") if one.get("y"))
    assert not re.search(r"[^a-z](nan|inf)[^a-z]", re.sub("<(title|text).*?</", "", picture))


@settings(deadline=None)
@given(orders().filter(stays_on_the_device))
def test_cells_are_drawn_at_the_simulated_times(case):
    schedule, graph = case
    timeline = list(spans(schedule, Costs(G=1, U=1), graph))
    found = {
        words.partition(",")[0]: (x, width) for words, x, width in cells(ElementTree.fromstring(svg({"": timeline})))
    }
    assert len(found) == len(timeline)
    scale = max(x + width for x, width in found.values()) / max(span.end for span in timeline)
    for rank, action, start, end in timeline:
        x, width = found[f"{action} on rank {rank}"]
        assert (x, width) == (pytest.approx(start * scale, abs=0.02), pytest.approx((end - start) * scale, abs=0.02))


@sampled(2)
@pytest.mark.parametrize(
    ("schedule", "shown", "width"),
    [
        (one_f_one_b(4, 8), 64, 1000),
        (one_f_one_b(16, 64), 2048, 3000),
        (split_backward(interleaved_1f1b(16, 64)), 16 * 64 * 6, 5000),
        (one_f_one_b(64, 512), 0, 2600),
    ],
)
def test_labels_are_drawn_only_where_there_is_room(schedule, shown, width):
    root = ElementTree.fromstring(svg({"": spans(schedule, Costs())}))
    labels = [one for one in root.iter(f"{SVG}text") if one.get("pointer-events")]
    assert len(labels) == shown
    assert width / 2 < float(root.get("width")) < width


def test_two_timelines_have_one_scale_and_each_begins_at_zero():
    simulated = list(spans(gpipe(2, 3), Costs()))
    measured = [Span(rank, action, 2 * start + 100, 2 * end + 100) for rank, action, start, end in simulated]
    found = list(cells(ElementTree.fromstring(svg({"simulated": simulated, "measured": measured}))))
    for (_, x, width), (_, y, wide) in zip(found[: len(simulated)], found[len(simulated) :], strict=True):
        assert (y, wide) == (pytest.approx(2 * x, abs=0.02), pytest.approx(2 * width, abs=0.02))


def test_marked_spans_have_a_frame():
    timeline = list(spans(gpipe(2, 3), Costs()))
    picture = svg({"": timeline}, marked={"these <3>": timeline[2:5]})
    assert picture.count('stroke-width="2"') == 3
    assert "these &lt;3&gt;" in picture


def test_names_are_escaped():
    name = '<b> & "c" \x00 \ud800'
    shown = [one.text for one in ElementTree.fromstring(svg({name: []})).iter(f"{SVG}text")]
    assert '<b> & "c" \ufffd \ufffd' in shown
    assert json.loads(trace({name: []}))["traceEvents"][0]["args"]["name"] == name


@settings(deadline=None)
@given(orders())
def test_the_drawn_memory_is_the_simulated_memory(case):
    schedule, graph = case
    drawn = make_strip(spans(schedule, Costs(), graph), map(schedule.placement.stages_on, range(schedule.ranks)))
    for sizes in (None, Sizes(activation=5, inputs=2, residual=3)):
        peaks = simulate(schedule, Costs(), graph, sizes).peak_memory
        for rank, peak in enumerate(peaks):
            levels = [level for _, level in drawn.memory_levels(rank, sizes)]
            assert max(levels) == pytest.approx(peak)
            assert levels[-1] == pytest.approx(0)


def test_waits_are_drawn_in_their_own_style():
    picture = svg({"measured": WAITED})
    assert "0RECV_B0&lt;1 on rank 0, 1 to 5.4: wait for a transfer</title>" in picture
    assert picture.count(f'fill="{WAIT.color}"') == 3 + 1, "and in the legend"
    assert picture.count(">wait for a transfer</text>") == 1
    assert ">-0<" not in picture, "no label"
    wait = Span(0, parse("2RECV_B0<3"), 1, 4)
    picture = svg({"measured": [Span(0, F(0, 0), 0, 1), wait, Span(0, F(2, 0), 4, 5)]})
    drawn = [cell for cell in ElementTree.fromstring(picture).iter(f"{SVG}rect") if cell.get("fill") == WAIT.color]
    assert len(drawn) == 2, "the same on every stage"
    assert not any(cell.get("stroke") for cell in drawn)
    assert WAIT.name not in svg({"": [span for span in WAITED if not span.waits]})
    assert [event["cat"] for event in events(trace({"": WAITED}), "X")] == ["F", "wait", "B", "wait", "F", "B", "wait"]
    assert legend(["F", "RECV_F", "WAIT_B"]) == "F forward   - wait for a transfer"
    assert text(gpipe(1, 1)) == texts({"": spans(gpipe(1, 1), Costs())})


def test_timelines_with_invalid_times_are_refused():
    for start, end in ((0, inf), (nan, 1), (2, 1)):
        with pytest.raises(TimelineError, match=r"rank 3, 0F0: got start .* expected finite numbers"):
            svg({"": [Span(3, F(0, 0), start, end)]})
        with pytest.raises(TimelineError):
            trace({"": [Span(3, F(0, 0), start, end)]})


def test_every_kind_of_compute_action_has_its_own_style():
    assert set(LOOKS) == {kind for kind, word in KINDS.items() if not word.mark}
    looks = [(look.letter + look.joint) for look in LOOKS.values()]
    assert len(set(looks)) == len(looks)
    for paint in (shade, lambda kind, lightness: ansi("", shade(kind, lightness))):
        assert len({paint(kind, 0) for kind in LOOKS}) == len(LOOKS)
    assert legend(["B", "X"]) == "B backward   X X"


# ----------------------------------------------- A trace has an event for every action and an arrow for every transfer


@settings(deadline=None)
@given(st.dictionaries(NAMES, timelines(), max_size=3))
def test_any_timelines_make_a_trace_with_an_event_for_each_action(given_):
    picture = trace(given_)
    assert [event["args"]["name"] for event in events(picture, "M") if event["name"] == "process_name"] == list(given_)
    complete = events(picture, "X")
    for pid, timeline in enumerate(given_.values()):
        begin = min((span.start for span in timeline), default=0)
        found = [(e["tid"], e["name"], e["ts"] / 1000, e["dur"] / 1000) for e in complete if e["pid"] == pid]
        below = 1 + max((span.rank for span in timeline), default=0)  # the first thread of collectives
        said = [
            (rank + below * (action.kind in BESIDE), str(action), start - begin, end - start)
            for rank, action, start, end in timeline
        ]
        assert sorted(found) == [tuple(map(_close, row)) for row in sorted(said)]


def _close(value):
    return pytest.approx(value) if isinstance(value, float) else value


@settings(deadline=None)
@given(orders())
def test_arrows_of_a_trace_are_the_transfers(case):
    schedule, graph = case
    timeline = list(spans(schedule, Costs(G=1, U=1), graph))
    picture = trace({"a": timeline}, graph)
    starts, ends = events(picture, "s"), events(picture, "f")
    assert [one["id"] for one in starts] == [one["id"] for one in ends]
    assert len({one["id"] for one in starts}) == len(starts)
    found = sorted((at(timeline, start), at(timeline, end)) for start, end in zip(starts, ends, strict=True))
    assert found == sorted(transfers(timeline, graph))


def at(timeline, event):
    """Return the action that contains the end of an arrow."""
    (found,) = (
        str(action)
        for rank, action, start, end in timeline
        if rank == event["tid"] and event["cat"] == KINDS[action.kind].crosses
        if start * 1000 <= event["ts"] < end * 1000
    )
    return found


def transfers(timeline, graph):
    """Yield the pairs of actions between which a value crosses ranks, as `replay` says."""
    makers = {(output_of(span.action), span.action.slice): span for span in timeline if KINDS[span.action.kind].crosses}
    for span in timeline:
        for token in inputs_of(span.action, graph):
            maker = makers.get((token, span.action.slice))
            if maker and token[1] != span.action.stage and maker.rank != span.rank:
                yield str(maker.action), str(span.action)


def test_a_text_fits_the_terminal(monkeypatch):
    how = one_f_one_b(2, 8)
    unbroken = text(how)
    monkeypatch.setattr(lines_module, "sys", SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: True)))
    monkeypatch.setenv("COLUMNS", "40")
    for fitting in (text(how), str(how), texts({"": list(spans(how, Costs()))})):
        assert max(map(len, fitting.splitlines())) <= 40
    assert text(how) == text(how, columns=40) != unbroken
    assert text(how, columns=1000) == unbroken


# ------------------------------------------------------------------------------------------------ pictures for print


def list_objects(file):
    """Return the objects of a PDF by number, found by its table of places."""
    start = int(re.search(rb"startxref\n(\d+)\n%%EOF\n$", file)[1])
    places = [int(line[:10]) for line in file[start:].split(b"\n") if line.endswith(b" 00000 n ")]
    assert file[start:].startswith(b"xref\n0 %d\n" % (len(places) + 1))
    pairs = enumerate(places, 1)
    return [re.match(rb"%d 0 obj\n(.*?)\nendobj\n" % k, file[place:], re.DOTALL)[1] for k, place in pairs]


@settings(deadline=None)
@given(st.dictionaries(NAMES, timelines(), max_size=3), st.booleans(), st.sampled_from(["color", "gray"]))
def test_pictures_for_print_have_the_marks_of_the_one_for_screens(given_, memory, palette):
    style = Style(palette=palette)
    root = ElementTree.fromstring(svg(given_, memory, style=style))
    boxes, words, curves = (len([*root.iter(f"{SVG}{tag}")]) for tag in ("rect", "text", "path"))
    drawn = draw(given_, memory, style=style).tikz().splitlines()
    assert sum(" rectangle " in line for line in drawn) == boxes
    assert sum(line.startswith(r"\node[") for line in drawn) == words
    assert sum(" -- " in line and line.startswith(r"\path[") for line in drawn) == curves
    defined = {line.split("{")[1][:-1] for line in drawn if line.startswith(r"\definecolor")}
    assert {*re.findall(r"\bc\d+\b", "".join(line for line in drawn if line[:5] in ("\\path", "\\node")))} >= defined
    for line in drawn:
        bare = re.sub(r"\\[{}]", "", line)
        assert bare.count("{") == bare.count("}"), line
    page, content = list_objects(draw(given_, memory, style=style).pdf())[2:4]
    size = f"{float(root.get('width')):.2f} {float(root.get('height')):.2f}"
    assert size.encode() in page
    length, stream = re.match(rb"<</Length (\d+)>>\nstream\n(.*)\nendstream$", content, re.DOTALL).groups()
    assert int(length) == len(stream)
    assert stream.count(b") Tj ET") == words
    assert len(re.findall(rb" re [fS]\b", stream)) >= boxes - 1 - sum(not one.get("fill") for one in root)


def test_a_pdf_has_everything_where_the_screen_has_it():
    drawn = draw({"": list(spans(one_f_one_b(2, 3), Costs()))}, memory=True)
    stream = drawn.pdf().decode("ascii")
    for element in ElementTree.fromstring(drawn.svg()):
        x, y, wide, high = (float(element.get(name, "nan").rstrip("%")) for name in ("x", "y", "width", "height"))
        if element.tag == f"{SVG}rect" and element.get("x"):
            found = [tuple(map(float, one.split())) for one in re.findall(r"([-.0-9 ]+) re", stream)]
            assert any(one[-4:] == pytest.approx((x, drawn.high - y - high, wide, high), abs=0.011) for one in found)
        if element.tag == f"{SVG}text":
            found = [float(one) for one in re.findall(rf"([-.0-9]+) Td \({re.escape(element.text or '')}\)", stream)]
            assert any(one == pytest.approx(drawn.high - y, abs=0.011) for one in found)


def test_text_is_escaped_for_print():
    timeline = {r"50 % of {a_b} (\n) é": list(spans(gpipe(1, 1), Costs()))}
    assert r"50 \% of \{a\_b\} (\textbackslash{}n) é" in draw(timeline).tikz()
    assert rb"(50 % of {a_b} \(\\n\) ?) Tj" in draw(timeline).pdf()


def test_a_window_shows_the_actions_in_it():
    timeline = list(spans(one_f_one_b(2, 4), Costs(B=2)))
    root = ElementTree.fromstring(svg({"": timeline}, width=LEFT + 48 + 400, style=Style(window=(2, 6))))
    found = {title.partition(",")[0]: (x, width) for title, x, width in cells(root)}
    assert found.keys() == {f"{one.action} on rank {one.rank}" for one in timeline if one.end > 2 and one.start < 6}
    for rank, action, start, end in timeline:
        if start < 6 and end > 2:
            x, width = (max(start, 2) - 2) * 100, (min(end, 6) - max(start, 2)) * 100
            assert found[f"{action} on rank {rank}"] == (pytest.approx(x), pytest.approx(width))
    ticks = [one.text for one in root.iter(f"{SVG}text") if one.get("font-size") == "9"]
    assert (ticks[0], ticks[-1]) == ("2", "6")


def test_labels_and_palettes_can_be_chosen():
    timeline = {"": list(spans(interleaved_1f1b(2, 2), Costs()))}

    def labels(style):
        root = ElementTree.fromstring(svg(timeline, style=style))
        return {one.text for one in root.iter(f"{SVG}text") if one.get("pointer-events")}

    assert labels(Style()) >= {"0F0", "3B1"}
    assert labels(Style(labels="microbatch")) == {"0", "1"}
    assert labels(Style(labels="none")) == set()
    gray = svg(timeline, style=Style(palette="gray"))
    colors = {one for one in re.findall(r"#[0-9a-f]{6}", gray) if len({one[1:3], one[3:5], one[5:]}) > 1}
    assert not colors
    bars = [one for one in ElementTree.fromstring(gray).iter(f"{SVG}rect") if one.get("fill") == "#000000"]
    assert len(bars) == 2 * 2 * 2  # the passes of the later stage of each rank
    assert "longer bar: a later stage of the rank" in gray


@pytest.mark.parametrize("wrong", [{"window": (3, 3)}, {"window": (-1, 2)}, {"labels": "all"}, {"palette": "print"}])
def test_wrong_styles_are_refused(wrong):
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        Style(**wrong)
