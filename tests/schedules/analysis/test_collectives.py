# SPDX-License-Identifier: Apache-2.0
"""Collectives run one after the other, beside the rank's other actions, and only what uses their results waits."""

import json
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    Costs,
    Graph,
    Sizes,
    chain,
    check,
    critical_path,
    drawing,
    estimate,
    interleaved_1f1b,
    lower,
    memory_over_time,
    reduce_gradients,
    simulate,
    spans,
    summarize,
    update_weights,
)
from schedules.files import pipelining, pipelining_2_15
from schedules.files.csv import table
from schedules.testing import collective_orders

GATHERED = table(
    rows=("0UNSHARD0,1UNSHARD0,0F0,0RESHARD0,1F0,1B0,1RESHARD0,0UNSHARD1,0B0,0REDUCE_GRAD0,0RESHARD1,1REDUCE_GRAD0",)
)
COSTS = Costs(UNSHARD=2, REDUCE_GRAD=3)


def test_a_rank_waits_for_the_weights_of_the_stage_that_it_runs():
    assert drawing.text(GATHERED, COSTS).splitlines() == [
        "rank 0 |.   .   0F0e.   1F0 1B0    e.   .   0B0    e.   .   .   .   .   .   |",
        "       |0A0     1A0     .   .   .   0A1     .   .   0D0         1D0         |",
    ]


def test_reductions_go_on_beside_the_backwards():
    s = reduce_gradients(interleaved_1f1b(ranks=2, microbatches=2, chunks=2))
    assert drawing.text(s, Costs(REDUCE_GRAD=3)).splitlines() == [
        "rank 0 |0F0 0F1 2F0 2F1 .   .   2B0     .   2B1     0B0     0B1     .   .   .   |",
        "       |.   .   .   .   .   .   .   .   .   .   .   2D1         .   0D1         |",
        "rank 1 |.   1F0 1F1 3F0 3B0     3F1 3B1     1B0     1B1     .   .   .   .   .   |",
        "       |.   .   .   .   .   .   .   .   .   3D1         .   1D1         .   .   |",
    ]


def test_an_update_waits_for_the_reduction():
    s = update_weights(reduce_gradients(interleaved_1f1b(ranks=1, microbatches=1, chunks=1)))
    assert simulate(s, Costs(REDUCE_GRAD=3, U=1)).makespan == 1 + 2 + 3 + 1


def test_gathered_weights_count_while_they_are_gathered():
    timeline = simulate(GATHERED, COSTS, sizes=Sizes(gathered=(5, 3), weight=1))
    assert timeline.peak_memory == (2 + 8 + 1,)  # two shards; both stages gathered, and what 0F0 saves
    levels = memory_over_time(spans(GATHERED, COSTS), GATHERED, Sizes(gathered=(5, 3)))
    assert max(level for _, level in levels[0]) == 8 + 1
    assert levels[0][-1][1] == 0


def test_the_critical_path_goes_through_the_collectives():
    path = critical_path(GATHERED, COSTS)
    names = " ".join(str(stretch.span.action) for stretch in path.stretches)
    assert names == "0UNSHARD0 1UNSHARD0 1F0 1B0 1RESHARD0 0UNSHARD1 0B0 0REDUCE_GRAD0 1REDUCE_GRAD0"


@settings(deadline=None)
@given(collective_orders(), st.integers(0, 8), st.integers(0, 8))
def test_the_critical_path_is_as_long_as_the_step(case, gather, reduce):
    schedule, graph = case
    times = Costs(UNSHARD=gather / 4, REDUCE_GRAD=reduce / 4, comm=0.5, G=0.25, U=0.5)
    path = critical_path(schedule, times, graph)
    length = sum(span.end - span.start + transfer for span, transfer in path.stretches)
    assert length == pytest.approx(simulate(schedule, times, graph).makespan)


def test_the_critical_path_of_an_update_goes_through_its_own_replica_of_a_shared_gradient():
    """2U0 takes 1G0 from rank 2. It starts while 1G1, of the other replica, is still on its way to 2U1."""
    s = table(rows=("1F1,2F0,2B0,1B1,1G1,1U1,2G0,2U0", "0F0,0F1,2F1,2B1,2G1,2U1,0B1,0B0,0U1", "1F0,1B0,1G0,1U0"))
    times = Costs(F=2, B=0, comm=1, U=1)
    graph = Graph(3, chain(3).values, chain(3).cotangents, frozenset({(0, 1), (1, 2)}))
    path = critical_path(s, times, graph)
    length = sum(span.end - span.start + transfer for span, transfer in path.stretches)
    assert length == simulate(s, times, graph).makespan == 16


@settings(deadline=None)
@given(collective_orders(), st.integers(0, 8), st.integers(0, 8))
def test_totals_are_those_of_the_spans(case, gather, reduce):
    schedule, graph = case
    times, sizes = Costs(UNSHARD=gather / 4, REDUCE_GRAD=reduce / 4, U=0.5), Sizes(gathered=4, weight=1)
    check(schedule, graph)
    timeline = list(spans(schedule, times, graph))
    assert summarize(timeline, schedule, sizes) == simulate(schedule, times, graph, sizes)
    estimated = estimate(schedule, timeline)
    assert {estimated.UNSHARD, estimated.REDUCE_GRAD} <= {0, *_each(gather / 4, schedule), *_each(reduce / 4, schedule)}


def _each(time, schedule):
    """Return what `estimate` may make of one time: it for all stages, or 0 for those without."""
    return set(product((0, time), repeat=schedule.stages))


def test_a_trace_has_a_thread_for_the_collectives():
    events = json.loads(drawing.trace({"": spans(GATHERED, COSTS)}))["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == {0: "rank 0", 1: "rank 0, collectives"}
    assert {event["name"] for event in events if event["ph"] == "X" and event["tid"] == 1} == {
        *(
            "0UNSHARD0",
            "1UNSHARD0",
            "0UNSHARD1",
            "0RESHARD0",
            "1RESHARD0",
            "0RESHARD1",
            "0REDUCE_GRAD0",
            "1REDUCE_GRAD0",
        )
    }


def test_torch_gets_the_collectives_that_a_program_has():
    assert pipelining(lower(GATHERED), 0) == (
        "0UNSHARD,1UNSHARD,0F0,0RESHARD,1F0,1B0,1RESHARD,0UNSHARD,0B0,0REDUCE_GRAD,0RESHARD,1REDUCE_GRAD"
    )
    assert pipelining(GATHERED, 0) == "0F0,1F0,1B0,0B0"
    reduced = reduce_gradients(interleaved_1f1b(ranks=1, microbatches=1, chunks=2))
    assert pipelining_2_15(lower(reduced), 0) == (
        "0UNSHARD,0F0,1UNSHARD,1F0,1B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1RESHARD,"
        "0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD"
    )
