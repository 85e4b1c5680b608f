# SPDX-License-Identifier: Apache-2.0
"""Building blocks: times, their order, and weight gradients in what is left free."""

from heapq import merge
from itertools import islice, pairwise

from hypothesis import given
from hypothesis import strategies as st

from schedules import B, F, I, W, eager_1f1b, one_f_one_b, zb_h1, zb_h2
from schedules.families.blocks import every, merge_in_order, time_passes

SIZES = st.tuples(st.integers(1, 9), st.integers(1, 25))


@given(st.integers(1, 9), st.integers(-9, 9), st.lists(st.integers(-20, 20)))
def test_passes_start_as_early_as_possible_and_then_at_the_interval(interval, first, early):
    times = list(islice(every(interval, first, early), len(early) + 5))
    assert times[: len(early)] == early
    assert times[len(early) :] == [first + interval * i for i in range(len(early), len(early) + 5)]


@given(SIZES)
def test_1f1b_is_a_block(sizes):
    P, M = sizes
    for r in range(P):
        back = {one_f_one_b: 3 * P - 2 - 2 * r, eager_1f1b: 6 * P - 5 - 5 * r}
        for factory, first in back.items():
            row = merge_in_order(time_passes(F, r, every(3, r), M), time_passes(B, r, every(3, first), M))
            assert list(row) == list(factory(P, M).actions(r))


@given(SIZES)
def test_zb_h1_and_zb_h2_are_blocks(sizes):
    P, M = sizes
    for r in range(P):
        h1 = {F: r, I: 3 * P - 2 - 2 * r, W: 3 * P - 1 + r}
        h2 = {F: r, I: 6 * P - 5 - 5 * r, W: 6 * P - 4 + r}
        for factory, block, least in ((zb_h1, h1, P), (zb_h2, h2, 2 * P - 1)):
            row = merge(*(time_passes(kind, r, every(3, first), M) for kind, first in block.items()))
            assert [action for _, action in row] == list(factory(P, M).actions(r)) or least > M


@st.composite
def timed(draw):
    """Times of forwards and of input halves behind them, all different, on one stage."""
    M = draw(st.integers(1, 12))
    times = draw(st.lists(st.integers(0, 60), min_size=2 * M, max_size=2 * M, unique=True))
    forwards, halves = sorted(times[:M]), sorted(times[M:])
    return M, forwards, [half + 60 for half in halves] if any(map(int.__le__, halves, forwards)) else halves


@given(timed(), st.integers(1, 12))
def test_weight_gradients_come_in_free_slots_when_memory_is_full_or_at_the_end(case, memory):
    M, forwards, halves = case
    row = list(merge_in_order(time_passes(F, 0, forwards, M), time_passes(I, 0, halves, M), memory=memory))
    times = {**{F(0, i): t for i, t in enumerate(forwards)}, **{I(0, i): t for i, t in enumerate(halves)}}
    rest = [action for action in row if action.kind != "W"]
    assert rest == sorted(times, key=times.get)
    assert [action for action in row if action.kind == "W"] == [W(0, i) for i in range(M)]
    held, owed, gaps = 0, 0, {(a, b): times[b] - times[a] - 1 for a, b in pairwise(rest)}
    last = None
    for at, action in enumerate(row):
        if action.kind == "W":
            assert owed > 0
            held, owed = held - 1, owed - 1
            later = next((a for a in row[at:] if a.kind != "W"), None)
            if later is not None:
                assert gaps[last, later] > 0 or (later.kind == "F" and held + 1 >= memory)
                gaps[last, later] -= 1
            continue
        if last is not None:
            assert not owed or gaps[last, action] <= 0
        held, owed, last = held + (action.kind == "F"), owed + (action.kind == "I"), action
        assert held <= memory or not owed or action.kind == "I"


@given(st.integers(1, 4), st.integers(1, 30))
def test_whole_backwards_have_no_weight_gradients_left(P, M):
    assert all(
        a.kind in "FB"
        for a in merge_in_order(time_passes(F, 0, every(3, 0), M), time_passes(B, 0, every(3, 3 * P - 2), M))
    )


def test_passes_are_generated_lazily():
    row = merge_in_order(time_passes(F, 0, every(3, 0), 10**18), time_passes(I, 0, every(3, 1), 10**18))
    assert list(islice(row, 4)) == [F(0, 0), I(0, 0), W(0, 0), F(0, 1)]
