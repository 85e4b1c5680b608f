# SPDX-License-Identifier: Apache-2.0
"""Correct schedules of forwards and backwards only: none is recomputed, fused or cut into slices."""

from hypothesis import assume
from hypothesis import strategies as st

from schedules.testing import orders
from tests.common.rows import edit, rows

PLAIN = {"C": "F", "OVERLAP_F": "F"}


@st.composite
def plain_orders(draw):
    """Draw any such schedule, and the graph it is correct for."""
    schedule, graph = draw(orders())
    assume(schedule.slices == 1)
    return edit(schedule, [_make_plain(row) for row in rows(schedule, without="R")]), graph


def _make_plain(row):
    return [action._replace(kind=PLAIN.get(action.kind, action.kind)) for action in row]
