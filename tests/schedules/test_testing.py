# SPDX-License-Identifier: Apache-2.0
"""A conformance suite is worth having only if bad schedules fail it, and show themselves."""

import pickle
from collections import Counter

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase

from schedules import (
    ArgumentError,
    B,
    Costs,
    F,
    SizeError,
    chain,
    check,
    gpipe,
    looped,
    one_f_one_b,
    schedule,
    simulate,
    vee,
)
from schedules import families as built_in
from schedules.proof.formulas import whole_model
from schedules.proof.interpreter import ideal
from schedules.testing import (
    collective_orders,
    conformance,
    costs,
    graphs,
    mutants,
    orders,
    require_bounds,
    require_round_trip,
    schedules,
    sizes,
)
from tests.common.sizes import by_night, sampled

SEARCH = settings(max_examples=2000, deadline=None, database=None, derandomize=True, phases=[Phase.generate])


@schedule(placement=looped)
def breadth_first(rank, ranks, microbatches, chunks=2):
    """Every chunk for all microbatches before the next chunk (arXiv 2211.05953)."""
    mine = range(rank, ranks * chunks, ranks)
    yield from (F(stage, i) for stage in mine for i in range(microbatches))
    yield from (B(stage, i) for stage in reversed(mine) for i in range(microbatches))


@schedule(placement=vee)
def there_and_back(rank, ranks, microbatches):
    """One microbatch after the other over a V."""
    first, second = rank, 2 * ranks - 1 - rank
    for i in range(microbatches):
        yield from (F(first, i), F(second, i), B(second, i), B(first, i))


@schedule()
def whole_rounds(rank, ranks, microbatches):
    yield from gpipe(ranks, microbatches).actions(rank)


def only_whole_rounds(ranks, microbatches):
    if microbatches % ranks:
        raise SizeError("microbatches must be a multiple of ranks")
    return whole_rounds(ranks, microbatches)


test_chunks_are_explored = conformance(breadth_first)
test_a_vee = conformance(there_and_back)
test_refused_sizes_are_passed_over = conformance(only_whole_rounds)


def test_every_built_in_schedule_is_a_factory_that_pickles():
    for name in built_in.__all__:
        assert pickle.loads(pickle.dumps(getattr(built_in, name))) is getattr(built_in, name)


@schedule()
def greedy(rank, ranks, microbatches):
    """Wrong from two ranks and two microbatches on: asks for cotangents before the last rank has made them."""
    for i in range(microbatches):
        yield F(rank, i)
        yield B(rank, (i + (rank > 0)) % microbatches if i else 0)


@schedule()
def forgetful(rank, ranks, microbatches):
    """Leaves out the last backward once there are 5 microbatches."""
    yield from (F(rank, i) for i in range(microbatches))
    yield from (B(rank, i) for i in range(microbatches - (microbatches > 4)))


def failure(factory):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever is wrong
        conformance(factory)()
    return str(caught.value) + "\n".join(caught.value.__notes__)


def test_a_failure_is_shrunk_and_drawn():
    message = failure(forgetful)
    assert "rank 0, position 9, end of its actions: 0B4, or 0I4 and 0W4, never runs" in message
    assert "forgetful(ranks=1, microbatches=5)" in message
    assert "rank 0 |F0 F1 F2 F3 F4 B0    B1    B2    B3    !  |" in message


@schedule()
def wrong_at_one_size(rank, ranks, microbatches):
    yield from (F(rank, i) for i in range(microbatches))
    missing = (ranks, microbatches, rank) == (5, 7, 3)
    yield from (B(rank, i) for i in range(microbatches - missing))


def test_no_size_is_left_out():
    assert "wrong_at_one_size(ranks=5, microbatches=7)" in failure(wrong_at_one_size)
    others = settings(max_examples=3, deadline=None)
    conformance(wrong_at_one_size, sizes={"ranks": [2, 5], "microbatches": range(1, 7)}, settings=others)()


@schedule()
def crashing(rank, ranks, microbatches):
    yield from (F(rank, i) for i in range(microbatches))
    yield from (B(rank, "012345".index(str(i))) for i in range(microbatches))


def test_a_generator_that_raises_is_drawn_up_to_there():
    message = failure(crashing)
    assert "substring not found" in message
    assert "crashing(ranks=1, microbatches=7)" in message
    assert "rank 0 |F0 F1 F2 F3 F4 F5 F6 B0    B1    B2    B3    B4    B5    !  |" in message
    assert "rank 0, position 13, end of its actions: the generator raised ValueError" in message


def test_a_factory_that_raises_is_named_with_its_sizes():
    assert "with ranks=1, microbatches=4" in failure(
        lambda ranks, microbatches: gpipe(ranks, [1, 2, 3][microbatches - 1])
    )


@pytest.mark.parametrize(
    ("factory", "given", "message"),
    [
        (gpipe, {"chunk": [1]}, r"got sizes={'chunk': \[1\]}, expected values for parameters of .*: ranks, microb"),
        (gpipe, {"ranks": []}, r"got sizes={'ranks': \[\]}.* or list at least one value"),
        (only_whole_rounds, {"ranks": [5], "microbatches": [1, 4]}, r"SizeError from only_whole_rounds.* from 1 to 4"),
    ],
)
def test_sizes_to_try_are_checked(factory, given, message):
    with pytest.raises(ArgumentError, match=message):
        conformance(factory, sizes=given)()


def test_suites_share_no_saved_examples():
    """What fails in one suite is not tried, and dropped again, by another."""

    class Flavor:
        pass  # its `repr` does not evaluate

    @schedule()
    def flavored(rank, ranks, microbatches, flavor=None):
        yield from gpipe(ranks, microbatches).actions(rank)

    saved = InMemoryExampleDatabase()
    suites = [
        lambda ranks, microbatches: flavored(ranks, microbatches, Flavor()),
        lambda ranks, microbatches: flavored(microbatches, ranks, Flavor()),
    ]
    for suite in suites:
        with pytest.raises(SyntaxError):
            conformance(suite, settings=settings(database=saved, max_examples=2))()
    assert len({key.split(b".")[0] for key in saved.data}) == 2


def test_a_blocked_schedule_is_drawn_too():
    message = failure(greedy)
    assert "greedy(ranks=2, microbatches=2)" in message
    assert "rank 1 |.  F0 " in message


def test_a_repr_that_does_not_evaluate_is_found():
    class Flavour:
        pass

    @schedule()
    def flavoured(rank, ranks, microbatches, flavour=None):
        yield from gpipe(ranks, microbatches).actions(rank)

    with pytest.raises(SyntaxError):
        require_round_trip(flavoured(1, 1, Flavour()))
    require_round_trip(flavoured(1, 1, (1, "two", None)))


@given(sizes(), costs())
def test_sizes_and_costs(size, times):
    ranks, microbatches = size
    assert 1 <= ranks <= 8
    assert 1 <= microbatches <= 12
    assert all(cost * 4 == int(cost * 4) > 0 for cost in (times.F, times.B, times.I, times.W))
    assert times.comm >= 0


@given(st.integers(1, 10).flatmap(graphs))
def test_every_stage_is_fed(graph):
    assert all(graph.fed_by[stage] for stage in range(1, graph.stages))


@pytest.mark.parametrize(
    "what",
    [
        lambda graph: graph.values - graph.cotangents,
        lambda graph: graph.cotangents - graph.values,
        lambda graph: graph.gradients,
        pytest.param(lambda graph: graph == chain(4), marks=by_night),
        lambda graph: any(len(row) > 2 for row in graph.fed_by),
    ],
)
def test_the_strategy_draws_graphs_of_every_kind(what):
    find(graphs(4), what, settings=SEARCH)


@sampled(1)
@pytest.mark.parametrize(
    "what",
    [
        lambda case: case[0].ranks == 4,
        lambda case: case[0].stages > case[0].ranks > 1,
        lambda case: any(action.kind == "I" for action in case[0].actions(0)),
        lambda case: ideal(*case) != whole_model(case[1], case[0].microbatches),
    ],
)
def test_the_strategy_draws_orders_of_every_kind(what):
    find(orders(), what, settings=SEARCH)


def test_mutants_update_a_stage_several_times_though_its_gradient_is_reduced():
    def updates_a_reduced_stage_twice(plan):
        kinds = Counter((action.kind, action.stage) for rank in range(plan.ranks) for action in plan.actions(rank))
        return any(kinds["U", s] > 1 and kinds["REDUCE_GRAD", s] for s in range(plan.stages))

    plans = collective_orders(ranks=2, stages=2, microbatches=3).flatmap(lambda case: mutants(case[0]))
    find(plans, updates_a_reduced_stage_twice, settings=SEARCH)


@given(schedules([gpipe, one_f_one_b, breadth_first]))
def test_schedules_come_from_the_factories(s):
    assert s.factory in (gpipe, one_f_one_b, breadth_first)
    check(s)


def test_a_makespan_below_the_bounds_is_an_error(monkeypatch):
    s = one_f_one_b(3, 4)
    too_short = simulate(gpipe(3, 2))
    require_bounds(s, chain(3), Costs(comm=100))
    monkeypatch.setattr("schedules.testing.suite.simulate", lambda *_: too_short)
    with pytest.raises(AssertionError, match="is less than the work"):
        require_bounds(s, chain(3), Costs(F=100))
    with pytest.raises(AssertionError, match="that one microbatch takes"):
        require_bounds(s, chain(3), Costs(comm=100))
