# SPDX-License-Identifier: Apache-2.0
"""Timelines to draw, and the events of a trace."""

import json

from hypothesis import strategies as st

from schedules import B, F, Span, parse
from schedules.drawing.palette import LOOKS
from schedules.language.actions import KINDS, Action

NAMES = st.text(min_size=1)


def timelines():
    """Return a strategy for any spans that a measurement may give: overlapping, empty, with gaps, and waits."""
    kinds, none = st.sampled_from(sorted(LOOKS)), st.none()
    actions = st.builds(Action, kinds, st.integers(0, 9), st.integers(0, 99), none, none)
    transfers = st.sampled_from(sorted(set(KINDS) - set(LOOKS)))
    actions |= st.builds(Action, transfers, st.integers(0, 9), st.integers(0, 99), st.integers(0, 9), none)
    times = st.floats(-1e6, 1e6)
    made = st.builds(
        lambda rank, action, start, lasts: Span(rank, action, start, start + lasts),
        st.integers(0, 5),
        actions,
        times,
        st.just(0.0) | st.floats(0, 1e3),
    )
    return st.lists(made, max_size=20)


WAITED = [
    *(Span(0, F(0, 0), 0, 1), Span(0, parse("0RECV_B0<1"), 1, 5.4), Span(0, B(0, 0), 5.4, 7.6)),
    *(Span(1, parse("1RECV_F0<0"), 0, 1.6), Span(1, F(1, 0), 1.6, 2.7), Span(1, B(1, 0), 2.8, 5)),
    Span(1, parse("1WAIT_B0>0"), 5, 5.01),
]


def events(picture, *kinds):
    return [event for event in json.loads(picture)["traceEvents"] if event["ph"] in kinds]
