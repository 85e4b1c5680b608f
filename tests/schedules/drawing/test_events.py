# SPDX-License-Identifier: Apache-2.0
"""A trace has an event for every action and an arrow for every transfer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import Costs, spans
from schedules.drawing import trace
from schedules.language.actions import COLLECTIVES, KINDS
from schedules.replay.outputs import inputs_of, output_of
from schedules.testing import orders
from tests.common.timelines import NAMES, events, timelines


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
            (rank + below * (action.kind in COLLECTIVES), str(action), start - begin, end - start)
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
