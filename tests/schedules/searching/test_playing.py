# SPDX-License-Identifier: Apache-2.0
"""Playing orders, by number or by priority, gives the times that `simulate` gives, and holds the memory."""

from math import inf
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from schedules import Costs, Schedule, linear, looped, one_f_one_b, simulate, vee
from schedules.searching.improving import Climb, shake
from schedules.searching.instance import make_instance
from schedules.searching.offsets import draw_rule, follow
from schedules.searching.playing import play
from schedules.searching.seeds import list_families, read_orders, read_seed, spell
from schedules.searching.units import find_unit, take_turns

PLACEMENTS = [linear(4), vee(3), looped(2, 2)]
TIMES = st.integers(0, 8).map(float)


@st.composite
def instances(draw):
    placement = draw(st.sampled_from(PLACEMENTS))
    each = TIMES | st.tuples(*[TIMES] * placement.stages)
    costs = draw(st.builds(Costs, **dict.fromkeys("FIW", each), B=st.just(100), comm=TIMES))
    memory = draw(st.sampled_from([inf, 2.0, 3.0, 4.0]))
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
def test_a_cautious_dispatch_never_gets_stuck(case, seed):
    _, instance = case
    random = Random(seed)
    rule = draw_rule(random)
    found = follow(instance, rule, random)
    assert found is not None or not rule.cautious


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
