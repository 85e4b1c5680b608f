# SPDX-License-Identifier: Apache-2.0
"""The outputs that actions make and use, with names on which maker and user agree.

An output's name is its type, its stage and its unit. The type is `F` for a value, `B` for a cotangent, or the kind of
the action if nothing leaves the stage. A unit is a microbatch, or a slice of one.
"""

from __future__ import annotations

from typing import TypeAlias

from schedules.language.actions import KINDS, Action
from schedules.language.graph import Graph

Output: TypeAlias = tuple[str, int, int]
Flow: TypeAlias = tuple[str, int, int, int | None]
"""The type of what an action exchanges with other stages (or empty), and the stage, microbatch and slice."""


def inputs_of(action: Action, graph: Graph) -> list[Output]:
    """Return the outputs that must exist before `action` can run.

    >>> from schedules import B, F, chain
    >>> inputs_of(F(1, 0), chain(3)), inputs_of(B(1, 0), chain(3))
    ([('F', 0, 0)], [('F', 1, 0), ('B', 2, 0)])
    """
    kind, s, i, _, _ = action
    word = KINDS[kind]
    own = {
        "": [],
        "kept": [("F", s, i)],
        "forward": [("F", s, i)],
        "halved": [("B", s, i)],
        "hosted": [("OFFLOAD", s, i)],
    }
    peers = {"F": graph.fed_by[s], "B": graph.pulled_by[s], "": ()}[word.crosses]
    return own.get(word.before, []) + [(word.crosses, peer, i) for peer in peers]


def output_of(action: Action) -> Output:
    """Return the output that exists once `action` has run.

    >>> from schedules import F, I
    >>> output_of(F(1, 0)), output_of(I(1, 0))
    (('F', 1, 0), ('B', 1, 0))
    """
    return KINDS[action.kind].crosses or action.kind, action.stage, action.microbatch


def flow_of(action: Action) -> Flow:
    """Return what `action` exchanges with other stages, by microbatch and slice."""
    kind, stage, microbatch, _, part = action
    return KINDS[kind].crosses, stage, microbatch, part


def unit_of(action: Action, slices: int) -> int:
    """Return the index, within the step, of the action's microbatch or slice: slices are numbered across microbatches.

    >>> unit_of(Action("F", 0, 2, slice=1), slices=4)
    9
    """
    return action.microbatch * slices + (action.slice or 0)
