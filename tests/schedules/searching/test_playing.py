# SPDX-License-Identifier: Apache-2.0
"""Playing orders, by number or by priority, gives the times that `simulate` gives, and holds the memory."""

from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import Costs, Schedule, linear, looped, one_f_one_b, simulate, vee
from schedules.searching.improving import Climb, shake
from schedules.searching.instance import WEIGHT_HALF, make_instance
from schedules.searching.offsets import draw_rule, follow
from schedules.searching.playing import play
from schedules.searching.repairing import free_early, put_off, take_late, untangle
from schedules.searching.seeds import list_families, read_orders, read_seed, spell
from schedules.searching.units import find_unit, take_turns

PLACEMENTS = [linear(4), vee(3), looped(2, 2)]
TIMES = st.integers(0, 8).map(float)


@st.composite
def instances(draw):
    placement = draw(st.sampled_from(PLACEMENTS))
    each = TIMES | st.tuples(*[TIMES] * placement.stages)
    costs = draw(st.builds(Costs, **dict.fromkeys("FIW", each), B=st.just(100), comm=TIMES))
    memory = draw(st.sampled_from([inf, 1.0, 1.5, 2.0, 3.0]))
    split = draw(st.booleans())
    return costs, make_instance(costs, placement, draw(st.integers(1, 6)), memory, None, split, True, None)


def times(instance, costs, orders) -> float:
    """The makespan of orders with all names written out, if halves are not joined."""
    schedule = spell(instance, orders, costs, None)
    assert isinstance(schedule, Schedule)
    return simulate(schedule, costs).makespan


@given(instances(), st.integers(0, 99))
def test_every_way_to_orders_fits_and_takes_the_time_that_it_says(case, seed):
    (costs, instance), random = case, Random(seed)
    attempts = [take_turns(instance), find_unit(instance, random), follow(instance, draw_rule(random), random)]
    attempts += [read_seed(instance, schedule) for schedule in list_families(instance, costs, None)]
    for attempt in filter(None, attempts):
        climb = Climb(instance, attempt, random)
        climb.move(5, 0.5)
        for one in (attempt, climb.best, shake(instance, attempt, 2, random)):
            assert all(instance.is_possible(rank, order) for rank, order in enumerate(one.orders))
            assert one.makespan <= attempt.makespan
            assert abs(times(instance, costs, one.orders) - one.makespan) <= 1e-9 * one.makespan


@given(instances(), st.integers(0, 99))
def test_a_dispatch_never_gets_stuck(case, seed):
    _, instance = case
    random = Random(seed)
    assert follow(instance, draw_rule(random), random) is not None


@given(instances())
def test_no_family_begins_a_forward_for_which_there_is_no_room(case):
    """The rule that keeps ranks from getting stuck excludes no order that fits."""
    costs, instance = case
    seeds = [read_seed(instance, schedule) for schedule in list_families(instance, costs, None)]
    for order in (order for one in filter(None, seeds) for order in one.orders):
        assert put_off(instance, order) == order
        assert take_late(instance, order) == order
        assert free_early(instance, order, (WEIGHT_HALF, 0)) == order


@given(instances(), st.randoms(use_true_random=False))
def test_any_orders_can_be_repaired(case, random):
    _, instance = case
    orders = [[*order] for order in take_turns(instance).orders]
    for order in orders:
        random.shuffle(order)
        seen = dict.fromkeys(((kind, n) for kind, n, _ in order), -1)
        for at, (kind, n, _) in enumerate(order):
            seen[kind, n] += 1
            order[at] = kind, n, seen[kind, n]
    for repair in (take_late, lambda instance, order: free_early(instance, order, (WEIGHT_HALF, 0))):
        assert all(sorted(repair(instance, order)) == sorted(order) for order in orders)
    fitting = [put_off(instance, order) for order in orders]
    for attempt in (orders, fitting):
        found = untangle(instance, attempt, random.randrange(instance.ranks))
        assert [sorted(order) for order in found] == [sorted(order) for order in orders]
        assert all(instance.is_possible(rank, order) for rank, order in enumerate(found))
        assert play(instance, found) is not None


FULL = [
    (vee(2), 2, 1.5, Costs(F=(8, 4, 7, 2), B=(7, 4, 10, 10), I=(6, 1, 8, 4), W=(1, 3, 2, 6), comm=1), 71),
    (vee(2), 3, 2, Costs(F=(5, 4, 4, 1), B=(12, 16, 6, 14), I=(8, 8, 5, 7), W=(4, 8, 1, 7), comm=2), 101),
]


@pytest.mark.parametrize(("placement", "microbatches", "memory", "costs", "best"), FULL)
def test_a_climb_gets_away_from_orders_that_fill_the_memory(placement, microbatches, memory, costs, best):
    """Where a rank is full, no pass can move alone. Dispatched orders leave no gaps, so they are like that."""
    instance = make_instance(costs, placement, microbatches, memory, None, True, True, None)
    for seed in range(4):
        random = Random(seed)
        climb = Climb(instance, shake(instance, take_turns(instance), 40, random), random)
        for cooled in range(40, 0, -1):
            climb.move(20, 0.3 * instance.period * cooled / 40)
        assert climb.best.makespan == best


def test_a_deadlock_has_no_times():
    instance = make_instance(Costs(), linear(2), 1, inf, None, True, True, None)
    orders = read_orders(instance, one_f_one_b(2, 1))
    assert play(instance, orders) is not None
    assert play(instance, [[orders[0][1], orders[0][0], orders[0][2]], orders[1]]) is None


def test_a_pass_that_waits_says_for_which():
    instance = make_instance(Costs(comm=1), linear(2), 1, inf, None, True, True, None)
    played = play(instance, read_orders(instance, one_f_one_b(2, 1)))
    assert played.starts == [[0, 5, 6], [2, 3, 4]]
    assert played.awaited == [[None, (1, 1, 0), None], [(0, 0, 0), None, None]]
    assert (played.makespan, played.ends) == (7, [7, 5])
