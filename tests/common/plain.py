# SPDX-License-Identifier: Apache-2.0
"""Correct schedules of forwards and backwards only: nothing is recomputed or cut into slices."""

from hypothesis import assume
from hypothesis import strategies as st

from schedules.testing import orders
from tests.common.rows import edit, rows


@st.composite
def plain_orders(draw, fused=False):
    """Draw any such schedule, and the graph it is correct for; fused pairs only if asked for."""
    schedule, graph = draw(orders())
    assume(schedule.slices == 1)
    instead = {"C": "F"} if fused else {"C": "F", "OVERLAP_F": "F"}
    return edit(schedule, [_replace(row, instead) for row in rows(schedule, without="R")]), graph


def _replace(row, instead):
    return [action._replace(kind=instead.get(action.kind, action.kind)) for action in row]
