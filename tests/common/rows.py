# SPDX-License-Identifier: Apache-2.0
"""A schedule as rows of actions, one row per rank, and a schedule made of such rows."""

from collections.abc import Collection

from hypothesis import assume
from hypothesis import strategies as st

from schedules import Action, Program, Schedule
from schedules.playing.rows import edit
from schedules.testing import orders

# ----------------------------------- A schedule as rows of actions, one row per rank, and a schedule made of such rows


def rows(plan: Schedule | Program, without: Collection[str] = "") -> list[list[Action]]:
    """Return the actions of each rank, except those whose kind is in `without`."""
    ranks = (plan if isinstance(plan, Schedule) else plan.schedule).ranks
    return [[action for action in plan.actions(rank) if action.kind not in without] for rank in range(ranks)]


def stays_on_the_device(case: tuple[Schedule, object]) -> bool:
    """Return whether the schedule of a case moves no memory."""
    schedule, _ = case
    return not any(action.kind == "OFFLOAD" for row in rows(schedule) for action in row)


# -------------------------- Correct schedules of forwards and backwards only: nothing is recomputed or cut into slices


@st.composite
def plain_orders(draw, fused=False):
    """Draw any such schedule, and the graph it is correct for; fused pairs only if asked for."""
    schedule, graph = draw(orders())
    assume(schedule.slices == 1)
    instead = {"C": "F"} if fused else {"C": "F", "OVERLAP_F": "F"}
    return edit(schedule, [_replace(row, instead) for row in rows(schedule, without=("R", "OFFLOAD", "RELOAD"))]), graph


def _replace(row, instead):
    return [action._replace(kind=instead.get(action.kind, action.kind)) for action in row]
