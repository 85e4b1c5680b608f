# SPDX-License-Identifier: Apache-2.0
"""Pages of timelines, looked at in a browser: what they draw, say and find, and what edits of the order come to."""

import io
import json
import random
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    B,
    Costs,
    F,
    Graph,
    PipelineError,
    Problem,
    ScheduleError,
    Sizes,
    Span,
    bound,
    chain,
    check,
    chimera,
    connect,
    critical_path,
    dag,
    dualpipe,
    from_rows,
    gpipe,
    interleaved_1f1b,
    linear,
    lower,
    memory_over_time,
    offload,
    one_f_one_b,
    parse,
    pipedream,
    pipedream_2bw,
    recompute,
    reduce_gradients,
    schedule,
    seq_1f1b,
    shard,
    simulate,
    spans,
    update_weights,
    zb_h1,
    zb_v,
)
from schedules.drawing import Panel, page, read_trace, sketch, trace
from schedules.errors import TimelineError
from schedules.files import read_csv
from schedules.language.schedule import Limits
from schedules.playing.rows import edit
from schedules.testing import orders
from tests.common.browser import Browser, needs_browser
from tests.common.command_line import answer
from tests.common.rows import stays_on_the_device
from tests.common.sizes import NIGHTLY, few
from tests.common.timelines import timelines

COSTS = Costs(F=1, B=2.5, I=1.25, W=0.75, comm=0.25, UNSHARD=0.5, REDUCE_GRAD=0.5, U=0.25, G=0.5)
TIED = Graph(3, chain(3).values, chain(3).values, frozenset({(0, 2), (2, 0)}))
SLICED = "0F0.0 0F0.1 0B0.1 0B0.0 0U0 0F1.0 0F1.1 0B1.1 0B1.0 0U1 0F2.0 0F2.1 0B2.1 0B2.0 0U2"
FAMILIES = [
    gpipe(3, 4),
    one_f_one_b(4, 6),
    interleaved_1f1b(2, 4, chunks=2),
    zb_h1(4, 6),
    zb_v(3, 6),
    dualpipe(4, 8),
    seq_1f1b(2, 4, slices=2),
    pipedream(3, 6),
    pipedream_2bw(3, 12, accumulate=3),
    shard(one_f_one_b(3, 4), limit=1),
    recompute(one_f_one_b(3, 4), stages=(0, 1)),
    update_weights(one_f_one_b(3, 4)),
    reduce_gradients(chimera(2, 4)),
    update_weights(reduce_gradients(shard(one_f_one_b(3, 4), limit=1))),
    update_weights(reduce_gradients(chimera(2, 4))),
    update_weights(connect(gpipe(3, 3), TIED)),
    update_weights(reduce_gradients(connect(gpipe(3, 3), TIED))),
    from_rows((tuple(map(parse, SLICED.split())),), linear(1), microbatches=3, slices=2),
    connect(gpipe(3, 3), dag(3, {(0, 2), (1, 2)})),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


@pytest.fixture
def show(browser, tmp_path):
    """Open a page of panels; afterwards nothing may have been wrong."""

    def opened(panels, fragment=""):
        browser.open(page(panels), tmp_path / "page.html", fragment)
        return browser

    browser.problems.clear()
    yield opened
    assert browser.problems == []


def place_of(browser, text):
    """Where an action is on the screen."""
    return browser.ask(
        f"(() => {{ const p = panels[0], a = p.byText.get('{text}'), box = canvas.getBoundingClientRect();"
        "return [box.x + (xOf(p, a.start) + xOf(p, a.end)) / 2, box.y + yOf(p, a.rank) + lanesOf(p).work / 2]; })()"
    )


# -------------------------------------------------------------------------------------------------------- the file


def test_names_of_users_are_harmless():
    name = "</script><script>alert(1)</script><!--"
    document = page({name: Panel(gpipe(2, 2))})
    assert document.count("</script>") == document.count("<script") == 2
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', document, re.DOTALL)
    assert json.loads(data[1])["panels"][0]["name"] == name
    assert "&lt;/script&gt;" in re.search("<title>.*</title>", document)[0]


def test_a_name_that_is_no_unicode_makes_a_page():
    assert "<title>?\N{SNOWMAN}</title>" in page({"\ud800\N{SNOWMAN}": Panel(gpipe(2, 2))}).encode().decode()


def test_a_page_asks_for_nothing_from_elsewhere():
    document = page({"gpipe": Panel(gpipe(2, 2))})
    assert not re.search(r"https?:|src=|@import|url\(|fetch\(|XMLHttpRequest", document)
    assert "default-src 'none'" in document


def test_the_bound_is_one_for_the_memory_in_which_the_schedule_fits():
    one, costs = one_f_one_b(4, 8), Costs(F=1, B=2, comm=3)
    panels = {"fits": Panel(one, costs, memory=4), "exceeds": Panel(one, costs, memory=3), "any": Panel(one, costs)}
    data = re.search(r'id="data">(.*?)</script>', page(panels), re.DOTALL)[1]
    fits, exceeds, unlimited = (panel["bound"]["time"] for panel in json.loads(data)["panels"])
    assert fits == bound(Problem(costs, one.placement, 8, 4, split=False)).makespan > unlimited
    assert exceeds == unlimited


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: page({"it": gpipe(2, 2)}), "panels[0]: got gpipe(ranks=2, microbatches=2), expected each to be of"),
        (lambda: page({3: Panel(gpipe(2, 2))}), "names[0]: got 3, expected each to be of type str"),
        (lambda: Panel(gpipe), "Panel: got schedule=schedules.families"),
        (
            lambda: Panel(gpipe(2, 2), memory=(1,)),
            "Panel: got memory=(1,), expected a number of at least 0, or a tuple of 2",
        ),
        (lambda: Panel(gpipe(2, 2), memory=-1), "Panel: got memory=-1, expected"),
        (
            lambda: record(Span(2, F(0, 0), 0, 1)),
            "got 0F0 of rank 2, expected ranks below 2. Pass the schedule that ran.",
        ),
        (lambda: record(Span(1, F(0, 0), 0, 1)), "rank 1, position 0, 0F0: stage 0 lives on rank 0"),
        (lambda: record(Span(0, F(0, 7), 0, 1)), "rank 0, position 0, 0F7: microbatch 7 does not exist"),
        (lambda: record(*[Span(0, F(0, 0), 0, 1)] * 2), "rank 0: got 0F0 twice, expected one step"),
        (lambda: record(Span(0, F(0, 0), 1, 0)), "got start 1 and end 0, expected finite numbers"),
    ],
)
def test_what_makes_no_page_is_refused(make, words):
    with pytest.raises(PipelineError) as caught:
        make()
    assert words in str(caught.value)


def record(*made):
    return page({"it": Panel(gpipe(2, 2), recorded=made)})


def test_a_page_of_a_wrong_schedule_is_refused():
    wrong = from_rows(((F(0, 0),),), gpipe(1, 1).placement, 1)
    with pytest.raises(ScheduleError, match="complete"):
        page({"wrong": Panel(wrong)})


@needs_browser
def test_a_name_with_a_script_is_shown_as_text(show):
    name = "</script><img src=x onerror=alert(1)>"
    browser = show({name: Panel(gpipe(2, 2))})
    assert browser.ask("document.querySelector('h1').textContent") == name
    assert browser.ask("document.querySelectorAll('img').length") == 0


# -------------------------------------------------------------------------------------------------------- the chart


@needs_browser
@pytest.mark.parametrize("one", FAMILIES, ids=lambda one: one.factory.__name__)
def test_the_page_has_the_times_memory_and_critical_path_of_the_simulation(show, one):
    browser = show({"it": Panel(one, COSTS)})
    totals = simulate(one, COSTS)
    assert browser.ask("panels[0].makespan") == pytest.approx(totals.makespan)
    assert browser.ask("panels[0].bubble") == pytest.approx(totals.bubble)
    curves = memory_over_time(spans(one, COSTS), one)
    most = [max((level for _, level in curve), default=0) for curve in curves]
    assert browser.ask("panels[0].memory.map((one) => one.peak)") == pytest.approx(most)
    path = browser.ask("panels[0].critical.map((a) => [a.start, a.end])")
    assert path[0][0] == 0
    assert path[-1][1] == pytest.approx(totals.makespan)
    gaps = {round(after[0] - before[1], 6) for before, after in pairwise(path)}
    assert gaps <= {0, COSTS.comm}
    assert len(path) == len(critical_path(one, COSTS).stretches) or one.factory.__name__ != "one_f_one_b"


@needs_browser
def test_every_action_is_drawn_where_it_runs(show):
    one = interleaved_1f1b(4, 8, chunks=2)
    browser = show({"it": Panel(one, COSTS)})
    drawn = browser.ask(
        "(() => { let count = 0; const plain = ctx.fillRect.bind(ctx);"
        "const colors = new Set(panels[0].rows.flat().map((a) => colorOf(panels[0], a)));"
        "ctx.fillRect = (...place) => { count += colors.has(ctx.fillStyle); plain(...place); };"
        "view.transfers = view.memory = false; draw(); delete ctx.fillRect; return count; })()"
    )
    assert drawn == sum(1 for rank in range(4) for _ in one.actions(rank))


@needs_browser
def test_cells_of_a_size_have_labels_of_a_kind(show):
    browser = show({"it": Panel(interleaved_1f1b(8, 16, chunks=2), Costs(F=1, B=2, comm=0.1))})
    labels = browser.ask(
        "(() => { const seen = []; ctx.fillText = (text) => seen.push(text); draw(); delete ctx.fillText;"
        "return seen; })()"
    )
    actions = [text for text in labels if re.fullmatch(r"\d+|\d*[FB]\d+", text)]
    assert len(actions) > 250
    assert all(text.isdigit() for text in actions)  # and none is 3F4
    browser.ask("(zoom(4), draw())")
    assert browser.ask("STYLES.find(([form, font]) => panels[0].longest[form] * font * 0.61 <= scale())[0]") == 0


@needs_browser
def test_numbers_are_short(show):
    browser = show({"it": Panel(gpipe(2, 2))})
    shown = browser.ask("[number(1 / 3), number(33), number(1234567.8), number(0.0123456, 's'), number(8e10, 'B')]")
    assert shown == ["0.333333", "33", "1234570", "12.35 ms", "80 GB"]
    assert browser.ask("[percent(-0.0004), percent(-0.101), percent(0)]") == ["+0.0 %", "\u221210.1 %", "+0.0 %"]
    assert browser.ask("[number(0, 's'), number(2e-9, 's'), number(3e-12, 's')]") == ["0 s", "2 ns", "0.003 ns"]


@needs_browser
def test_all_rows_are_in_sight_at_first(show):
    browser = show({"it": Panel(zb_v(8, 16), COSTS), "other": Panel(interleaved_1f1b(8, 16, chunks=2), COSTS)})
    assert browser.ask("yOf(panels[1], 8) <= size.height && size.height === canvas.clientHeight")
    assert browser.ask("[panels[0], panels[1]].every((one) => xOf(one, one.end) <= size.width - RIGHT)")


@needs_browser
def test_narrow_actions_are_drawn_as_pixels(show):
    browser = show({"it": Panel(one_f_one_b(8, 512), COSTS)})
    color = browser.ask("(() => { draw(); return [...ctx.getImageData(600, yOf(panels[0], 3) + 5, 1, 1).data]; })()")
    blue, green = (0x56, 0xB4, 0xE9), (0x45, 0xC4, 0x84)
    assert all(min(pair) - 2 <= one <= max(pair) + 12 for one, *pair in zip(color, blue, green, strict=False))


@needs_browser
def test_gaps_are_light_until_their_input_is_made_and_dark_in_its_transfer(show):
    browser = show({"it": Panel(gpipe(2, 2), Costs(F=1, B=2, comm=0.5))})
    colors = browser.ask(
        "(() => { draw(); const y = yOf(panels[0], 1) + lanesOf(panels[0]).work / 2;"
        "const line = ctx.getImageData(0, y, size.width, 1).data, at = (time) => 4 * Math.round(xOf(panels[0], time));"
        "return [0.5, 1.25].map((time) => [...line.slice(at(time), at(time) + 3)]); })()"
    )
    assert colors == browser.ask("[channels(DATA.wait), channels(FLIGHT)]")


@needs_browser
def test_hover_says_why_an_action_waits(show):
    browser = show({"it": Panel(one_f_one_b(4, 8), Costs(F=1, B=2, comm=0.5))})
    browser.pointer("mouseMoved", place_of(browser, "2B0"))
    shown = browser.ask("element('tip').textContent")
    assert shown.startswith("2B0 on rank 2: backward, stage 2, microbatch 0\n8 to 10, takes 2\n")
    assert (
        "idle 3 before it: waits for the cotangent of 3B0 from rank 3: 2.5 until it is made, 0.5 in transfer" in shown
    )
    assert "2B0 waits for 3B0 of rank 3\n3B0 follows 3F0\n3F0 waits for 2F0 of rank 2" in shown
    assert browser.ask("getComputedStyle(element('tip')).display") == "block"


@needs_browser
def test_hover_tells_transfers_and_memory(show):
    browser = show(
        {"it": Panel(one_f_one_b(2, 4), Costs(F=1, B=2, comm=0.5), sizes=Sizes(8, weight=3), memory=30, size="B")}
    )
    x, y = place_of(browser, "0F1")
    below = browser.ask("[lanesOf(panels[0]).work / 2 + 4, view.row - gap() - lanesOf(panels[0]).work / 2 - 3]")
    browser.pointer("mouseMoved", (x, y + below[1]))
    assert browser.ask("element('tip').textContent") == "rank 0 holds 19 B at 1.5\npeak 19 B at 1, limit 30 B"
    x = browser.ask("canvas.getBoundingClientRect().x + xOf(panels[0], 1.25)")
    y += browser.ask("view.row")
    browser.pointer("mouseMoved", (x, y + below[0]))
    assert browser.ask("element('tip').textContent").startswith("value of 0F0: rank 0 to rank 1, for 1F0\n1 to 1.5, ")


@needs_browser
def test_search_goes_to_an_action(show):
    browser = show({"it": Panel(one_f_one_b(16, 64), COSTS)})
    browser.ask("element('query').focus()")
    browser.call("Input.insertText", text="12b40")
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13)
    browser.settle()
    assert browser.ask("element('verdict').textContent").startswith("1 of 1: 12B40 on rank 12: backward")
    x, y = place_of(browser, "12B40")
    assert browser.ask("view.to - view.from") == pytest.approx(12 * 2.5)
    assert abs(x - 600) < 20
    assert 0 < y < 700
    assert "find=12b40" in browser.ask("(writeAddress(), location.hash)")


@needs_browser
def test_wheel_zooms_and_drag_pans(show):
    browser = show({"it": Panel(one_f_one_b(4, 8), COSTS)})
    before = place_of(browser, "1F4")
    wide = browser.ask("view.to - view.from")
    browser.pointer("mouseWheel", before, deltaX=0, deltaY=-500)
    assert browser.ask("view.to - view.from") < wide / 2
    assert place_of(browser, "1F4") == pytest.approx(before, abs=2)
    browser.drag((700, 300), (600, 300))
    assert place_of(browser, "1F4")[0] == pytest.approx(before[0] - 100, abs=2)


@needs_browser
def test_the_view_is_in_the_address(show, browser, tmp_path):
    panels = {"it": Panel(one_f_one_b(4, 8), COSTS)}
    show(panels)
    browser.ask("(view.path = view.edit = true, view.memory = false, zoom(3), edit(0, 1, 3, 4), writeAddress())")
    ends, fragment = browser.ask("[[view.from, view.to, view.row], location.hash]")
    makespan = browser.ask("panels[0].makespan")
    browser.open(page(panels), tmp_path / "again.html", fragment)
    assert browser.ask("[view.from, view.to, view.row]") == pytest.approx(ends, rel=1e-5)
    assert browser.ask("[view.path, view.edit, view.memory, element('path').checked]") == [True, True, False, True]
    assert browser.ask("[panels[0].moved, panels[0].makespan]") == [1, pytest.approx(makespan)]


# ---------------------------------------------------------------------------------------- measured, and side by side


def recorded():
    """A measured step of gpipe(2, 1): rank 1 waits 1 for the work of rank 0 and 0.5 for the transfer."""
    times = {"0F0": (0, 1), "1F0": (1.5, 2.5), "1B0": (2.5, 5), "0B0": (5.75, 8)}
    made = [Span(parse(text).stage, parse(text), *ends) for text, ends in times.items()]
    return (*made, Span(1, parse("1RECV_F0<0"), 0, 1.5), Span(0, parse("0RECV_B0<1"), 1, 5.25))


@needs_browser
def test_measured_waits_are_split_from_transfers(show):
    one = gpipe(2, 1)
    browser = show({"measured": Panel(one, COSTS, recorded=recorded(), time="s"), "predicted": Panel(one, COSTS)})
    told = "explain(panels[0], panels[0].byText.get('{}'))[0]"
    waits = "waits for the {} of {} from rank {}: {} until it is made, {} in transfer"
    assert browser.ask(told.format("1F0")).endswith(waits.format("value", "0F0", 0, "1 s", "500 ms"))
    late = waits.format("cotangent", "1B0", 1, "4 s", "250 ms") + ", and 500 ms for other reasons"
    assert browser.ask(told.format("0B0")).endswith(late)
    assert browser.ask("panels[0].transfers.flat().map((one) => [one.sent, one.here])") == [[5, 5.25], [1, 1.5]]
    assert browser.ask("describe(panels[0], panels[0].byText.get('1B0')).at(2)") == (
        "predicted: 1B0 starts at 2.25 s on rank 1, takes 2.5 s"
    )


@needs_browser
def test_two_orders_are_compared_action_by_action(show):
    one = one_f_one_b(3, 6)
    rows = [list(one.actions(rank)) for rank in range(3)]
    rows[0][2:4] = rows[0][3:1:-1]  # 0F2 and 0B0
    browser = show({"it": Panel(one, COSTS), "other": Panel(edit(one, rows), COSTS)})
    moved = browser.ask("panels[1].rows.flat().filter((a) => panels[1].isMoved(a)).map((a) => a.text)")
    assert moved == ["0B0", "0F2", "0F3"]
    browser.ask("(element('color').value = 'change', element('color').dispatchEvent(new Event('change')))")
    assert browser.ask("panels[1].change(panels[1].byText.get('0F2'))") > 0
    assert browser.ask("colorOf(panels[1], panels[1].byText.get('0F0'))") == "#e8e8e8"
    assert "earlier than in the other" in browser.ask("element('legend').textContent")


# -------------------------------------------------------------------------------------------------------- the editor


@needs_browser
def test_a_legal_drag_is_correct_and_timed(show):
    one = gpipe(3, 4)
    browser = show({"it": Panel(one, COSTS)}, "#show=transfers memory edit kind")
    start, end = place_of(browser, "1B0"), place_of(browser, "1B1")
    browser.drag(start, (end[0] + 9, end[1]))
    rows = [list(one.actions(rank)) for rank in range(3)]
    rows[1].insert(5, rows[1].pop(4))
    assert browser.ask("panels[0].rows[1].map((a) => a.text)") == [*map(str, rows[1])]
    takes, before = (simulate(order, COSTS).makespan for order in (edit(one, rows), one))
    assert browser.ask("panels[0].makespan") == pytest.approx(takes)
    assert browser.ask("[element('verdict').className, element('verdict').textContent]") == [
        "right",
        f"it: correct; takes {takes:g}, +{100 * (takes / before - 1):.1f} % against the order before the edits",
    ]
    browser.ask("element('undo').click()")
    assert browser.ask("panels[0].rows[1].map((a) => a.text)") == [*map(str, one.actions(1))]
    assert browser.ask("panels[0].makespan") == pytest.approx(before)


@needs_browser
def test_the_verdict_follows_the_pointer(show):
    browser = show({"it": Panel(gpipe(3, 4), COSTS)}, "#show=transfers memory edit kind")
    start, first, second = (place_of(browser, name) for name in ("1B0", "1F0", "1B1"))
    browser.pointer("mouseMoved", start)
    browser.pointer("mousePressed", start, buttons=1)
    browser.pointer("mouseMoved", (first[0] - 30, first[1]), buttons=1)
    assert browser.ask("element('verdict').textContent").endswith(
        "1B0: comes before 1F0 [rule: forward_before_backward]"
    )
    browser.pointer("mouseMoved", (second[0] + 9, second[1]), buttons=1)
    shown = browser.ask("element('verdict').textContent")
    assert browser.ask("view.moves.length") == 0
    browser.pointer("mouseReleased", (second[0] + 9, second[1]))
    assert shown == browser.ask("element('verdict').textContent") != ""
    assert browser.ask("view.moves") == [[0, 1, 4, 5]]


@needs_browser
def test_an_action_can_be_dragged_to_the_end_of_its_row(show):
    one = gpipe(2, 4)
    browser = show({"it": Panel(one, COSTS)}, "#show=transfers memory edit kind")
    start, end = place_of(browser, "1B0"), place_of(browser, "1B3")
    browser.drag(start, (end[0] + 30, end[1]))
    assert browser.ask("panels[0].rows[1].at(-1).text") == "1B0"


@needs_browser
def test_an_illegal_drag_is_told_with_its_rule(show):
    browser = show({"it": Panel(gpipe(3, 4), COSTS)}, "#show=transfers memory edit kind")
    start, end = place_of(browser, "1B0"), place_of(browser, "1F0")
    browser.drag(start, (end[0] - 30, end[1]))
    assert browser.ask("panels[0].rows[1][0].text") == "1B0"
    assert browser.ask("[element('verdict').className, element('verdict').textContent]") == [
        "wrong",
        "it: rank 1, position 0, 1B0: comes before 1F0 [rule: forward_before_backward]",
    ]


@needs_browser
def test_an_order_in_which_ranks_wait_for_each_other_is_told(show):
    browser = show({"it": Panel(gpipe(2, 2), COSTS)})
    browser.ask("edit(0, 0, 1, 2)")
    assert browser.ask("element('verdict').textContent") == (
        "it: rank 0, position 1, 0B0: the ranks wait for each other: rank 0 at 0B0 needs 1B0, rank 1 at 1F1 needs 0F1 "
        "[rule: ordered]"
    )


def with_limits(edited, one):
    """The edited schedule with the limits of the one that it was."""
    memory, versions = one.limits.memory, one.limits.versions
    found = Limits(memory and (lambda rank, **_: one.memory(rank)), versions and (lambda rank, **_: one.versions(rank)))
    return replace(edited, limits=found)


def draw_edits(one, graph, random, count):
    """Draw moves within rows, most of them short, with the verdict on each and its makespan."""
    rows = [list(one.actions(rank)) for rank in range(one.ranks)]
    for _ in range(count):
        moves, edited = [], [list(row) for row in rows]
        for _ in range(random.choice([1, 1, 2, 3])):
            rank = random.choice([rank for rank, row in enumerate(rows) if row])
            start, last = random.randrange(len(rows[rank])), len(rows[rank]) - 1
            short = random.random() < 0.7
            end = start + random.choice([-3, -2, -1, 1, 2, 3]) if short else random.randrange(last + 1)
            moves.append([rank, start, min(max(0, end), last)])
            edited[rank].insert(moves[-1][2], edited[rank].pop(start))
        yield moves, *judge(with_limits(edit(one, edited), one), graph)


def judge(edited, graph):
    try:
        check(edited, graph)
    except ScheduleError as error:
        return [error.rule, error.rank, error.position, None if error.action is None else str(error.action)], None
    return None, simulate(edited, COSTS, graph).makespan


@needs_browser
@pytest.mark.parametrize("one", FAMILIES, ids=lambda one: one.factory.__name__)
def test_the_page_judges_edits_as_the_checker_does(show, one):
    cases = [*draw_edits(one, one.graph, random.Random(0), 10_000 // len(FAMILIES) + 1 if NIGHTLY else 150)]
    require_same_verdicts(show({"it": Panel(one, COSTS)}), cases)


def test_schedules_that_move_memory_are_refused():
    with pytest.raises(TimelineError, match="moves memory off the device"):
        page({"it": Panel(offload(one_f_one_b(4, 8)))})


@needs_browser
@settings(max_examples=few(30))
@given(orders(ranks=3, stages=5, microbatches=3).filter(stays_on_the_device), st.randoms(use_true_random=False))
def test_the_page_judges_edits_of_any_order_as_the_checker_does(browser, tmp_path_factory, drawn, source):
    one, graph = drawn
    browser.open(page({"it": Panel(one, COSTS, graph)}), tmp_path_factory.mktemp("orders") / "page.html")
    require_same_verdicts(browser, [*draw_edits(one, graph, source, 50)])


def require_same_verdicts(browser, cases):
    judged = browser.ask(
        f"{json.dumps([moves for moves, _, _ in cases])}.map((moves) => {{ const it = panels[0]; it.reorder(moves);"
        "const v = it.violation; return v ? [[v.rule, v.rank, v.position, v.action], null] : [null, it.makespan]; })"
    )
    for (moves, verdict, makespan), found in zip(cases, judged, strict=True):
        assert found == [verdict, makespan and pytest.approx(makespan)], moves


@needs_browser
@pytest.mark.parametrize("one", FAMILIES, ids=lambda one: one.factory.__name__)
def test_exports_are_read_back(show, one):
    browser = show({"it": Panel(one, COSTS)})
    rows = [[*map(str, one.actions(rank))] for rank in range(one.ranks)]
    read = read_csv(io.StringIO(browser.ask("writeTable(panels[0])")))
    names = {}
    exec(browser.ask("writePython(panels[0])"), names)
    for found in (read, names["edited"]):
        assert [[*map(str, found.actions(rank))] for rank in range(one.ranks)] == rows
        assert found.graph == one.graph
    check(names["edited"])
    assert names["edited"].placement == one.placement
    assert lower(names["edited"]).channels == lower(one).channels


# -------------------------------------------------------------------------------------------------------- pictures

PICTURES = {
    "small": ({"it": Panel(one_f_one_b(4, 8), COSTS, memory=5)}, "#show=path transfers memory kind"),
    "large": ({"it": Panel(one_f_one_b(128, 512), COSTS)}, ""),
    "difference": (
        {"it": Panel(zb_v(4, 8), COSTS), "other": Panel(zb_h1(4, 8), COSTS)},
        "#show=transfers memory change",
    ),
    "edit": ({"it": Panel(gpipe(4, 8), COSTS)}, "#show=transfers memory edit kind&moves=0.1.9.12"),
}


@needs_browser
@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_taken(show, tmp_path, name):
    """Look at them: pytest --basetemp=/tmp/pages -k pictures."""
    browser = show(*PICTURES[name])
    browser.picture(tmp_path / f"{name}.png")
    data = (tmp_path / f"{name}.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 20_000  # an empty page has 5,000


@needs_browser
def test_every_version_of_weights_that_is_kept_counts(show):
    one, sizes = pipedream(3, 6), Sizes(activation=2, weight=5)
    browser = show({"it": Panel(one, COSTS, sizes=sizes)})
    assert browser.ask("panels[0].memory.map((one) => one.peak)") == [*simulate(one, COSTS, sizes=sizes).peak_memory]


# -------------------------------------------------------------------------------------------------------- large


@needs_browser
def test_a_hundred_thousand_actions_are_shown(show):
    browser = show({"it": Panel(one_f_one_b(128, 512), COSTS)})
    assert browser.ask("panels[0].rows.flat().length") == 2 * 128 * 512
    assert browser.ask("panels[0].makespan") == pytest.approx(simulate(one_f_one_b(128, 512), COSTS).makespan)


def test_a_page_of_a_schedule_of_ones_own_that_deadlocks_is_refused():
    @schedule()
    def impatient(rank, ranks, microbatches):
        yield F(rank, 0)

    with pytest.raises(ScheduleError):
        page({"it": Panel(impatient(2, 1))})


# -------------------------------------------------------------------------------------------------------- commands


def test_the_command_writes_a_page_of_one_schedule_or_several(capsys, tmp_path):
    path = tmp_path / "page.html"
    code, out, _ = answer(capsys, "page", "gpipe", "zb_v", "--ranks", 2, "--microbatches", 2, "--output", path)
    assert (code, out) == (0, f"wrote {path}\n")
    one, other = panels_of(path)
    assert (one["name"], other["name"]) == ("gpipe", "zb_v")
    assert max(map(max, one["ends"])) == 9  # a rank's whole share takes 3 for each microbatch, for all alike
    assert max(map(max, other["ends"])) == simulate(zb_v(2, 2), Costs(F=0.5, I=0.5, W=0.5)).makespan


def test_the_command_draws_the_limit_of_memory_and_the_bound(capsys, tmp_path):
    path = tmp_path / "page.html"
    code, _, _ = answer(capsys, "page", "one_f_one_b", "--ranks", 2, "--memory", 3, "--B", 2, "--output", path)
    (one,) = panels_of(path)
    assert (code, one["caps"], one["bound"]["time"]) == (0, [3, 3], 27)


def test_the_command_puts_a_measured_step_over_its_prediction(capsys, tmp_path):
    measured, path = tmp_path / "trace.json", tmp_path / "page.html"
    measured.write_text(trace({"step": recorded()}, microseconds=1e6))
    code, _, err = answer(
        capsys, "page", "gpipe", "--ranks", 2, "--microbatches", 1, "--measured", measured, "--output", path
    )
    assert (code, err) == (0, "")
    one, other = panels_of(path)
    assert (one["measured"], other["measured"], one["time"]) == (True, False, "s")
    assert one["waits"] == [[["0RECV_B0<1", 1, 5.25]], [["1RECV_F0<0", 0, 1.5]]]
    assert other["ends"][0][-1] == pytest.approx(0.375 * 2 + 1 + 1 + 2.5 + 2.25)


def test_a_file_that_is_no_trace_is_refused(capsys, tmp_path):
    for text in ("", "{}", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": []}'):
        (tmp_path / "trace.json").write_text(text)
        code, _, err = answer(capsys, "page", "gpipe", "--measured", tmp_path / "trace.json")
        assert code == 2
        assert "expected a trace" in err


def panels_of(path):
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)[1])["panels"]


@given(timelines())
def test_a_trace_is_read_back(made):
    names = {"a": made, "b": []}
    read = read_trace(trace(names))
    assert [(span.rank, span.action) for span in read["a"]] == [(span.rank, span.action) for span in in_order(made)]
    begin = min((span.start for span in made), default=0)
    assert [span.start for span in read["a"]] == pytest.approx(
        [span.start - begin for span in in_order(made)], abs=1e-6
    )
    assert read["b"] == ()


def in_order(made):
    return sorted(made, key=lambda span: (span.rank, span.start, span.end))


# -------------------------------------------------------------------------------------------------------- notebooks


def test_a_notebook_shows_a_schedule_and_its_totals():
    one = gpipe(2, 2)
    assert one._repr_html_().startswith("<div><code>gpipe(ranks=2, microbatches=2)</code><br><svg ")
    assert simulate(one)._repr_html_().startswith("<p>makespan 9, bubble 33.3%</p><table><tr><th>rank</th>")


def test_a_notebook_shows_no_picture_of_what_cannot_be_seen_or_played():
    assert one_f_one_b(64, 512)._repr_html_().endswith("<br>65536 actions</div>")
    wrong = from_rows(((B(0, 0), F(0, 0)),), gpipe(1, 1).placement, 1)
    assert "comes before 0F0 [rule: forward_before_backward]" in wrong._repr_html_()


def test_names_are_escaped_in_notebooks():
    assert sketch("<b>", {"<i>": []}).startswith("<div><code>&lt;b&gt;</code>")
    assert "<i>" not in sketch("", {"<i>": []})
