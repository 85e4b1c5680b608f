# SPDX-License-Identifier: Apache-2.0
"""No schedule takes less time than the bound, and where the best schedule is known, it takes that time."""

from dataclasses import replace
from itertools import combinations
from math import inf

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from schedules import (
    Costs,
    GraphError,
    Link,
    Problem,
    SizeError,
    Sizes,
    bound,
    chain,
    dualpipe,
    families,
    linear,
    looped,
    merge_backward,
    one_f_one_b,
    overlap,
    simulate,
    spans,
    v_min,
    v_schedule,
    vee,
    zb_auto,
    zb_h1,
    zb_h2,
    zb_v,
)
from schedules.analysis.bounds.heads import find_heads
from schedules.analysis.bounds.lower_bound import rough_bound
from schedules.analysis.bounds.machine import BusyTime, Passes, find_tightest
from schedules.analysis.bounds.network import connect_queues, reverse
from schedules.analysis.bounds.precedence import find_lags
from schedules.analysis.bounds.windows import find_idle
from schedules.testing import costs as schedule_costs
from schedules.testing import schedules
from tests.common.optimum import Case, bound_case, cases, find_optimum
from tests.common.published_costs import MEASURED, SLOTS, read_measured, read_slots
from tests.common.rows import plain_orders
from tests.common.sizes import NIGHTLY, few, sampled

# ---------------- No schedule takes less time than the bound, and where the best schedule is known, it takes that time

ROUNDING = 1 + 1e-9
HELD_BACK = {"zb_auto", "seq_1f1b"}  # the first needs costs and has a test of its own; slices are not covered
FAMILIES = [getattr(families, name) for name in families.__all__ if name not in HELD_BACK]
QUARTERS = st.integers(1, 20).map(lambda quarters: quarters / 4)


def any_costs(stages):
    """A strategy for costs that differ by stage, on links of any speed."""
    each = QUARTERS | st.tuples(*[QUARTERS] * stages)
    links = st.builds(Link, latency=QUARTERS, bandwidth=QUARTERS, bytes=each)
    passes = dict.fromkeys("FBIW", each)
    return st.builds(Costs, **passes, OVERLAP_F=st.none() | each, comm=st.just(0) | QUARTERS | links)


def bound_like(schedule, costs, graph=None, sizes=None):
    """The bound of all schedules on the placement and in the memory of one, that are split if it is."""
    memory = simulate(schedule, costs, graph, sizes).peak_memory
    split = any(action.kind == "W" for rank in range(schedule.ranks) for action in schedule.actions(rank))
    more = {"split": split, "backward": schedule.backward, "sizes": sizes, "graph": graph}
    return bound(Problem(costs, schedule.placement, schedule.microbatches, memory=memory, **more))


@given(st.data())
def test_no_schedule_takes_less_time(data):
    schedule, graph = data.draw(plain_orders(fused=True))
    costs = data.draw(any_costs(schedule.stages))
    sizes = data.draw(st.none() | st.builds(Sizes, residual=st.sampled_from([0, 0.25, 1]), weight=st.integers(0, 3)))
    least = bound_like(schedule, costs, graph, sizes)
    assert least.makespan <= simulate(schedule, costs, graph).makespan * ROUNDING


FRACTIONS = st.sampled_from([0, 0.001, 0.1, 1, 37.123, 2.0**30])


@given(st.data())
def test_no_schedule_takes_less_time_for_sizes_whose_sums_are_not_exact(data):
    schedule, graph = data.draw(plain_orders())
    costs = data.draw(any_costs(schedule.stages))
    each = FRACTIONS | st.tuples(*[FRACTIONS] * schedule.stages)
    sizes = data.draw(st.builds(Sizes, activation=each, residual=st.none() | each, weight=each))
    least = bound_like(schedule, costs, graph, sizes)
    assert least.makespan <= simulate(schedule, costs, graph).makespan * ROUNDING


def test_rounding_makes_no_pass_wait():
    """Four times 37.123 is a little more than the sum of four, less one, and so on."""
    schedule, link = v_min(2, 16), Link(latency=2, bandwidth=1.6, bytes=(0.25, 2.25, 3.25, 3))
    costs = Costs(F=1.5, B=3.5, I=(1.25, 1, 1.5, 3.25), W=(2.25, 0.25, 3, 1), comm=link)
    exact, rounded = (bound(Problem(costs, vee(2), 16, memory=4 * a, sizes=Sizes(activation=a))) for a in (1, 37.123))
    assert rounded.makespan == exact.makespan <= simulate(schedule, costs).makespan


@given(st.data())
def test_no_family_takes_less_time(data):
    schedule = data.draw(schedules(FAMILIES))
    costs = data.draw(any_costs(schedule.stages))
    costs = replace(costs, jitter=data.draw(st.just(0.0) | st.floats(0, 0.5)), seed=data.draw(st.integers(0, 9)))
    assert bound_like(schedule, costs).makespan <= simulate(schedule, costs).makespan * ROUNDING


@given(P=st.integers(1, 8), M=st.integers(1, 16), memory=st.integers(1, 9), costs=schedule_costs())
def test_no_order_found_for_the_costs_takes_less_time(P, M, memory, costs):
    schedule = zb_auto(P, M, memory=memory, costs=costs)
    assert bound_like(schedule, costs).makespan <= simulate(schedule, costs).makespan * ROUNDING


@given(cases())
def test_the_optimum_takes_no_less_time_and_exists_if_it_says_so(case):
    best, found = find_optimum(case), bound_case(case)
    assume(best is not None)
    assert found <= best.makespan * ROUNDING
    assert (found == inf) == (best.makespan == inf)


EQUAL = [Costs(), Costs(comm=0.5), Costs(F=2, B=3, I=1.5, W=1.5), Costs(F=1, B=3, I=2, W=1, comm=1)]


@sampled(2)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_optimum_of_a_small_chain_of_equal_stages_takes_that_time(ranks, split):
    for costs in EQUAL if NIGHTLY else EQUAL[:: 3 if ranks == 3 else 1]:
        for microbatches in range(1, 5 if NIGHTLY or ranks == 2 else 4):
            for memory in range(1, 5):
                case = Case(costs, linear(ranks), microbatches, (memory,) * ranks, split=split)
                assert find_optimum(case).makespan == pytest.approx(bound_case(case))


UNEVEN = [
    (looped(2, 2), 4, Costs(F=(7, 5, 1, 3), B=(8, 10, 12, 15), I=(6, 3, 6, 7), W=(2, 7, 6, 8), comm=1), 1, 2, 167),
    (looped(2, 2), 3, Costs(F=1, B=4, I=2, W=2), 0.25, 2, 40),
    (vee(2), 3, Costs(F=6, B=3, I=1, W=2), 0.5, 4, 60),
]


@pytest.mark.parametrize(("placement", "microbatches", "costs", "residual", "memory", "best"), UNEVEN)
def test_the_optimum_of_two_stages_per_rank_takes_that_time(placement, microbatches, costs, residual, memory, best):
    case = Case(costs, placement, microbatches, (memory,) * 2, Sizes(residual=residual))
    assert find_optimum(case).makespan == bound_case(case) == best


def test_fused_pairs_may_be_as_fast_as_the_bound():
    schedule, costs = overlap(dualpipe(2, 8)), Costs(F=1, B=2, OVERLAP_F=0.25)
    assert bound_like(schedule, costs).makespan <= simulate(schedule, costs).makespan
    assert bound_like(schedule, Costs()).makespan > simulate(schedule, costs).makespan


@pytest.mark.parametrize("line", SLOTS)
def test_small_cases_with_known_best_values(line):
    (costs, placement, microbatches, more), best = read_slots(line)
    assert bound(Problem(costs, placement, microbatches, **more)).makespan == best


def test_the_fastest_schedule_of_one_of_them():
    case = Case(Costs(F=1, B=1), looped(3, 2), 4, (6.0, 6.0, 6.0), split=False)
    best = find_optimum(case)
    assert best.makespan == simulate(best.schedule, case.costs).makespan == bound_case(case) == 20
    assert max(simulate(best.schedule, case.costs).peak_memory) == 3


@sampled(2)
@pytest.mark.parametrize("line", MEASURED)
def test_published_schedules_on_eight_ranks_are_optimal_for_their_memory(line):
    """arXiv 2401.10241, table 5: measured times of the 1.5B and the 6.2B model, in 1p and 2p of memory."""
    costs, M = read_measured(line)
    once, twice = (zb_auto(8, M, memory=memory, costs=costs, residual=1) for memory in (8, 16))
    for memory, found in ((8, [zb_h1(8, M), once]), (16, [zb_h2(8, M), twice])):
        best = min(simulate(schedule, costs).makespan for schedule in found)
        least = bound(Problem(costs, linear(8), M, memory=memory)).makespan
        assert least <= best * ROUNDING <= least * 1.0001


@sampled(1)
@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("microbatches", [16, 32])
def test_families_of_equal_passes_are_optimal_for_their_memory(ranks, microbatches):
    P, M = ranks, microbatches
    each = [one_f_one_b(P, M), zb_h1(P, M), zb_v(P, M), merge_backward(zb_v(P, M)), v_schedule(P, M, memory=2 * P - 2)]
    each += [families.gpipe(P, M), families.interleaved_1f1b(P, M, 2), families.interleaved_zero_bubble(P, M)]
    for schedule in each:
        assert bound_like(schedule, Costs()).makespan == pytest.approx(simulate(schedule, Costs()).makespan), schedule


LITTLE = [(4, 58), (5, 55), (6, 53), (7, 52), (8, 51)]


@pytest.mark.parametrize(("memory", "least"), LITTLE)
def test_a_vee_in_little_memory_cannot_do_without_waiting(memory, least):
    """Less than two slots below the best orders known, which take 59, 57, 53, 53 and 51."""
    assert bound(Problem(Costs(), vee(4), 8, memory=memory / 2)).makespan == least
    best = simulate(v_schedule(4, 8, memory=memory), Costs()).makespan
    assert least <= best <= least + 2


@given(cases())
def test_parts_are_sorted_and_the_rough_bound_is_one_of_them(case):
    found, rough = bound(replace(case.problem, memory=inf)), rough_bound(replace(case.problem, memory=inf))
    values = [part.makespan for part in found.parts]
    assert values == pytest.approx(sorted(values, reverse=True))
    assert found.parts[0] == (found.makespan, found.because)
    assert set(rough.parts) <= set(found.parts)


def test_reasons_say_where_the_time_goes():
    found = bound(Problem(Costs(), linear(4), 8, memory=4))
    assert found.because == "rank 0 works for 24, is idle for 3 before its first input half and for 0 after its last"
    assert bound(Problem(Costs(), linear(4), 1)).because == "one microbatch alone takes 9"
    narrow = bound(Problem(Costs(), linear(4), 6, memory=1))
    assert narrow.because == "rank 0 holds 54 of memory times time, in 1 of memory, after 0 and before 0"
    texts = [part.because for part in bound(Problem(Costs(), vee(4), 8, memory=2.5, split=False)).parts]
    assert texts[0] == "rank 0 works for 48, is idle for 18 at first and for 0 at the end"
    assert "passes of rank 3 that take 1 start at 34 at the earliest, and 31 follows the last" in texts
    assert "rank 0 is idle for 18: 7B7 starts at 50 at the earliest, takes 2, and 14 follows" in texts


def test_more_memory_than_one_microbatch_needs_is_asked_for():
    with pytest.raises(SizeError, match=r"got memory=0\.5, expected at least the 1 that rank 0 needs for one microb"):
        bound(Problem(Costs(), vee(2), 4, memory=0.5))
    sizes = Sizes(activation=(1, 2, 3, 4), weight=10)
    with pytest.raises(SizeError, match=r"got memory=24\.0?, expected at least the 25 that rank 1 needs"):
        bound(Problem(Costs(), vee(2), 4, memory=(25, 24.0), sizes=sizes))
    assert bound(Problem(Costs(), vee(2), 4, memory=25, sizes=sizes)).makespan < inf
    with pytest.raises(SizeError, match=r"got memory=3\.0, expected at least the 8\.5 that rank 2 needs"):
        bound(Problem(Costs(), linear(4), 4, memory=3, sizes=Sizes(activation=(4, 5, 6.5, 1), weight=2)))
    with pytest.raises(SizeError, match=r"got memory=79999999999\.0, expected at least the 80123456789 that rank 1"):
        bound(Problem(Costs(), linear(2), 4, (9e10, 79999999999), Sizes(activation=(1, 123456789), weight=8e10)))


def test_a_bound_is_of_whole_microbatches_that_cost_the_same():
    for name in ("microbatches", "slices"):
        problem = Problem(Costs(**{name: (1, 2)}), linear(2), 2)
        for find in (bound, rough_bound):
            with pytest.raises(SizeError, match=rf"got costs.{name}=\(1, 2\), expected whole microbatches that cost"):
                find(problem)


def test_costs_sizes_and_graphs_have_as_many_stages_as_are_placed():
    with pytest.raises(SizeError, match="a tuple of 2"):
        bound(Problem(Costs(F=(1, 2, 3)), linear(2), 4))
    with pytest.raises(SizeError, match="a tuple of 2"):
        bound(Problem(Costs(), linear(2), 4, sizes=Sizes(activation=(1, 2, 3))))
    with pytest.raises(GraphError, match="got a graph of 3 stages, expected 2"):
        bound(Problem(Costs(), linear(2), 4, graph=chain(3)))


@pytest.mark.parametrize("case", range(few(3)))
def test_any_order_of_microbatches_is_one_of_the_orders_that_count(case):
    """The proof says that no schedule gains by running a stage's microbatches out of order."""
    placement = [linear(2), vee(2), looped(2, 2)][case % 3]
    costs = Costs(F=(1 + case, 2) * (placement.stages // 2), B=4, I=1, W=2, comm=case % 2)
    for memory in (2, 3):
        cases = [Case(costs, placement, 2, (memory,) * 2, in_order=in_order) for in_order in (True, False)]
        first, second = (find_optimum(one) for one in cases)
        assert first.makespan == second.makespan


# --------------------------------- What bounds are made of holds in every schedule: lags, heads, tails, and idle times

TINY = 1e-9
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
    problem = Problem(costs, schedule.placement, schedule.microbatches, memory, sizes, graph)
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
                assert k < lag or passes[u][k - lag][1] <= start + TINY


@given(timelines())
def test_no_pass_starts_before_its_head_nor_ends_within_its_tail(timeline):
    network, passes = timeline
    makespan = max(end for row in passes for _, end in row)
    heads, tails = find_heads(network), find_heads(reverse(network))
    for c, row in enumerate(passes):
        for (start, end), head, tail in zip(row, heads[c], reversed(tails[c]), strict=True):
            assert head <= start + TINY
            assert tail <= makespan - end + TINY


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
                assert idle <= time - busy + TINY or time > makespan


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
