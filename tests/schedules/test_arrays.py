# SPDX-License-Identifier: Apache-2.0
"""Of large schedules, arrays say what the loops over actions say: the same verdict, and the same times bit for bit."""

import sys
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from schedules import (
    Action,
    B,
    Costs,
    F,
    Link,
    PipelineError,
    ScheduleError,
    Sizes,
    chain,
    check,
    critical_path,
    families,
    forwards,
    interleaved_1f1b,
    lower,
    overlap,
    recompute,
    simulate,
    split_backward,
)
from schedules.analysis import simulation
from schedules.arrays import abreast, gate, lowered
from schedules.arrays.abreast import play_abreast
from schedules.arrays.codes import CODE_OF
from schedules.arrays.lives import read_lives
from schedules.arrays.lowered import lower_all
from schedules.arrays.paths import trace_path
from schedules.checking import rules
from schedules.checking.rules import kinds_of
from schedules.lowering import program as lowering
from schedules.playing.costs import NO_COSTS, UNITS
from schedules.playing.dependencies import wires
from schedules.playing.engine import replay_to_end
from schedules.playing.rows import edit
from schedules.testing import mutants, orders, schedules
from tests.common.chains import any_order_of_a_chain
from tests.common.rows import rows

FAMILIES = [getattr(families, name) for name in families.__all__]
TRANSFORMS = [split_backward, recompute, forwards]
often = settings(deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def correct(draw):
    """A correct schedule, and a graph."""
    if draw(st.booleans()):
        return draw(orders())
    schedule = draw(schedules(FAMILIES))
    if change := draw(st.sampled_from([None, *TRANSFORMS])):
        try:
            schedule = change(schedule)
        except PipelineError:
            reject()
    return schedule, schedule.graph or chain(schedule.stages)


def as_arrays(schedule, graph, costs=NO_COSTS, sizes=UNITS):
    found = read_lives(schedule)
    return found and play_abreast(schedule, *found, wires(schedule, graph, costs, sizes), costs)


def has_codes(schedule):
    return all(action.kind in CODE_OF for row in rows(schedule) for action in row)


def is_accepted(schedule, graph):
    try:
        check(schedule, graph)
    except ScheduleError:
        return False
    return True


@often
@given(correct(), st.data())
def test_arrays_accept_what_the_rules_accept(case, data):
    schedule, graph = case
    schedule = data.draw(st.just(schedule) | mutants(schedule))
    assert (as_arrays(schedule, graph) is not None) == (is_accepted(schedule, graph) and has_codes(schedule))


@st.composite
def unlike(draw, schedule):
    """Costs and sizes whose sums depend on the order: hardly two are alike."""
    random = Random(draw(st.integers(0, 2**32)))

    def some(count=schedule.stages):
        return tuple(random.random() for _ in range(count))

    link = Link(random.random(), random.random(), some(), (((0, 1), random.random()),), some())
    times = {kind: some() for kind in ("F", "B", "I", "W", "R", "OVERLAP_F", "G")}
    costs = Costs(**times, comm=random.choice([0, random.random(), link]))
    if random.random() < 0.5:
        costs = replace(costs, microbatches=some(schedule.microbatches), slices=some(schedule.slices))
    return costs, random.choice([UNITS, Sizes(some(), some(), some())])


@often
@given(correct(), st.data())
def test_arrays_find_the_times_of_the_loops(case, data):
    schedule, graph = case
    if has_codes(schedule):
        costs, sizes = data.draw(unlike(schedule))
        found, played = (
            as_arrays(schedule, graph, costs, sizes),
            replay_to_end(schedule, wires(schedule, graph, costs, sizes), costs),
        )
        assert found == (played.begin, played.clock, played.busy, played.peak)


@often
@given(correct(), st.data())
def test_arrays_find_the_critical_path_of_the_loops(case, data):
    schedule, graph = case
    if has_codes(schedule):
        costs, _ = data.draw(unlike(schedule) | st.just((Costs(), UNITS)) | st.just((Costs(B=0), UNITS)))
        found = trace_path(schedule, graph, *read_lives(schedule), costs)
        has_others = {"OVERLAP_F", "G"} & kinds_of(schedule)
        assert (found is None) == bool(has_others)
        assert found is None or found == list(critical_path(schedule, costs, graph).stretches)


def test_arrays_find_the_critical_path_through_slices():
    schedule, costs = families.seq_1f1b(ranks=4, microbatches=3, slices=2), Costs(F=1.1, B=2.3, comm=0.7)
    found = trace_path(schedule, chain(4), *read_lives(schedule), costs)
    assert found == list(critical_path(schedule, costs).stretches)


@pytest.mark.parametrize(
    "make", [families.dualpipe, families.chimera, lambda P, M: overlap(families.one_f_one_b(P, M))]
)
def test_arrays_know_pairs_and_sums(make):
    schedule = make(4, 8)
    graph, costs = chain(schedule.stages), Costs(F=0.1, B=9, OVERLAP_F=3, G=0.7, comm=3.3)
    played = replay_to_end(schedule, wires(schedule, graph, costs, UNITS), costs)
    assert as_arrays(schedule, graph, costs) == (played.begin, played.clock, played.busy, played.peak)


@pytest.mark.parametrize(("name", "kind"), [("chimera", "G"), ("dualpipe_v", "OVERLAP_F")])
def test_arrays_refuse_early_sums_and_pairs_apart(name, kind):
    schedule = getattr(families, name)(ranks=4, microbatches=8)
    refused = 0
    for rank, row in enumerate(rows(schedule)):
        for k in range(1, len(row)):
            if row[k].kind == kind:
                changed = rows(schedule)
                changed[rank][k - 1], changed[rank][k] = changed[rank][k], changed[rank][k - 1]
                wrong = edit(schedule, changed)
                accepted = is_accepted(wrong, chain(schedule.stages))
                assert accepted == (as_arrays(wrong, chain(schedule.stages)) is not None)
                refused += not accepted
    assert refused


def require_same_program(schedule, graph):
    found = lower_all(schedule, graph)
    for rank, stream in enumerate(lower(schedule, graph).streams(range(schedule.ranks)) if found else ()):
        assert list(map(str, found.decode(rank))) == list(map(str, stream))
    return found is not None


@often
@given(any_order_of_a_chain() | any_order_of_a_chain(ticked=True))
def test_arrays_lower_every_order_of_a_chain_as_the_loops_do(schedule):
    graph = chain(schedule.stages)
    check(schedule, graph)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowered, "MOST_LOOKS", 10**9)
        assert require_same_program(schedule, graph)


@often
@given(correct())
def test_arrays_lower_as_the_loops_do_or_not_at_all(case):
    require_same_program(*case)


@pytest.mark.parametrize(
    "wrong",
    [
        F(True, 0),
        F(0.0, 0),
        F(-1, 0),
        F(0, -1),
        F(0, 2),
        F(0, 2**40),
        F(0, 0, 0),
        Action("F", 0, 0, 0),
        Action("U", 0, 0),
        Action("SEND_F", 0, 0, 1),
        ("F", 0, 0, None, None),
        "F",
        None,
    ],
    ids=repr,
)
def test_what_is_no_valid_action_has_no_code(wrong):
    schedule = families.gpipe(ranks=1, microbatches=2)
    row = rows(schedule)[0]
    assert read_lives(edit(schedule, [row]))
    assert not read_lives(edit(schedule, [[wrong, *row]]))
    assert not read_lives(edit(schedule, [[wrong, *row[1:]]]))


@pytest.mark.parametrize("slice", [None, True, 0.0, -1, 2, 2**40, "0"])
def test_what_is_no_slice_has_no_code(slice):
    schedule = families.seq_1f1b(ranks=1, microbatches=2, slices=2)
    row = rows(schedule)[0]
    assert read_lives(edit(schedule, [row]))
    assert not read_lives(edit(schedule, [[F(0, 0, slice), *row]]))
    assert not read_lives(edit(schedule, [[row[0], row[1]._replace(slice=slice), *row[2:]]]))


def test_what_packs_into_the_bytes_of_integers_has_no_code():
    schedule = families.gpipe(ranks=1, microbatches=104)
    row = rows(schedule)[0]
    assert row[103:105] == [F(0, 103), B(0, 0)]
    assert not read_lives(edit(schedule, [[*row[:103], F(0, True), B(0, 0.0), *row[105:]]]))


def test_a_generator_that_raises_or_never_ends_has_no_codes():
    schedule = families.gpipe(ranks=1, microbatches=2)
    assert not read_lives(edit(schedule, [[F(0, 0)] * 1000]))
    assert not read_lives(replace(schedule, ranks=2))  # there is no second rank in the placement


@pytest.fixture(scope="module")
def large():
    return interleaved_1f1b(ranks=32, microbatches=128)


def forbid(*_, **__):
    raise AssertionError("a loop over actions")


def test_large_schedules_are_checked_and_simulated_as_arrays(large, monkeypatch):
    monkeypatch.setattr(rules, "replay", forbid)
    monkeypatch.setattr(simulation, "replay_to_end", forbid)
    check(large)
    assert simulate(large, Costs(F=1, B=2)).makespan > 0
    with pytest.raises(AssertionError, match="a loop"):
        simulate(large, Costs(jitter=0.1))


def test_a_large_schedule_is_played_once_for_those_who_check_and_simulate_it(large, monkeypatch):
    check(large)
    with monkeypatch.context() as patch:
        patch.setattr(abreast, "place_actions", forbid)
        check(large)
        with pytest.raises(AssertionError, match="a loop"):
            check(replace(large))  # another schedule, if an equal one


def test_large_programs_are_lowered_as_arrays(large, monkeypatch):
    program = lower(large)
    found = [*program.actions(5)]
    with monkeypatch.context() as patch:
        patch.setattr(lowering, "_Play", forbid)
        assert [*lower(replace(large, ticks=None)).actions(5)]
        assert [*program.streams([7, 5])[1]] == found
    monkeypatch.setitem(sys.modules, "numpy", None)  # so its import fails
    assert [*program.actions(5)] == found


def test_without_numpy_the_loops_find_the_same(large, monkeypatch):
    found = simulate(large, Costs(F=1.1, B=2.3, comm=0.7))
    with monkeypatch.context() as patch:
        patch.setattr("schedules.analysis.critical_path.spans", forbid)
        path = critical_path(large, Costs(F=1.1, B=2.3, comm=0.7))
    kinds_of.cache_clear()
    assert kinds_of(large) == {"F", "B"}
    kinds_of.cache_clear()
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert kinds_of(large) == {"F", "B"}
    assert critical_path(large, Costs(F=1.1, B=2.3, comm=0.7)) == path
    assert not gate.is_large(large)
    assert gate.play_large(large, wires(large, chain(large.stages), NO_COSTS, UNITS), NO_COSTS) is None
    assert simulate(large, Costs(F=1.1, B=2.3, comm=0.7)) == found


def test_of_a_large_schedule_the_loops_name_what_is_wrong(large):
    changed = rows(large)
    gone = changed[7].pop(100)
    with pytest.raises(ScheduleError) as caught:
        check(edit(large, changed))
    assert caught.value.rank == 7
    assert str(gone) in str(caught.value)
