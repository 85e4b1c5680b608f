# SPDX-License-Identifier: Apache-2.0
"""Schedules of chains that nobody would write."""

from dataclasses import replace
from itertools import accumulate
from random import Random

from hypothesis import strategies as st

from schedules import Action, Placement, from_rows


@st.composite
def any_order_of_a_chain(draw, walks=False, ticked=False):
    """Any order of the passes of a chain on any ranks, in which inputs come first.

    If it `walks`, ranks are in a row, and each stage is on the rank of the stage before it, or on one beside that.
    If it is `ticked`, the schedule has ticks: those of the passes in the order in which they were drawn.
    """
    random = Random(draw(st.integers(0, 2**32)))
    P, S, M, slices = (
        draw(st.integers(2, 6)),
        draw(st.integers(2, 8)),
        draw(st.integers(1, 6)),
        random.choice([1, 1, 2]),
    )
    homes = tuple(random.randrange(P) for _ in range(S))
    if walks:
        homes = tuple(accumulate(range(1, S), lambda at, _: max(0, at + random.choice([-1, 0, 1, 1])), initial=0))
    homes = tuple(sorted({*homes}).index(rank) for rank in homes)
    left = {
        (s, i, part): [*random.choice(["FB", "FIW", "CRB", "CRIW"])]
        for s in range(S)
        for i in range(M)
        for part in range(slices)
    }
    rows, done = [[] for _ in {*homes}], set()
    ticks, latest = [([0] * M * slices, [0] * M * slices) for _ in homes], (0, False, -1)
    while left:
        ready = [
            (s, i, part)
            for (s, i, part), (kind, *_) in left.items()
            if (
                kind not in "FC"
                or {("F", s - 1, i, part), ("F", s, i, part - 1)} <= done | edges(s, i, part, S, slices)
            )
            and (
                kind not in "BI"
                or {("B", s + 1, i, part), ("B", s, i, part + 1)} <= done | edges(s, i, part, S, slices)
            )
            and (kind not in "BI" or ("F", s, i, slices - 1) in done)
        ]
        s, i, part = unit = random.choice(ready)
        kind = left[unit].pop(0)
        rows[homes[s]].append(Action(kind, s, i, None, part if slices > 1 else None))
        done.add(("F" if kind in "FC" else "B" if kind in "BI" else "", *unit))
        if not left[unit]:
            del left[unit]
        if kind in "FCBI":
            tick, is_back, rank = latest[0], kind in "BI", homes[s] * (-1 if kind in "BI" else 1)
            tick += (tick, is_back, rank) <= latest or random.choice([0, 0, 1])
            latest = tick, is_back, rank
            ticks[s][is_back][i * slices + part] = tick
    how = from_rows(tuple(map(tuple, rows)), Placement(len(rows), homes), M, slices)
    return replace(how, ticks=ticks.__getitem__) if ticked else how


def edges(s, i, part, stages, slices):
    """What the ends of the chain and of the sequence need not wait for."""
    found = {("F", -1, i, part), ("F", s, i, -1), ("B", stages, i, part), ("B", s, i, slices)}
    return found
