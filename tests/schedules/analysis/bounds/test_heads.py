# SPDX-License-Identifier: Apache-2.0
"""What bounds are made of holds in every schedule: lags, heads, tails, and idle times."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import Costs, Sizes, simulate, spans
from schedules.analysis.bounds.heads import find_heads
from schedules.analysis.bounds.machine import BusyTime, Passes, find_tightest
from schedules.analysis.bounds.network import connect_queues, reverse
from schedules.analysis.bounds.precedence import find_lags
from schedules.analysis.bounds.problem import pose
from schedules.analysis.bounds.windows import find_idle
from tests.common.plain import plain_orders

ROUNDING = 1e-9
TIMES = st.integers(1, 8)


@st.composite
def timelines(draw):
    """Draw a schedule, simulate it, and return its network, and when its passes start and end, by queue.

    An action may take longer than its pass: if a whole backward takes less time than its halves.
    """
    schedule, graph = draw(plain_orders())
    each = TIMES | st.tuples(*[TIMES] * schedule.stages)
    costs = draw(st.builds(Costs, **dict.fromkeys("FBIW", each), comm=st.integers(0, 3)))
    sizes = draw(st.builds(Sizes, activation=each, residual=st.none() | each))
    memory = simulate(schedule, costs, graph, sizes).peak_memory
    problem = pose(costs, schedule.placement, schedule.microbatches, memory, sizes, graph=graph)
    network = connect_queues(problem)
    numbers = {(one.kind, one.stage): c for c, one in enumerate(network.queues)}
    passes = [[] for _ in network.queues]
    for span in spans(schedule, costs, graph):
        kind, s, i = span.action[:3]
        n = i % len(schedule.placement.routes) * schedule.stages + s
        half = span.start + problem.stages[n].input_half
        parts = {"B": [("I", span.start, half), ("W", half, span.end)]}.get(kind, [(kind, span.start, span.end)])
        for part, start, end in parts:
            if (part, n) in numbers:
                passes[numbers[part, n]].append((start, end))
    return network, [sorted(row) for row in passes]


@given(timelines())
def test_a_pass_comes_after_those_that_its_lags_say(timeline):
    network, passes = timeline
    for row, lags in zip(passes, find_lags(network)[1], strict=True):
        for k, (start, _) in enumerate(row):
            for u, lag in lags.items():
                assert k < lag or passes[u][k - lag][1] <= start + ROUNDING


@given(timelines())
def test_no_pass_starts_before_its_head_nor_ends_within_its_tail(timeline):
    network, passes = timeline
    makespan = max(end for row in passes for _, end in row)
    heads, tails = find_heads(network), find_heads(reverse(network))
    for c, row in enumerate(passes):
        for (start, end), head, tail in zip(row, heads[c], reversed(tails[c]), strict=True):
            assert head <= start + ROUNDING
            assert tail <= makespan - end + ROUNDING


@given(timelines())
def test_a_rank_is_idle_for_as_long_as_it_must_be(timeline):
    network, passes = timeline
    makespan = max(end for row in passes for _, end in row)
    short = [[(start, start + one.time) for start, _ in row] for one, row in zip(network.queues, passes, strict=True)]
    flipped = [[(makespan - end, makespan - start) for start, end in reversed(row)] for row in short]
    for mirrored, rows in ((network, short), (reverse(network), flipped)):
        heads = find_heads(mirrored)
        for rank in range(len(network.memory)):
            mine = [one for c in network.on(rank) for one in rows[c]]
            for time, idle in find_idle(mirrored, rank, heads):
                busy = sum(min(end, time) - start for start, end in mine if start < time)
                assert idle <= time - busy + ROUNDING or time > makespan


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=12))
def test_busy_time_ends_when_all_passes_can_have_ended(passes):
    busy, filled = BusyTime(), set[int]()
    for start, time in passes:
        busy.add(start, time)
        free = (slot for slot in range(100) if slot >= start and slot not in filled)
        filled |= {next(free) for _ in range(time)}
    working = [start for start, time in passes if time]
    assert busy.end >= max([1 + slot for slot in filled], default=0)
    gaps = {slot for begin, end in zip(busy.paused, busy.resumed, strict=True) for slot in range(int(begin), int(end))}
    if len(working) == len(passes):
        assert gaps == set(range(int(busy.end))) - filled


@given(st.lists(st.builds(Passes, TIMES, TIMES, TIMES), min_size=1, max_size=7))
def test_no_set_of_passes_is_tighter_than_the_one_found(passes):
    sets = (some for n in range(1, len(passes) + 1) for some in combinations(passes, n))
    ends = (
        min(one.head for one in some) + sum(one.work for one in some) + min(one.tail for one in some) for some in sets
    )
    assert find_tightest(passes).end == pytest.approx(max(ends))
