# SPDX-License-Identifier: Apache-2.0
"""An SVG picture shows every action at its time, waits in their own style, and the simulated memory."""

import json
import re
from itertools import combinations
from math import inf, nan
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    Costs,
    F,
    Sizes,
    Span,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    parse,
    simulate,
    spans,
    split_backward,
)
from schedules.drawing import ansi, legend, svg, text, texts, trace
from schedules.drawing.palette import LOOKS, WAIT, shade
from schedules.drawing.strips import make_strip
from schedules.errors import TimelineError
from schedules.language.actions import KINDS
from schedules.testing import orders
from tests.common.timelines import NAMES, WAITED, events, timelines

SVG = "{http://www.w3.org/2000/svg}"


def cells(element):
    """Yield the title, x and width of each rectangle that is an action."""
    for cell in element.iter(f"{SVG}rect"):
        for title in cell.iter(f"{SVG}title"):
            yield title.text, float(cell.get("x")), float(cell.get("width"))


def areas(root):
    """Yield the panel and the corners of each cell, except cells without duration."""
    for panel in root.iter(f"{SVG}g"):
        for cell in panel.iter(f"{SVG}rect"):
            x, y, width, height = (float(cell.get(name)) for name in ("x", "y", "width", "height"))
            if list(cell) and cell.get("stroke"):
                yield panel, x, y, x + width, y + height


def overlap(one, other):
    (panel, left, top, right, bottom), (another, x, y, x_end, y_end) = one, other
    tiny = 0.03  # two digits are kept
    beside = x >= right - tiny or x_end <= left + tiny or y >= bottom - tiny or y_end <= top + tiny
    return panel is another and not beside


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
@given(orders())
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
