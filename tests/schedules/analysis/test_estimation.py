# SPDX-License-Identifier: Apache-2.0
"""Costs that are read off a timeline are those with which it was made."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import (
    KINDS,
    Action,
    Costs,
    F,
    Span,
    dualpipe,
    estimate,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    recompute,
    schedule,
    seq_1f1b,
    simulate,
    spans,
    split_backward,
    summarize,
    zb_h1,
)
from schedules.drawing import text, texts
from schedules.errors import TimelineError
from schedules.testing import schedules

TIMES = st.floats(0.5, 4)


@st.composite
def costs_by_stage(draw, stages):
    """Times that differ from stage to stage; the halves of a backward take half of it each."""
    by_stage = {kind: tuple(draw(TIMES) for _ in range(stages)) for kind in ("F", "B")}
    halves = {kind: tuple(time / 2 for time in by_stage["B"]) for kind in "IW"}
    return Costs(**by_stage, **halves, comm=draw(st.just(0.0) | TIMES))


def measure(how, costs):
    """The simulated timeline, with a span of a wait wherever a rank of a chain waits for a value."""
    last = [0.0] * how.ranks
    for span in spans(how, costs):
        what = KINDS[span.action.kind].crosses
        source = span.action.stage + {"F": -1, "B": 1, "": 0}[what]
        if what and 0 <= source < how.stages and span.start > last[span.rank]:
            wait = Action(f"RECV_{what}", span.action.stage, span.action.microbatch, source, span.action.slice)
            yield Span(span.rank, wait, last[span.rank], span.start)
        last[span.rank] = span.end
        yield span


def close(costs):
    return {name: pytest.approx(value) for name, value in vars(costs).items() if value is not None}


@given(st.data(), schedules([gpipe, one_f_one_b, zb_h1, interleaved_1f1b]))
def test_costs_are_recovered_from_the_timeline_they_made(data, how):
    costs = data.draw(costs_by_stage(how.stages))
    found = estimate(how, measure(how, costs))
    if how.ranks > 1:
        assert vars(found) | {"comm": 0} == close(costs) | {"C": None, "R": None, "OVERLAP_F": None, "comm": 0}
        assert found.comm == pytest.approx(costs.comm), "the first value of a step is always waited for"


@given(st.data(), schedules([gpipe, one_f_one_b]))
def test_simulated_waits_are_the_idle_time_of_a_rank(data, how):
    """Whether there are spans of them, or not."""
    costs = data.draw(costs_by_stage(how.stages))
    found, want = summarize(measure(how, costs), how), simulate(how, costs)
    assert found.waited == pytest.approx(want.waited)
    assert want.waited == pytest.approx(
        tuple(idle - before for idle, before in zip(want.idle, outside(how, costs), strict=True))
    )
    assert (found.makespan, found.span, *found.busy) == pytest.approx((want.makespan, want.span, *want.busy))


@given(schedules([gpipe, one_f_one_b, interleaved_1f1b]))
def test_a_picture_with_waits_differs_only_where_a_rank_is_idle(how):
    costs = Costs(F=1, B=2, comm=1)
    picture = texts({"": measure(how, costs)})
    assert picture.replace("-", ".") == text(how, costs)
    for line in picture.splitlines():
        assert "." not in line[: line.rindex("B")], "each was waited for"


def outside(how, costs):
    """Per rank, the time before its first action and after its last."""
    rows = [[span for span in spans(how, costs) if span.rank == rank] for rank in range(how.ranks)]
    end = max(row[-1].end for row in rows)
    return [row[0].start + end - row[-1].end for row in rows]


def test_transfers_that_waited_for_something_else_do_not_count():
    """Before a rank's first action and after its last."""
    how = gpipe(ranks=2, microbatches=1)
    timeline = [*spans(how, Costs()), Span(0, Action("WAIT_F", 0, 0, 1), 6, 9)]
    assert summarize(timeline, how) == summarize(spans(how, Costs()), how).__class__(6, 6, (3, 3), (0, 0), (1, 1))


def test_all_kinds_and_whole_microbatches_of_slices():
    costs = Costs(F=1, B=2, I=1.5, W=0.5, C=3, R=4, OVERLAP_F=5, G=6)
    for how in (recompute(gpipe(2, 3)), seq_1f1b(2, 3, slices=2), dualpipe(4, 4)):
        found = estimate(how, spans(how, costs))
        done = {(span.action.kind, span.action.stage) for span in spans(how, costs)}
        assert all(found.time(*one) == costs.time(*one) for one in done)
        assert simulate(how, found) == simulate(how, costs)


def test_costs_of_halves_and_whole_backwards_are_derived_from_each_other():
    costs = Costs(F=1, B=3, I=2, W=1)
    whole, split = gpipe(2, 2), split_backward(gpipe(2, 2))
    found = estimate(whole, spans(whole, costs))
    assert (found.B, found.I, found.W) == ((3, 3), (1.5, 1.5), (1.5, 1.5))
    found = estimate(split, spans(split, costs))
    assert (found.B, found.I, found.W) == ((3, 3), (2, 2), (1, 1))


def test_disturbed_actions_and_hidden_transfers_do_not_count():
    how = one_f_one_b(2, 5)
    costs = Costs(F=1, B=2, comm=0.5)
    timeline = list(measure(how, costs))
    slow = [span._replace(end=span.end + 100) if span.action == F(0, 4) else span for span in timeline]
    assert estimate(how, slow) == estimate(how, timeline)
    late = [Span(1, Action("RECV_F", 1, i, 0), 500, 600) for i in range(5)]  # they had been sent long before
    unknown = [Span(1, Action("RECV_G", 1, 4, 0), 500, 600), Span(0, Action("WAIT_F", 0, 4, 1), 500, 600)]
    actions = [span for span in timeline if not span.waits]
    assert estimate(how, [*actions, *late, *unknown]).comm == 0


def test_a_fused_pair_sends_when_both_are_done():
    how, wait = gpipe(2, 1), Span(1, Action("RECV_F", 1, 0, 0), 0, 5)
    plain = list(spans(how, Costs()))
    fused = [s._replace(action=s.action._replace(kind="OVERLAP_F")) if s.action == F(0, 0) else s for s in plain]
    assert (estimate(how, [*plain, wait]).comm, estimate(how, [*fused, wait]).comm) == (4, 0)


def test_steps_are_pooled_but_not_mixed():
    how = one_f_one_b(2, 3)
    steps = [list(measure(how, Costs(F=time, B=2, comm=1))) for time in (1, 1.25, 1.5)]
    found = estimate(how, *steps)
    assert found.F == (1.25, 1.25)
    assert found.comm == 1
    assert estimate(how, [span for step in steps for span in step]).comm < 1, "the steps look like one"
    assert estimate(how, chain(*steps[:1])) == estimate(how, steps[0])


def test_a_stage_without_spans_is_named():
    how = gpipe(2, 1)
    with pytest.raises(TimelineError, match=r"stage 1: got spans of nothing, expected a forward and a backward.*all"):
        estimate(how, (span for span in spans(how, Costs()) if span.rank == 0))
    with pytest.raises(TimelineError, match=r"stage 0: got spans of \['F'\]"):
        estimate(how, (span for span in spans(how, Costs()) if span.action.kind == "F"))


@schedule(backward=False)
def alone(rank, ranks, microbatches):
    yield from (F(rank, i) for i in range(microbatches))


def test_forwards_need_no_backwards():
    how = alone(2, 2)
    assert estimate(how, spans(how, Costs(F=3))).F == (3, 3)
