# SPDX-License-Identifier: Apache-2.0
"""A schedule that is connected to a stage graph is taken for that graph wherever none is given."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    F,
    GraphError,
    ScheduleError,
    SizeError,
    chain,
    check,
    connect,
    dag,
    forwards,
    gpipe,
    lower,
    mirror,
    overlap,
    schedule,
    simulate,
    split_backward,
)
from schedules.files.csv import table
from schedules.proof.interpreter import prove
from schedules.testing import conformance, graphs, orders, require_round_trip
from schedules.transforms.connect import format_graph, parse_graph

TOWERS = dag(3, {(0, 2), (1, 2)})


@schedule()
def two_towers(rank, ranks, microbatches):
    """Stages 0 and 1 know nothing of each other; along a chain, 1 would wait for 0."""
    order = range(microbatches) if rank != 1 else reversed(range(microbatches))
    passes = list(gpipe(ranks, microbatches).actions(rank))
    yield from (F(rank, i) for i in order)
    yield from passes[microbatches:]


def towers(s):
    return dag(s.stages, {(t, s.stages - 1) for t in range(s.stages - 1)})


def few(ranks, microbatches):
    if max(ranks, microbatches) > 4:
        raise SizeError("too many")
    return two_towers(ranks, microbatches)


test_a_schedule_for_one_graph_conforms = conformance(few, graph=towers)


def both_towers_on_a_rank():
    return table(rows=("1F0,0F0,0B0,1B0", "2F0,2B0"))


def test_a_connected_schedule_prints_without_false_violations():
    s = both_towers_on_a_rank()
    assert "1F0!" in str(s)
    assert str(s).endswith("For another stage graph, print connect(schedule, graph).")
    right = "rank 0 |1F0 0F0 .   .   .   0B0     1B0     |\nrank 1 |.   .   2F0 2B0     .   .   .   .   |"
    assert str(connect(s, TOWERS)) == str(lower(s, TOWERS)) == right


def test_a_real_violation_does_not_mention_chains():
    s = table(rows=("0B0,0F0",))
    assert "connect" not in str(s)


def test_a_schedule_for_one_graph_does_not_conform_to_others():
    with pytest.raises(ScheduleError):
        conformance(lambda ranks, microbatches: connect(both_towers_on_a_rank(), chain(3)))()


@settings(deadline=None)
@given(orders())
def test_a_connected_schedule_is_correct_for_its_graph(case):
    s, graph = case
    connected = connect(s, graph)
    assert [list(connected.actions(rank)) for rank in range(s.ranks)] == [list(s.actions(r)) for r in range(s.ranks)]
    check(connected)
    prove(connected)
    assert lower(connected).graph == graph
    assert simulate(connected) == simulate(s, graph=graph)
    for changed in (overlap(connected), split_backward(connected), forwards(connected)):
        assert changed.graph == graph
        check(changed)
    updates = any(a.kind == "U" for rank in range(s.ranks) for a in s.actions(rank))
    if not s.placement.mirrors and not updates:
        check(mirror(connected))


def towered(microbatches):
    """Both towers on a rank, the second first, which along a chain gets nowhere."""
    first = [f"1F{i},0F{i}" for i in range(microbatches)]
    back = [f"0B{i},1B{i}" for i in range(microbatches)]
    steps = [*first[:2], *(step for pair in zip(first[2:], back[:-2], strict=True) for step in pair), *back[-2:]]
    return table(rows=(",".join(steps), ",".join(f"2F{i},2B{i}" for i in range(microbatches))))


def test_towers_are_mirrored_and_overlapped_side_by_side():
    s, chains = gpipe(8, 2), {(s, s + 1) for s in range(7)} - {(3, 4)}
    two = dag(8, chains | {(3, 7)})
    assert (simulate(mirror(connect(s, two))).makespan, simulate(mirror(s), graph=two).makespan) == (22, 30)
    assert list(mirror(both_towers_on_a_rank()).actions(0))[:2] == [F(1, 0), F(0, 0)], "as it stands: all is stuck"
    assert list(mirror(connect(both_towers_on_a_rank(), TOWERS)).actions(0))[:3] == [F(1, 0), F(0, 0), F(2, 1)]
    apart, along = (overlap(one) for one in (towered(4), connect(towered(4), TOWERS)))
    assert [sum(a.kind == "OVERLAP_F" for a in one.actions(0)) for one in (apart, along)] == [0, 2]


@given(st.integers(1, 6).flatmap(graphs))
def test_the_text_form_includes_the_whole_graph(graph):
    assert parse_graph(format_graph(graph), graph.stages) == graph
    s = connect(gpipe(graph.stages, 1), graph)
    require_round_trip(s)
    assert pickle.loads(pickle.dumps(s)).graph == graph
    assert s != gpipe(graph.stages, 1)
    assert connect(gpipe(graph.stages, 1), graph) == s
    assert hash(connect(gpipe(graph.stages, 1), graph)) == hash(s)


@pytest.mark.parametrize("graph", [chain(2), None, "0-1"])
def test_a_graph_with_other_stages_is_refused(graph):
    with pytest.raises(GraphError, match=r"connect: got .* expected a Graph of 3"):
        connect(gpipe(3, 1), graph)
