# SPDX-License-Identifier: Apache-2.0
"""What is simulated is what runs: the times of a schedule are those of its lowered program, and of the executor."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe.runtime.executor import Execution, Inputs
from fpipe.runtime.handlers import TAKERS
from fpipe.runtime.instructions import link
from schedules import (
    KINDS,
    Costs,
    Graph,
    Link,
    SizeError,
    chain,
    critical_path,
    defer_weights,
    dualpipe,
    dualpipe_v,
    families,
    forwards,
    lower,
    mirror,
    offload,
    one_f_one_b,
    overlap,
    recompute,
    simulate,
    split_backward,
    zb_v,
)
from schedules.files.csv import table
from schedules.testing import collective_orders, graphs, orders, require_same_times, schedules, time_program
from tests.common.rows import stays_on_the_device
from tests.common.symbolic import Symbolic, batch, key, runnable, stages_of

FAMILIES = [getattr(families, name) for name in families.__all__]
TRANSFORMS = [
    split_backward,
    recompute,
    offload,
    overlap,
    forwards,
    mirror,
    lambda s: defer_weights(split_backward(s), memory=s.microbatches + s.ranks),
]


@st.composite
def every_cost(draw, stages):
    """Costs of every kind of action, pairs that gain, links and jitter among them."""
    times = st.integers(0, 12).map(lambda quarters: quarters / 4)
    each = times | st.lists(times, min_size=stages, max_size=stages).map(tuple)
    links = st.builds(
        Link,
        latency=times,
        bandwidth=st.sampled_from([1, 4]),
        bytes=each,
        slow=st.just((((0, 1), 3),)),
        back=st.none() | each,
    )
    return draw(
        st.builds(
            Costs,
            **dict.fromkeys([*"FBIWGU", "UNSHARD", "REDUCE_GRAD"], each),
            **dict.fromkeys(("C", "R", "OVERLAP_F"), st.none() | each),
            comm=times | links,
            jitter=st.sampled_from([0, 0, 0.3]),
        )
    )


@settings(deadline=None)
@given(st.one_of(orders(), collective_orders()), st.data())
def test_any_order_takes_as_long_as_its_program(case, data):
    schedule, graph = case
    require_same_times(schedule, graph, data.draw(every_cost(schedule.stages)))


@settings(deadline=None)
@given(schedules(FAMILIES), st.lists(st.sampled_from(TRANSFORMS), max_size=2), st.data())
def test_every_family_and_transform_takes_as_long_as_its_program(s, changes, data):
    for change in changes:
        try:
            s = change(s)
            list(s.actions(0))
        except SizeError:  # mirrored already, or asynchronous
            continue
    s = table(rows=tuple(",".join(map(str, s.actions(rank))) for rank in range(s.ranks)))  # transforms are slow
    graph = chain(s.stages)
    if not any(a.kind == "U" for rank in range(s.ranks) for a in s.actions(rank)):
        graph = data.draw(st.just(graph) | graphs(s.stages))
    require_same_times(s, graph, data.draw(every_cost(s.stages)))


TIED_ON_ONE_RANK = (
    table(rows=("0F0,1F0,1B0,1REDUCE_GRAD0,0B0,0REDUCE_GRAD0,1U0,0U0",)),
    Graph(2, chain(2).values, chain(2).cotangents, frozenset({(0, 1)})),
)


def test_an_update_waits_for_the_reduced_gradient_of_another_stage_on_its_rank():
    """1U0 uses the gradient of stage 0, too, which is reduced later than that of stage 1."""
    schedule, graph = TIED_ON_ONE_RANK
    costs = Costs(REDUCE_GRAD=3, U=1)
    require_same_times(schedule, graph, costs)
    starts = {str(span.action): span.start for span in time_program(lower(schedule, graph), costs)}
    assert (starts["0REDUCE_GRAD0"], starts["1U0"]) == (7, 10)


def test_the_executor_takes_all_reduced_gradients_that_an_update_uses():
    schedule, graph = TIED_ON_ONE_RANK
    stages = {s: Symbolic(graph, s) for s in range(2)}
    linked = link(lower(schedule, graph).actions(0), stages, schedule.placement, phases=2).instructions
    taken = [one.action.stage for one in linked if one.handler is TAKERS["REDUCE_GRAD"]]
    first = next(at for at, one in enumerate(linked) if one.action.kind == "U")
    assert taken == [one.action.stage for one in linked[:first] if one.handler is TAKERS["REDUCE_GRAD"]] == [1, 0]


def test_values_of_a_fused_pair_are_sent_when_it_ends():
    """The forward takes 1 alone, and adds 0.5: no rank can have its value after 0.5."""
    s, gain = overlap(one_f_one_b(4, 16)), Costs(OVERLAP_F=0.5)
    ends = [span.end for span in time_program(lower(s), gain)]
    assert simulate(s, gain).makespan == max(ends) == 94.5
    assert critical_path(s, gain).stretches[-1].span.end == 94.5


# --------------------------------------------------------------------------------------- the executor, on clocks


class Clocks:
    """A transport and a driver on which time passes: a clock per rank, and messages that take their time."""

    def __init__(self, costs, schedule):
        self.costs, self.slices = costs, schedule.slices
        self.factors = costs.factors(schedule.microbatches, schedule.slices)
        self.now, self.spans, self.arrived = {}, {}, {}

    def channel(self, source, target):
        return Ends(self, source, target)

    def work(self, rank, action):
        start = self.now[rank]
        unit = action.microbatch * self.slices + (action.slice or 0)
        self.now[rank] += self.costs.time(action.kind, action.stage) / self.slices * (self.factors or {unit: 1})[unit]
        self.spans[action] = start, self.now[rank]


class Ends:
    def __init__(self, clocks, source, target):
        self.clocks, self.source, self.target = clocks, source, target

    def send(self, message, payload, specs):
        time = self.clocks.costs.transfer(KINDS[message.kind].carries, message.stage, self.source, self.target)
        self.clocks.arrived[message] = self.clocks.now[self.source] + time, payload
        return OnItsWay(self.clocks, message, self.source)

    def receive(self, message, specs):
        return OnItsWay(self.clocks, message, self.target)


class OnItsWay:
    def __init__(self, clocks, message, rank):
        self.clocks, self.message, self.rank = clocks, message, rank

    @property
    def is_done(self):
        arrival, _ = self.clocks.arrived.get(self.message, (float("inf"), None))
        return arrival <= self.clocks.now[self.rank]

    def take(self):
        return self.clocks.arrived[self.message][1]


class Working:
    """A stage whose functions take their time."""

    def __init__(self, stage, work):
        self.stage, self.work = stage, work

    def __getattr__(self, name):
        found = getattr(self.stage, name)
        if name not in ("forward", "evaluate", "backward", "backward_input", "backward_weight"):
            return found

        def timed_function(*arguments):
            self.work()
            return found(*arguments)

        return timed_function


def execute(schedule, graph, costs):
    """When each action starts and ends if fpipe's executor runs the program and functions take their time."""
    clocks, program, runs = Clocks(costs, schedule), lower(schedule, graph), {}
    for rank in range(schedule.ranks):
        held, running = schedule.placement.stages_on(rank), []

        def work(rank=rank, running=running):
            clocks.work(rank, running[0].at.action)

        units = stages_of(graph, held, schedule)
        working = [{s: Working(stage, work) for s, stage in stages.items()} for stages in units]
        inputs = Inputs(
            [dict.fromkeys(held, "")] * len(units),
            [dict.fromkeys(held, ())] * len(units),
            batch,
            list(map(key, range(len(units)))),
        )
        clocks.now[rank] = 0.0
        uneven = dict(enumerate(working))
        linked = link(program.actions(rank), working[0], schedule.placement, uneven, slices=schedule.slices)
        running.append(Execution(rank, linked, clocks, inputs))
        runs[rank] = running[0].run()
    waiting = dict.fromkeys(runs)
    while runs:
        for rank in [rank for rank in runs if waiting[rank] is None or waiting[rank].message in clocks.arrived]:
            if waiting[rank] is not None:
                clocks.now[rank] = max(clocks.now[rank], clocks.arrived[waiting[rank].message][0])
            waiting[rank] = next(runs[rank], None)
            if waiting[rank] is None:
                del runs[rank]
    return clocks.spans


@settings(deadline=None, max_examples=settings().max_examples // 2)
@given(
    runnable().filter(stays_on_the_device)
    | schedules([dualpipe, dualpipe_v, zb_v, one_f_one_b]).map(lambda s: (overlap(s), chain(s.stages))),
    st.data(),
)
def test_the_executor_takes_as_long_as_simulated(case, data):
    schedule, graph = case
    costs = data.draw(every_cost(schedule.stages).map(lambda some: Costs(**{**vars(some), "G": 0, "jitter": 0})))
    got = execute(schedule, graph, costs)
    want = time_program(lower(schedule, graph), costs)
    assert {action: start for action, (start, _) in got.items()} == pytest.approx(
        {span.action: span.start for span in want if span.action.kind != "G"}
    )
